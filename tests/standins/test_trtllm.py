"""`xqa` and `trtllm` over stand-ins of FlashInfer's entry points: the whole path but the kernels themselves."""

import inspect
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs

import attnops
from attnops.cache import PagedCache
from attnops.core.errors import InvalidInput, NoKernel, NotLoaded
from attnops.core.kernel import all_kernels, generation, kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import choose, select, workspace_bytes
from attnops.kernels.flashinfer import devices, modules, trtllm
from attnops.kernels.shared import memory
from attnops.ops import OPS
from attnops.testing import Features, Mismatch, Pages, Source, check_kernel, equip, make_call
from tests.lowering.models import compiled_code, kernel_calls
from tests.standins import flashinfer_trtllm as standin

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
TARGETS = {"xqa": Target("cuda", 90, assume=("flashinfer",)), "trtllm": Target("cuda", 100, assume=("flashinfer",))}
PAGED, VARLEN = kernels_of("paged_attention"), kernels_of("varlen_attention")
BASE = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True)
FLOAT8 = replace(BASE, kv_dtype=E4M3, scale_per_head=False)
LSE = replace(BASE, lse=True)


@pytest.fixture(autouse=True)
def calls():
    if find_spec("flashinfer"):
        pytest.skip("flashinfer is installed, and stand-ins under its name would hide it")
    with standin.installed() as found:
        yield found


def paged(f=BASE, q_lens=(1, 1, 1), seq_lens=(70, 3, 33), page=16, padding=0, **more):
    return make_call("paged_attention", Source(0), q_lens, seq_lens, page, f, padding, **more)


def interleaved(f, **more):
    return paged(f, pages=Pages(interleaved=True), **more)


DECODE = {
    **{f"page_{n}": lambda n=n: paged(page=n) for n in (16, 32, 64, 128)},
    **{f"heads_{q}_{kv}": lambda q=q, kv=kv: paged(replace(BASE, q_heads=q, kv_heads=kv)) for q, kv in ((4, 4), (6, 2), (8, 1), (16, 1))},
    **{f"d{d}": lambda d=d: paged(replace(BASE, head_dim=d)) for d in (128, 256)},
    "float16": lambda: paged(replace(BASE, dtype=F16)),
    "float8": lambda: paged(FLOAT8, page=64),
    "sinks": lambda: paged(replace(BASE, sinks=F32)),
    "sinks_bfloat16": lambda: paged(replace(BASE, sinks=BF16, window=(15, -1))),
    "window": lambda: paged(replace(BASE, window=(15, -1))),
    "window_self": lambda: paged(replace(BASE, window=(0, -1))),
    "all_keys": lambda: paged(replace(BASE, causal=False)),
    "scale": lambda: paged(replace(BASE, scale=0.3)),
    "loud": lambda: paged(replace(BASE, loud=True)),
    "long": lambda: paged(seq_lens=(300, 1, 513), page=64),
    "long_empty": lambda: paged(seq_lens=(300, 0, 513), page=64),
    "long_empty_sinks": lambda: paged(replace(BASE, sinks=F32), seq_lens=(300, 0, 513), page=64),
    "idle": lambda: paged(q_lens=(1, 0, 1), padding=1),
    "padded": lambda: paged(padding=3),
    "no_keys": lambda: paged(seq_lens=(0, 0, 0)),
    "no_table": lambda: paged(seq_lens=(0, 0, 0), pages=Pages(wider=0)),
    "no_pages": lambda: paged(seq_lens=(0, 0, 0), pages=Pages(spare=0)),
    "no_requests": lambda: paged(q_lens=(), seq_lens=(), padding=2, slack=1),
    "nothing": lambda: paged(q_lens=(), seq_lens=(), pages=Pages(spare=0, wider=0)),
    "shared": lambda: paged(pages=Pages(shared=True)),
    "interleaved": lambda: interleaved(BASE),
    "interleaved_float8": lambda: interleaved(FLOAT8),
}
EXTEND = {
    "decode_lse": lambda: paged(LSE),
    "decode_empty_lse": lambda: paged(LSE, seq_lens=(5, 0, 20), padding=2),
    "verify": lambda: paged(LSE, q_lens=(3, 1, 4)),
    "verify_float8": lambda: paged(replace(FLOAT8, lse=True), q_lens=(3, 1, 4)),
    "verify_all_keys": lambda: paged(replace(LSE, causal=False), q_lens=(3, 1, 4)),
    "extend": lambda: paged(LSE, q_lens=(20, 1, 0), padding=5),
    "extend_sinks": lambda: paged(replace(BASE, sinks=BF16), q_lens=(20, 1, 9)),
    "extend_window": lambda: paged(replace(LSE, window=(11, -1)), q_lens=(20, 3, 9)),
    "extend_all_keys": lambda: paged(replace(LSE, causal=False), q_lens=(20, 3, 9)),
    "extend_more_queries_than_keys": lambda: paged(LSE, q_lens=(20, 9, 9)),
    "extend_float16": lambda: paged(replace(LSE, dtype=F16, head_dim=128), q_lens=(20, 3, 9), page=64),
    "prefill": lambda: paged(LSE, q_lens=(30, 11), seq_lens=(30, 11), slack=3),
}


