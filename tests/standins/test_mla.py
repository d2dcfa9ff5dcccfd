"""The wrappers of FlashMLA and CUTLASS MLA over stand-ins of the foreign ops: the whole path but the kernels themselves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs

from attnops.core.errors import NoKernel
from attnops.core.kernel import Package, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import cutlass_mla, flashmla, wheel
from attnops.kernels.sgl.sources import SGL as LIBRARY
from attnops.kernels.shared.memory import COUNTERS, total
from attnops.ops import mla_attention
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Call, Pages, Source, check_kernel, make_call
from tests.lowering.models import compiled_code, kernel_calls
from tests.standins import schemas, sgl_kernel_mla as standin

NAMES = ("flashmla", "flashmla_fp8", "cutlass_mla")
FOREIGN = {"flashmla": "dense_decode_fwd", "flashmla_fp8": "fwd_kvcache_mla_fp8", "cutlass_mla": "cutlass_mla_decode"}
ARCHS = {"flashmla": 90, "flashmla_fp8": 90, "cutlass_mla": 100}
TARGETS = {name: Target("cuda", arch, assume=("sgl_kernel",)) for name, arch in ARCHS.items()}
KERNELS = kernels_of("mla_attention")
# By torch.allclose does test_schema see mutation, and that knows no float8.
MOST = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = {name: MOST if name == "flashmla_fp8" else ("test_schema", *MOST) for name in NAMES}

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def loaded():
    with standin.installed():
        yield


def decode(q_lens=(1, 1, 1), seq_lens=(70, 3, 130), page=64, f=DEEPSEEK, padding=0, **more: Any) -> Call:
    return make_call("mla_attention", Source(0), q_lens, seq_lens, page, f, padding, **more)


def decode_for(name: str, f=DEEPSEEK, **more: Any) -> Call:
    """A call that the kernel takes."""
    return decode(f=replace(f, q_dtype=E4M3, kv_dtype=E4M3), **more) if name == "flashmla_fp8" else decode(f=f, **more)


# The truth about the foreign ops --------------------------------------------------------------------------------------


def test_schemas_are_the_wheels():
    # As read in the wheel of sglang-kernel 0.4.3.
    ops = torch.ops.sgl_kernel
    assert str(ops.dense_decode_fwd.default._schema) == (
        "sgl_kernel::dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
        "float softmax_scale, bool is_causal, Tensor? tile_scheduler_metadata, Tensor? num_splits) "
        "-> (Tensor, Tensor, Tensor?, Tensor?)"
    )
    assert str(ops.get_mla_decoding_metadata_dense_fp8.default._schema) == (
        "sgl_kernel::get_mla_decoding_metadata_dense_fp8(Tensor seqlens_k, int num_heads_per_head_k, int num_heads_k) -> Tensor[]"
    )
    assert str(ops.fwd_kvcache_mla_fp8.default._schema) == (
        "sgl_kernel::fwd_kvcache_mla_fp8(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
        "float softmax_scale, bool is_causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor? descale_q, "
        "Tensor? descale_k) -> Tensor[]"
    )
    assert str(ops.cutlass_mla_decode.default._schema) == (
        "sgl_kernel::cutlass_mla_decode(Tensor($0! -> ) out, Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, "
        "Tensor seq_lens, Tensor page_table, Tensor($1! -> ) workspace, float sm_scale, int num_kv_splits) -> ()"
    )
    assert str(ops.cutlass_mla_get_workspace_size.default._schema) == (
        "sgl_kernel::cutlass_mla_get_workspace_size(int _0, int _1, int _2, int _3) -> int _0"
    )


@pytest.mark.parametrize(
    ("pattern", "schema"),
    [
        (LIBRARY, schemas.DENSE_DECODE),
        (LIBRARY, schemas.METADATA_DENSE),
        (LIBRARY, schemas.DECODE_FP8),
        (LIBRARY, schemas.METADATA_FP8),
        ("sm*/common_ops.*", schemas.CUTLASS_DECODE),
    ],
)
def test_an_installed_wheel_holds_these_schemas(pattern, schema):
    path = wheel.library(pattern)
    if path is None:
        pytest.skip(f"no sgl_kernel with {pattern}")
    # Schemas lie in a library as they were written; reading them loads nothing.
    assert schema.encode() in path.read_bytes()


@pytest.mark.parametrize(("name", "arch"), [("flashmla", 100), ("flashmla_fp8", 100), ("cutlass_mla", 90), ("cutlass_mla", 103)])
def test_the_foreign_op_refuses_other_devices(name, arch):
    call = decode_for(name)
    with pretend(Target("cuda", arch, assume=("sgl_kernel",))), pytest.raises(RuntimeError, match="only supported on"):
        KERNELS[name].run(call.record)
    assert FOREIGN[name] in standin.CALLS


# The path -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_lens", [(1, 0, 1), (0, 0, 1), (0, 1, 1), (0, 0, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_idle_requests_keep_their_places(name, q_lens):
    call = decode_for(name, q_lens=q_lens, padding=3 - sum(q_lens), slack=0 if sum(q_lens) else 1)
    with pretend(TARGETS[name]):
        assert check_kernel(KERNELS[name], call).worst <= 1.0


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", ["flashmla", "flashmla_fp8"])
def test_opcheck_of_the_core(name, scheduled):
    call = decode_for(name)
    t = call.arguments
    with pretend(TARGETS[name]):
        schedule = flashmla.written(t["seq_lens"], t["q_nope"].shape[1], name == "flashmla_fp8") if scheduled else None
    scales = (t["q_scale"], t["kv_scale"]) if name == "flashmla_fp8" else ()
    args = (t["q_nope"], t["q_pe"], t["latent_pages"], t["page_table"].clamp(min=0), t["seq_lens"], schedule, t["scale"], *scales)
    with pretend(TARGETS[name]):
        checked = torch.library.opcheck(getattr(torch.ops.attnops, f"mla_attention__{name}").default, args, test_utils=CHECKS[name])
    assert set(checked.values()) == {"SUCCESS"}


def test_heads_are_padded_and_pages_made_whole_tiles():
    seen = []
    call = decode(page=16, seq_lens=(70, 3, 17), pages=Pages(wider=0))

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.sgl_kernel.cutlass_mla_decode.default:
                seen.append([tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args])
            return func(*args, **kwargs or {})

    with pretend(TARGETS["cutlass_mla"]), Spy():
        KERNELS["cutlass_mla"].run(call.record)
    [[out, q_nope, q_pe, _, lengths, table, workspace, scale, splits]] = seen
    assert (out, q_nope, q_pe) == ((3, 128, 512), (3, 128, 512), (3, 128, 64))
    assert call.arguments["page_table"].shape == (3, 5) and table == (3, 8)
    assert (lengths, scale, splits) == ((3,), 192**-0.5, 1)
    assert workspace == (3 * 128 * 513 * 4,)


def test_the_callers_workspace_is_used_behind_the_counters():
    call = decode()
    with pretend(TARGETS["cutlass_mla"]):
        size = cutlass_mla.workspace_size(4 * 64, 3)
        workspace = torch.zeros(total(size), dtype=torch.uint8)
        for given, used in ((workspace, True), (workspace[:-1], False), (None, False)):
            workspace.zero_()
            run = call.with_(workspace=given)
            assert check_kernel(KERNELS["cutlass_mla"], run).worst <= 1.0
            KERNELS["cutlass_mla"].run(run.record)
            assert bool(workspace[COUNTERS:].any()) == used and not workspace[:COUNTERS].any()
        workspace.zero_()
        run = call.with_(workspace=workspace, plan=torch.zeros(64, dtype=torch.int64))
        KERNELS["cutlass_mla"].run(run.record)
        assert not workspace.any()


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_overload_is_one_node(name):
    backend = EagerAndRecordGraphs()
    call = decode_for(name)
    overload = getattr(torch.ops.attnops.mla_attention, name)
    args, kwargs = call.args, {n: v for n, v in call.kwargs.items() if n != "output"}

    def run(output):
        overload(*args, **kwargs, output=output)
        return output * 2

    with pretend(TARGETS[name]), torch.no_grad():
        got = torch.compile(run, backend=aot_autograd(fw_compiler=backend), fullgraph=True)(torch.empty_like(call.arguments["output"]))
        want = run(torch.empty_like(call.arguments["output"]))
    torch.testing.assert_close(got, want)
    [text] = (str(graph.graph) for graph in backend.graphs)
    assert f"attnops.mla_attention.{name}" in text
    assert "sgl_kernel" not in text


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_inductor_names_the_kernel(name):
    given = {n: t for n, t in decode_for(name).tensors().items() if n != "output"}

    def run(**tensors):
        return mla_attention(**tensors, max_seqlen_q=1, scale=192**-0.5, kernel=name) * 2

    with pretend(TARGETS[name]), torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(run, fullgraph=True)(**given))
        want = run(**given)
    assert kernel_calls(code) == [f"mla_attention.{name}"]
    assert standin.CALLS.count(FOREIGN[name]) == 2
    torch.testing.assert_close(got, want)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_forced_kernel_says_why_not():
    given = decode(page=32).arguments
    with pretend(TARGETS["flashmla"]), pytest.raises(NoKernel, match=r"page_size=32 \(wants 64\)"):
        mla_attention(**given, kernel="flashmla")


def test_absent_wheels_are_named(monkeypatch, tmp_path):
    for name in NAMES:
        assert "sgl_kernel missing" in str(KERNELS[name].absences(Target("cuda", 90, assume=()))[0])
    monkeypatch.setattr(wheel, "library", lambda pattern: None)
    assert str(wheel.lacks(Target("cuda", 90), LIBRARY)) == (
        "package=sgl_kernel without flashmla_ops.* (wants a wheel that holds flashmla_ops.*)"
    )
    monkeypatch.setattr("attnops.core.needs._installed", lambda module: True)
    here = Target("cuda", 100)
    monkeypatch.setattr(Package, "version", lambda self: "0.4.7")
    assert [str(r) for r in KERNELS["cutlass_mla"].absences(here)] == [
        "package=sgl_kernel 0.4.7 (wants >= 0.3.18, < 0.4.7 (holds cutlass_mla_decode))"
    ]
    monkeypatch.setattr(Package, "version", lambda self: "0.4.6.post1")
    assert "without sm100/common_ops" in str(KERNELS["cutlass_mla"].absences(here)[0])
