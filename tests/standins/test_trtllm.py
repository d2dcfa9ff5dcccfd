"""`xqa` and `trtllm` over stand-ins of FlashInfer's entry points: the whole path but the kernels
themselves."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import attnops
from attnops.cache import PagedCache
from attnops.core.errors import InvalidInput, NoKernel, NotLoaded
from attnops.core.kernel import all_kernels, generation, kernels_of
from attnops.core.problem import Extent, Target, altered
from attnops.core.select import choose, select, workspace_bytes
from attnops.kernels.flashinfer import devices, modules, trtllm
from attnops.kernels.shared import memory
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Pages, Source, check_kernel, make_call
from tests.checks import right
from tests.lowering.models import compiled_code, kernel_calls
from tests.standins import flashinfer_trtllm as standin
from tests.standins.calls import latents
from tests.standins.vendors import VENDORS

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
NAME = "xqa"
MODULE = (BF16, BF16, 16, 64, 4, False, BF16, 1)
PAGED = kernels_of("paged_attention")
BASE = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True)
FLOAT8 = replace(BASE, kv_dtype=E4M3, scale_per_head=False)
LSE = replace(BASE, lse=True)


def paged(f=BASE, q_lens=(1, 1, 1), seq_lens=(70, 3, 33), page=16, padding=0, **more):
    return make_call("paged_attention", Source(0), q_lens, seq_lens, page, f, padding, **more)


def interleaved(f, **more):
    return paged(f, pages=Pages(interleaved=True), **more)


POINTS = {
    **{f"page_{n}": lambda n=n: paged(page=n) for n in (64, 128)},
    "float8": lambda: paged(FLOAT8, page=64),
    "sinks": lambda: paged(replace(BASE, sinks=BF16, window=(15, -1))),
    "group_and_dim": lambda: paged(replace(BASE, q_heads=16, kv_heads=1, head_dim=256)),
    "long_empty": lambda: paged(seq_lens=(300, 0, 513), page=64),
    "long_empty_sinks": lambda: paged(replace(BASE, sinks=F32), seq_lens=(300, 0, 513), page=64),
    "idle": lambda: paged(q_lens=(1, 0, 1), padding=1),
    "interleaved": lambda: interleaved(FLOAT8),
}
QUERIES = {
    "verify": lambda: paged(LSE, q_lens=(3, 1, 4)),
    "verify_float8": lambda: paged(replace(FLOAT8, lse=True), q_lens=(3, 1, 4)),
    "verify_all_keys": lambda: paged(replace(LSE, causal=False), q_lens=(3, 1, 4)),
    "extend": lambda: paged(LSE, q_lens=(20, 1, 0), padding=5),
    "more_queries_than_keys": lambda: paged(LSE, q_lens=(20, 9, 9)),
}


@pytest.mark.parametrize(
    ("name", "point"), [("xqa", n) for n in POINTS] + [("trtllm", n) for n in POINTS | QUERIES]
)
def test_points_that_are_not_in_the_grid(name, point):
    with VENDORS[name].running():
        right(PAGED[name], (POINTS | QUERIES)[point]())


def test_which_of_its_kernels_trtllm_calls():
    with VENDORS["trtllm"].running() as calls:
        for point, name in (
            ("verify", "decode"),
            ("extend", "context"),
            ("verify_all_keys", "context"),
        ):
            calls.clear()
            check_kernel(PAGED["trtllm"], QUERIES[point]())
            assert [c for c, _ in calls] == [f"trtllm_batch_{name}_with_kv_cache"]


LARGE = [
    ("xqa", POINTS["long_empty"]),
    ("trtllm", POINTS["long_empty"]),
    ("trtllm", QUERIES["extend"]),
    ("trtllm_mla", lambda: latents((1, 2, 1), f=replace(DEEPSEEK, lse=True), padding=1)),
]


@pytest.mark.parametrize(("name", "make"), LARGE)
def test_kernels_take_turns_with_one_workspace(name, make):
    with VENDORS[name].running():
        call = make()
        kernel = kernels_of(call.op)[name]
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


@pytest.mark.parametrize(("name", "make"), LARGE)
def test_the_exact_size_is_enough_and_one_byte_less_is_not(name, make):
    def scratch(size):
        return torch.zeros(size, dtype=torch.uint8)

    with VENDORS[name].running():
        call = make()
        kernel = kernels_of(call.op)[name]
        size = kernel.workspace_bytes(call.problem)
        right(kernel, call.with_(workspace=scratch(size)))
        short = (
            (None, "None"),
            (scratch(memory.COUNTERS), r"\d+ bytes"),
            (scratch(size + 1)[1:], ".* at an address not a multiple of 16"),
        )
        for workspace, got in short:
            with pytest.raises(InvalidInput, match=rf"^workspace: got {got}, want >= \d+ bytes"):
                kernel.run(call.with_(workspace=workspace).record)
        [refusal] = kernel.refusals(call.with_(workspace=scratch(size - 1)).problem)
        assert str(refusal) == (
            f"workspace={size - 1} bytes (wants >= {size} bytes, zeroed once: "
            "attnops.explain(...).workspace_bytes)"
        )


@pytest.mark.parametrize("name", ["xqa", "trtllm"])
def test_a_run_with_one_byte_less_is_refused(name):
    call = paged()
    with VENDORS[name].running():
        size = PAGED[name].workspace_bytes(call.problem)
        less = call.with_(workspace=torch.zeros(size - 1, dtype=torch.uint8))
        refused = rf"^workspace: got {size - 1} bytes, want >= {size} bytes"
        with pytest.raises(InvalidInput, match=refused):
            PAGED[name].run(less.record)


def test_choice_with_and_without_a_workspace():
    call = POINTS["float8"]()
    with VENDORS["xqa"].running():
        assert select(call.problem).kernel.name != "xqa"
        size = workspace_bytes(call.problem)
        assert size == PAGED["xqa"].workspace_bytes(call.problem)
        assert (
            choose(call.with_(workspace=torch.zeros(size, dtype=torch.uint8)).problem).name == "xqa"
        )
        assert workspace_bytes(paged(replace(FLOAT8, mask="bool")).problem) == 0


def test_unknown_sizes_count_as_their_hints():
    known = QUERIES["extend"]()
    with VENDORS["trtllm"].running():
        unknown = altered(known.problem, batch=Extent(0, None, 4), queries=Extent(0, None, 32))
        assert trtllm.workspace_bytes(unknown) == trtllm.workspace_bytes(known.problem)


def test_a_cache_brings_it_to_a_layer():
    layer = attnops.nn.Attention(8, 2, head_dim=64, kernel="xqa")
    q, k = torch.randn(1, 8, 64).to(BF16), torch.randn(1, 2, 64).to(BF16)

    def step(size):
        cache = PagedCache(
            1,
            8,
            16,
            2,
            64,
            max_requests=3,
            max_pages_per_request=4,
            dtype=BF16,
            device="cpu",
            workspace_bytes=size,
        )
        batch = cache.batch([cache.alloc()], 1)
        return lambda: layer(
            q, k, k, batch=batch, k_pages=cache.k_pages[0], v_pages=cache.v_pages[0]
        )

    with VENDORS["xqa"].running(), torch.no_grad():
        asked = attnops.explain(step(0), target=VENDORS["xqa"].target, quiet=True)
        assert asked.workspace_bytes == memory.total(trtllm.scratch_bytes(4, 64))
        with pytest.raises(NoKernel, match="workspace=0 bytes"):
            step(0)()
        call = step(asked.workspace_bytes)
        assert (
            attnops.explain(call, target=VENDORS["xqa"].target, quiet=True).chosen()[-1]
            == "paged_attention.xqa"
        )
        got, code = compiled_code(lambda: torch.compile(call, fullgraph=True)())
        assert "paged_attention.xqa" in kernel_calls(code)
        assert f"empty_strided_cpu(({asked.workspace_bytes}," not in code, "no one copies it"
        torch.testing.assert_close(got, k.repeat_interleave(4, 1))


def test_pages_of_odd_strides_are_seen():
    call = paged()
    apart = call.map(
        lambda n, t: (
            torch.nn.functional.pad(t, (0, 8))[..., :64] if n in ("k_pages", "v_pages") else t
        )
    )
    mixed = call.with_(
        v_pages=call.arguments["v_pages"].transpose(1, 2).contiguous().transpose(1, 2)
    )
    for odd, alike in ((call, True), (interleaved(BASE), True), (apart, False), (mixed, False)):
        assert odd.problem.pages.pages_alike is alike


def test_a_host_without_a_compiler_is_named(monkeypatch):
    monkeypatch.setattr(modules.shutil, "which", lambda name: None)
    monkeypatch.setattr(modules, "CUDA", "/nowhere")
    assert "flashinfer without nvcc and ninja" in str(modules.no_compiler(Target("cuda", 90)))
    assert modules.no_compiler(VENDORS["xqa"].target) is None, (
        "the probe looks for no package that the target assumes"
    )


@pytest.fixture
def two_gpus(monkeypatch):
    for known in (devices._loaded_on, devices._failures):
        known.cache_clear()
    monkeypatch.setattr(devices, "visible", lambda: 2)
    yield
    for known in (devices._loaded_on, devices._failures):
        known.cache_clear()


@pytest.mark.parametrize("case", ["page_64", "float8", "sinks"])
def test_a_copy_of_the_library_is_called_as_the_package_calls_it(two_gpus, case, calls):
    right(PAGED["xqa"], POINTS[case]())
    assert "xqa_wrapper" in [name for name, _ in calls] and "get_xqa_module" not in [
        name for name, _ in calls
    ]


def test_each_gpu_has_a_library_of_its_own(two_gpus, calls):
    first, second, again = (devices.xqa_module(torch.device("cuda", i), *MODULE) for i in (0, 1, 0))
    original, own, _, other = [given["path"] for name, given in calls if name == "load"]
    assert first is again and first is not second
    assert len({original, own, other}) == 3 and not own.exists(), "no copy stays behind"


def test_one_gpu_takes_the_package_as_it_is(calls):
    devices.xqa_module(torch.device("cuda", 0), *MODULE)
    assert [name for name, _ in calls] == ["get_xqa_module"]


def test_where_no_copy_loads_xqa_says_so_and_is_chosen_no_more(two_gpus, monkeypatch):
    def load(self, path):
        assert path == self.path, "failed to map segment from shared object"

    here = Target("cuda", 90)
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.setattr(standin._Spec, "load", load)
    assert devices.xqa_missing(here) is None
    before = generation()
    said = r"failed to map.* want a copy of xqa.so in .* \(TMPDIR\) .*CUDA_VISIBLE_DEVICES"
    with standin.installed(), pytest.raises(NotLoaded, match=said):
        devices.xqa_module(torch.device("cuda", 1), *MODULE)
    assert generation() > before, "calls choose anew"
    assert "a copy of xqa.so" in str(devices.xqa_missing(here))


def test_a_temporary_folder_without_libraries_is_named(two_gpus, monkeypatch):
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        devices.os, "statvfs", lambda folder: SimpleNamespace(f_flag=devices.os.ST_NOEXEC)
    )
    assert "TMPDIR" in str(devices.xqa_missing(Target("cuda", 90)))
    assert devices.xqa_missing(VENDORS["xqa"].target) is None, "another machine"
    monkeypatch.setattr(devices, "visible", lambda: 1)
    assert devices.xqa_missing(Target("cuda", 90)) is None


def test_trtllm_refuses_a_second_gpu(two_gpus, monkeypatch):
    """It would launch the first one's kernels there."""
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    generated = [k for k in all_kernels() if k.name.startswith("trtllm")]
    assert len(generated) == 3
    for kernel in generated:
        assert "devices=2" in str(kernel.probe(Target("cuda", 100)))
        assert kernel.probe(VENDORS["trtllm"].target) is None, "another machine"