def dims(d, dv=None, **more):
    return replace(LSE, head_dim=d, v_head_dim=dv, q_heads=4, kv_heads=4, **more)


PACKED = {
    "deepseek": lambda: make_call("varlen_attention", Source(0), (5, 9), (5, 9), dims(192, 128)),
    "d128": lambda: make_call("varlen_attention", Source(0), (5, 9), (7, 9), dims(128)),
    "d256_float16": lambda: make_call("varlen_attention", Source(0), (5, 9), (7, 30), dims(256, dtype=F16), slack=3),
    "no_lse": lambda: make_call("varlen_attention", Source(0), (5, 9), (5, 9), replace(dims(192, 128), lse=False)),
    "all_keys": lambda: make_call("varlen_attention", Source(0), (5, 9), (7, 4), dims(128, causal=False)),
    "window": lambda: make_call("varlen_attention", Source(0), (5, 9), (7, 20), dims(128, window=(3, -1))),
    "fewer_keys": lambda: make_call("varlen_attention", Source(0), (5, 0, 3, 2), (2, 4, 0, 7), dims(192, 128)),
    "last_without_keys": lambda: make_call("varlen_attention", Source(0), (5, 3), (9, 0), dims(192, 128), padding=(0, 0)),
    "no_keys": lambda: make_call("varlen_attention", Source(0), (3, 1), (0, 0), dims(128), padding=(0, 0)),
    "no_requests": lambda: make_call("varlen_attention", Source(0), (), (), dims(128)),
}
POINTS = [
    *(pytest.param(PAGED["xqa"], make, id=f"xqa-{n}") for n, make in DECODE.items()),
    *(pytest.param(PAGED["trtllm"], make, id=f"trtllm-{n}") for n, make in (DECODE | EXTEND).items()),
    *(pytest.param(VARLEN["trtllm"], make, id=f"trtllm-packed-{n}") for n, make in PACKED.items()),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kernel", "make"), POINTS)
def test_kernel(kernel, make):
    with pretend(TARGETS[kernel.name]):
        figures = check_kernel(kernel, make())
    assert not figures.refused, figures
    assert figures.worst <= 1.0


def test_which_of_its_kernels_trtllm_calls(calls):
    with pretend(TARGETS["trtllm"]):
        for make, name in ((DECODE["page_16"], "decode"), (EXTEND["verify"], "decode"), (EXTEND["extend"], "context"),
                           (EXTEND["verify_all_keys"], "context")):  # fmt: skip
            calls.clear()
            check_kernel(PAGED["trtllm"], make())
            assert [c for c, _ in calls] == [f"trtllm_batch_{name}_with_kv_cache"]


def test_the_pages_are_not_copied(calls):
    for name in ("xqa", "trtllm"):
        with pretend(TARGETS[name]):
            call = equip(PAGED[name], interleaved(BASE))
            PAGED[name].run(call.record)
        given = calls[-1][1]
        pages = given["kv_cache"] if name == "trtllm" else (given["k_cache"], given["v_cache"])
        assert [p.data_ptr() for p in pages] == [call.arguments[n].data_ptr() for n in ("k_pages", "v_pages")]


# The workspace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "make"), [("xqa", DECODE["long"]), ("trtllm", DECODE["long"]), ("trtllm", EXTEND["extend"])])
def test_kernels_take_turns_with_one_workspace(name, make):
    with pretend(TARGETS[name]):
        kernel, call = PAGED[name], make()
        size = kernel.workspace_bytes(call.problem)
        workspace = torch.zeros(size + 1000, dtype=torch.uint8)
        ready = call.with_(workspace=workspace)
        for _ in range(2):
            kernel.run(ready.record)
            assert workspace[memory.COUNTERS :].any(), "the stand-in soils what may be soiled"
            assert not workspace[: memory.COUNTERS].any()
        workspace[0] = 1
        with pytest.raises(AssertionError, match="counters that are not zero"):
            kernel.run(ready.record)


def test_the_exact_size_is_enough_and_one_byte_less_is_not():
    for name, make in (("xqa", DECODE["long"]), ("trtllm", DECODE["long"]), ("trtllm", EXTEND["extend"])):
        with pretend(TARGETS[name]):
            kernel, call = PAGED[name], make()
            size = kernel.workspace_bytes(call.problem)
            assert kernel.refusals(call.problem)[-1].field == "workspace"
            less, exact = (call.with_(workspace=torch.zeros(n, dtype=torch.uint8)) for n in (size - 1, size))
            assert str(kernel.refusals(less.problem)[0]) == (
                f"workspace={size - 1} bytes (wants >= {size} bytes, zeroed once: attnops.explain(...).workspace_bytes)"
            )
            assert check_kernel(kernel, exact).worst <= 1.0


@pytest.mark.parametrize("name", ["xqa", "trtllm"])
def test_a_workspace_that_does_not_serve_is_named(name):
    kernel, call = PAGED[name], DECODE["page_16"]()
    with pretend(TARGETS[name]):
        size = kernel.workspace_bytes(call.problem)
        short = memory.total(trtllm.scratch_bytes(4, 64) if name == "xqa" else trtllm.split_bytes(64))
        assert short == size
        with pytest.raises(InvalidInput, match=rf"^workspace: got None, want >= {size} bytes"):
            kernel.run(call.record)
        with pytest.raises(InvalidInput, match=rf"^workspace: got {size - 1} bytes, want >= {size} bytes"):
            kernel.run(call.with_(workspace=torch.zeros(size - 1, dtype=torch.uint8)).record)
        with pytest.raises(InvalidInput, match=r"at an address not a multiple of 16, want"):
            kernel.run(call.with_(workspace=torch.zeros(size + 1, dtype=torch.uint8)[1:]).record)


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        (torch.zeros(8), r"^workspace.dtype: got float32, want uint8"),
        (torch.zeros(2, 2, dtype=torch.uint8), r"^workspace: got shape \(2, 2\)"),
        (torch.zeros(8, dtype=torch.uint8)[::2], r"^workspace.stride\(\): got \(2,\)"),
    ],
)
def test_bad_workspaces_are_refused_by_the_op(workspace, message):
    call = DECODE["page_16"]()
    with pytest.raises(InvalidInput, match=message):
        OPS["paged_attention"].packet.default(*call.args, **call.with_(workspace=workspace).kwargs)


def test_choice_with_and_without_a_workspace():
    call = DECODE["float8"]()
    with pretend(TARGETS["xqa"]):
        assert select(call.problem).kernel.name != "xqa"
        size = workspace_bytes(call.problem)
        assert size == PAGED["xqa"].workspace_bytes(call.problem)
        assert choose(call.with_(workspace=torch.zeros(size, dtype=torch.uint8)).problem).name == "xqa"
        assert workspace_bytes(paged(replace(FLOAT8, mask="bool")).problem) == 0


def test_unknown_sizes_count_as_their_hints():
    known = EXTEND["extend"]()
    with pretend(TARGETS["trtllm"]):
        unknown = altered(known.problem, batch=Extent(0, None, 4), queries=Extent(0, None, 32))
        assert trtllm.workspace_bytes(unknown) == trtllm.workspace_bytes(known.problem)


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["xqa", "trtllm"])
def test_compiled_with_a_workspace_that_no_one_copies(name, all_have_run):
    call = DECODE["float8"]()
    given = {n: t for n, t in call.tensors().items() if n != "output"}

    def run(workspace, **tensors):
        x = tensors["query"] * 2
        for _ in range(2):
            x = attnops.paged_attention(**tensors | {"query": x}, max_seqlen_q=1, workspace=workspace)
        return x

    with pretend(TARGETS[name]), torch.no_grad():
        size = attnops.explain(lambda: run(None, **given), target=TARGETS[name], quiet=True).workspace_bytes
        assert size == PAGED[name].workspace_bytes(call.problem)
        workspace = torch.zeros(size, dtype=torch.uint8)
        got, code = compiled_code(lambda: torch.compile(run, fullgraph=True)(workspace, **given))
        want = run(workspace, **given)
    assert kernel_calls(code) == [f"paged_attention.{name}"] * 2
    assert f"empty_strided_cpu(({size}," not in code
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_cache_brings_it_to_a_layer():
    layer = attnops.nn.Attention(8, 2, head_dim=64, kernel="xqa")
    q, k = torch.randn(1, 8, 64).to(BF16), torch.randn(1, 2, 64).to(BF16)

    def step(size):
        cache = PagedCache(1, 8, 16, 2, 64, max_requests=3, max_pages_per_request=4, dtype=BF16, device="cpu", workspace_bytes=size)
        batch = cache.batch([cache.alloc()], 1)
        return lambda: layer(q, k, k, batch=batch, k_pages=cache.k_pages[0], v_pages=cache.v_pages[0])

    with pretend(TARGETS["xqa"]), torch.no_grad():
        asked = attnops.explain(step(0), target=TARGETS["xqa"], quiet=True)
        assert asked.workspace_bytes == memory.total(trtllm.scratch_bytes(4, 64))
        with pytest.raises(NoKernel, match="workspace=0 bytes"):
            step(0)()
        call = step(asked.workspace_bytes)
        assert attnops.explain(call, target=TARGETS["xqa"], quiet=True).chosen()[-1] == "paged_attention.xqa"
        got, code = compiled_code(lambda: torch.compile(call, fullgraph=True)())
        assert "paged_attention.xqa" in kernel_calls(code)
        torch.testing.assert_close(got, k.repeat_interleave(4, 1))


def test_packed_prefill_compiled_and_with_a_gradient():
    backend = EagerAndRecordGraphs()
    call = PACKED["deepseek"]()
    t = call.arguments
    query = t["query"].clone().requires_grad_()

    def run(query):
        return attnops.varlen_attention(
            query, t["key"], t["value"], t["cu_seqlens_q"], t["cu_seqlens_k"], max_seqlen_q=9, max_seqlen_k=9, causal=True
        )

    # The kernel that this target would choose for the gradient does not run on a CPU.
    forced = {"varlen_attention": "trtllm", "varlen_attention_backward": "reference"}
    with pretend(TARGETS["trtllm"]), attnops.use(kernel=forced):
        compiled = torch.compile(run, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend), fullgraph=True)(query)
        eager = run(query)
        torch.testing.assert_close(compiled, eager)
        a, b = (torch.autograd.grad(x[:14].float().square().sum(), query)[0] for x in (compiled, eager))
    torch.testing.assert_close(a[:14], b[:14])


# Refusals -------------------------------------------------------------------------------------------------------------


def test_pages_of_odd_strides_are_seen():
    call = paged()
    apart = call.map(lambda n, t: torch.nn.functional.pad(t, (0, 8))[..., :64] if n in ("k_pages", "v_pages") else t)
    mixed = call.with_(v_pages=call.arguments["v_pages"].transpose(1, 2).contiguous().transpose(1, 2))
    for odd, alike in ((call, True), (interleaved(BASE), True), (apart, False), (mixed, False)):
        assert odd.problem.pages.pages_alike is alike


def test_the_stand_ins_refuse_what_the_wrappers_shield_from():
    with pretend(TARGETS["xqa"]):
        call = equip(PAGED["xqa"], interleaved(BASE))
        apart = call.with_(v_pages=call.arguments["v_pages"].contiguous())
        with pytest.raises(AssertionError, match="the strides of K serve for V"):
            PAGED["xqa"].run(apart.record)
        for change, text in (({"page": 8}, "Invalid page_size: 8"), ({"f": replace(BASE, head_dim=24)}, "Invalid head_dim: 24")):
            wrong = paged(**change).with_(workspace=call.arguments["workspace"])
            with pytest.raises(ValueError, match=text):
                PAGED["xqa"].run(wrong.record)
    with pretend(TARGETS["xqa"]), pytest.raises(RuntimeError, match="Missing TRTLLM-GEN kernel"):
        call = equip(PAGED["trtllm"], paged()).with_(workspace=torch.zeros(100 << 20, dtype=torch.uint8))
        PAGED["trtllm"].run(call.record)


def test_a_kernel_that_reads_unused_slots_is_caught():
    # What FlashInfer's own choice for float8 on SM90 does; the grid must see it.
    @wraps(PAGED["xqa"].run)
    def leaky(call):
        PAGED["xqa"].run(call)
        call.output.add_(call.v_pages[0, -1, 0, 0].float() * 0)

    with pretend(TARGETS["xqa"]), pytest.raises(Mismatch):
        call = paged(FLOAT8, seq_lens=(1, 1, 1))
        check_kernel(replace(PAGED["xqa"], run=leaky), call)


def test_a_host_without_a_compiler_is_named(monkeypatch):
    monkeypatch.setattr(modules.shutil, "which", lambda name: None)
    monkeypatch.setattr(modules, "CUDA", "/nowhere")
    assert "flashinfer without nvcc and ninja" in str(modules.no_compiler(Target("cuda", 90)))
    assert modules.no_compiler(TARGETS["xqa"]) is None, "the probe looks for no package that the target assumes"


# Several GPUs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    for known in (devices._loaded_on, devices._failures):
        known.cache_clear()
    monkeypatch.setattr(devices, "visible", lambda: 2)
    yield
    for known in (devices._loaded_on, devices._failures):
        known.cache_clear()


def loaded(calls):
    return [given["path"] for name, given in calls if name == "load"]


@pytest.mark.parametrize("case", ["page_16", "float8", "sinks", "window"])
def test_a_copy_of_the_library_is_called_as_the_package_calls_it(two_gpus, case, calls):
    with pretend(TARGETS["xqa"]):
        assert check_kernel(PAGED["xqa"], DECODE[case]()).worst <= 1.0
    assert "xqa_wrapper" in [name for name, _ in calls] and "get_xqa_module" not in [name for name, _ in calls]


def test_each_gpu_has_a_library_of_its_own(two_gpus, calls):
    key = (BF16, BF16, 16, 64, 4, False, BF16, 1)
    with pretend(TARGETS["xqa"]):
        first, second, again = (devices.xqa_module(torch.device("cuda", i), *key) for i in (0, 1, 0))
    original, own, _, other = loaded(calls)
    assert first is again and first is not second
    assert len({original, own, other}) == 3 and not own.exists(), "no copy stays behind"


def test_one_gpu_takes_the_package_as_it_is(calls):
    with pretend(TARGETS["xqa"]):
        devices.xqa_module(torch.device("cuda", 0), BF16, BF16, 16, 64, 4, False, BF16, 1)
    assert [name for name, _ in calls] == ["get_xqa_module"]


def test_where_no_copy_loads_xqa_says_so_and_is_chosen_no_more(two_gpus, monkeypatch):
    def load(self, path):
        assert path == self.path, "failed to map segment from shared object"

    here = Target("cuda", 90)
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.setattr(standin._Spec, "load", load)
    assert devices.xqa_missing(here) is None
    before = generation()
    with pytest.raises(NotLoaded, match=r"failed to map.* want a copy of xqa.so in .* \(TMPDIR\) .*CUDA_VISIBLE_DEVICES"):
        devices.xqa_module(torch.device("cuda", 1), BF16, BF16, 16, 64, 4, False, BF16, 1)
    assert generation() > before, "calls choose anew"
    assert "a copy of xqa.so" in str(devices.xqa_missing(here))


def test_a_temporary_folder_without_libraries_is_named(two_gpus, monkeypatch):
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.setattr(devices.os, "statvfs", lambda folder: SimpleNamespace(f_flag=devices.os.ST_NOEXEC))
    assert "TMPDIR" in str(devices.xqa_missing(Target("cuda", 90)))
    assert devices.xqa_missing(TARGETS["xqa"]) is None, "another machine"
    monkeypatch.setattr(devices, "visible", lambda: 1)
    assert devices.xqa_missing(Target("cuda", 90)) is None


def test_trtllm_refuses_a_second_gpu(two_gpus, monkeypatch):
    """It would launch the first one's kernels there."""
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    generated = [k for k in all_kernels() if k.name.startswith("trtllm")]
    assert len(generated) == 3
    for kernel in generated:
        assert "devices=2" in str(kernel.probe(Target("cuda", 100)))
        assert kernel.probe(TARGETS["trtllm"]) is None, "another machine"


# The truth about the foreign functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", standin.SIGNATURES)
def test_the_stand_ins_have_the_signatures_as_read(path, calls):
    module, name = path.split(".")
    found = inspect.signature(getattr(__import__(f"flashinfer.{module}", fromlist=[name]), name))
    assert str(found) == f"({standin.SIGNATURES[path]})"
