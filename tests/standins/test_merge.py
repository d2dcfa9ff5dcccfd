"""The merges of sgl_kernel and FlashInfer over stand-ins of the foreign functions: all but the kernels."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnops
from attnops import ops
from attnops.errors import InvalidInput
from attnops.kernel import Kernel, kernels_of
from attnops.kernels import _flashinfer_pkg, _rows, _sgl, sgl_merge
from attnops.ops import OPS
from attnops.problem import Problem, Target, pretend
from attnops.select import select
from attnops.testing import CASES, Source, builders, check_kernel
from tests.lowering.models import compiled_code, kernel_calls
from tests.standins import flashinfer_small, sgl_kernel_small

BF16, F32 = torch.bfloat16, torch.float32
SM90 = Target("cuda", 90, assume=("flashinfer", "sgl_kernel"))
PAIRS = (
    ("merge_state", "sgl_merge"),
    ("merge_state", "flashinfer_merge"),
    ("merge_states", "flashinfer_merge"),
)


@pytest.fixture(autouse=True)
def standins(monkeypatch):
    """As on an SM90 machine with both packages; yields the calls of sgl_kernel's op."""
    if find_spec("sgl_kernel"):
        pytest.skip("sgl_kernel is installed, and a stand-in under its name would hide it")
    flashinfer_small.CALLS.clear()
    monkeypatch.setattr(_flashinfer_pkg, "module", lambda name: flashinfer_small)
    monkeypatch.setattr(_sgl, "load", lambda op, pattern: None)
    with sgl_kernel_small.installed() as calls, pretend(SM90):
        yield calls


def kernel(op: str, name: str) -> Kernel:
    return kernels_of(op)[name]


GRID = [pytest.param(op, name, case, id=f"{name}-{case}") for op, name in PAIRS for case in CASES[op]]


@pytest.mark.parametrize(("op", "name", "case"), GRID)
def test_grid(op, name, case):
    figures = check_kernel(kernel(op, name), case.call())
    if figures.refused:
        pytest.skip(str(figures))
    assert figures.worst <= 1.0, figures


TAKEN = {
    ("merge_state", "sgl_merge"): 16,
    ("merge_state", "flashinfer_merge"): 8,
    ("merge_states", "flashinfer_merge"): 9,
}


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_the_grid_holds_what_a_gpu_shall_see(op, name, standins):
    taken = [c for c in CASES[op] if not kernel(op, name).refusals(c.call().problem)]
    assert len(taken) == TAKEN[op, name]
    for case in taken:
        call = case.call()
        kernel(op, name).run(*call.args, **call.kwargs)
    # All but calls without a number reach the foreign function.
    assert len(standins) + len(flashinfer_small.CALLS) >= len(taken) - 3


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_opcheck(op, name):
    done = 0
    for case in CASES[op]:
        call = case.call()
        # torch.allclose, by which opcheck sees mutation, knows no float8.
        blind = "float8" in case.label or "quantised" in case.label or not all(t.numel() for t in call.tensors().values())
        if blind or kernel(op, name).refusals(call.problem):
            continue
        checked = torch.library.opcheck(getattr(OPS[op].packet, name), call.args, call.kwargs)
        assert set(checked.values()) == {"SUCCESS"}
        done += 1
    assert done


# Merges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgl_merge", "flashinfer_merge"])
def test_an_empty_side_is_neutral_whatever_it_holds(name):
    source = Source(1)
    out, lse = source.normal(5, 4, 64, dtype=BF16), source.normal(5, 4)
    nothing, none = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for sides in ((out, lse, nothing, none), (nothing, none, out, lse)):
        merged, z = attnops.merge_state(*sides, kernel=name)
        assert torch.equal(merged, out)
        torch.testing.assert_close(z, lse, rtol=1e-6, atol=1e-6)
    merged, z = attnops.merge_state(nothing, none, nothing, none, kernel=name)
    assert not merged.any() and torch.equal(z, none)


@pytest.mark.parametrize("name", ["sgl_merge", "flashinfer_merge"])
def test_any_layout_is_taken(name):
    source = Source(2)
    outs = [source.normal(4, 6, 64, dtype=BF16) for _ in range(2)]
    lses = [source.normal(4, 6) for _ in range(2)]
    want = attnops.merge_state(outs[0], lses[0], outs[1], lses[1], kernel=name)
    # Heads first, as FlashAttention lays out its lse, and a slice of a longer buffer.
    turned = lses[0].t().contiguous().t()
    sliced = torch.cat([outs[1], outs[1]], -1)[..., :64]
    for a, b in zip(attnops.merge_state(outs[0], turned, sliced, lses[1], kernel=name), want, strict=True):
        assert torch.equal(a, b) and a.is_contiguous()
    parts, zs = torch.stack(outs, 1), torch.stack(lses, 1)
    single = attnops.merge_state(outs[0][:1], lses[0][:, :1].t()[:1, :1].expand(1, 6), outs[1][:1], lses[1][:1], kernel=name)
    assert [x.stride() for x in single] == [(384, 64, 1), (6, 1)]
    many = ops.merge_states(parts.transpose(1, 2).contiguous().transpose(1, 2), zs, kernel="flashinfer_merge")
    torch.testing.assert_close(many[1], want[1])


@pytest.mark.parametrize("name", ["sgl_merge", "flashinfer_merge"])
def test_what_is_not_stale_is_not_copied(name, monkeypatch):
    [case] = [c for c in CASES["merge_state"] if c.label == "bfloat16_not_stale"]
    call, made = case.call(), []
    big = call.arguments["output_a"].numel()

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if isinstance(out, torch.Tensor) and out.numel() == big and out.data_ptr() not in seen:
                made.append(str(func))
            return out

    monkeypatch.setattr(flashinfer_small, "merge_state", lambda *a: (torch.empty_like(a[0]), torch.empty_like(a[1])))
    for stale in (False, True):
        given = call.with_(stale=stale)
        seen = {t.data_ptr() for t in given.tensors().values()}
        made.clear()
        with Spy():
            kernel("merge_state", name).run(*given.args, **given.kwargs)
        # The output, and with stale the two copies.
        assert len([f for f in made if "empty" in f]) == 1 and len([f for f in made if "where" in f]) == 2 * stale, made


@given(st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=30)
def test_many_at_once_are_two_at_a_time(parts, seed):
    call = builders.merge_states(Source(seed), 3, parts, 2, 4, torch.float64, empty=0.4)
    outputs, lses = call.args
    merged = outputs[:, 0], lses[:, 0]
    for n in range(1, parts):
        merged = OPS["merge_state"].reference(*merged, outputs[:, n], lses[:, n])
    got = OPS["merge_states"].reference(outputs, lses)
    blind = (lses == -float("inf")).all(1)
    torch.testing.assert_close(got[0], merged[0].masked_fill(blind[..., None], 0.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], merged[1], rtol=1e-6, atol=1e-6)


def test_merges_compile():
    source = Source(3)
    out, lse = source.normal(5, 3, 4, 64, dtype=BF16), source.normal(5, 3, 4)

    def run(out, lse):
        one, z = attnops.merge_state(out[:, 0], lse[:, 0], out[:, 1], lse[:, 1], kernel="sgl_merge")
        two, y = ops.merge_states(out, lse, kernel="flashinfer_merge")
        return one + 1, z, two * 2, y

    with torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(run, fullgraph=True)(out, lse))
        want = run(out, lse)
    assert sorted(kernel_calls(code)) == ["merge_state.sgl_merge", "merge_states.flashinfer_merge"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_more_than_32_bits_of_offsets_are_refused(monkeypatch):
    [call] = [c.call() for c in CASES["merge_state"] if c.label == "bfloat16_512"]
    monkeypatch.setattr(_rows, "OFFSETS", 4096)
    with pytest.raises(InvalidInput, match=r"^output_a: got \d+ numbers, want < 4096"):
        sgl_merge.merge_state(*call.args)


MERGE = Problem("merge_state", SM90, BF16, BF16, q_heads=32, v_head_dim=128)


@pytest.mark.parametrize(
    ("op", "name", "change", "want"),
    [
        ("merge_state", "sgl_merge", {"v_head_dim": 60}, "v_head_dim=60 (wants a multiple of 8"),
        ("merge_state", "sgl_merge", {"dtype": F32, "kv_dtype": F32, "v_head_dim": 60}, ""),
        ("merge_state", "sgl_merge", {"dtype": torch.float64, "kv_dtype": torch.float64}, "dtype=float64"),
        ("merge_state", "sgl_merge", {"target": Target("cpu", 0, ("sgl_kernel",))}, "target=cpu"),
        ("merge_state", "flashinfer_merge", {"v_head_dim": 96}, "v_head_dim=96 (wants 64 | 128 | 256 | 512)"),
        ("merge_state", "flashinfer_merge", {"q_heads": 65}, "q_heads=65 (wants <= 64 of 128 numbers each)"),
        ("merge_state", "flashinfer_merge", {"q_heads": 128, "v_head_dim": 64}, ""),
        ("merge_state", "flashinfer_merge", {"dtype": F32, "kv_dtype": F32}, "dtype=float32"),
        ("merge_states", "flashinfer_merge", {"q_heads": 33, "v_head_dim": 512}, "q_heads=33 (wants <= 32"),
    ],
)
def test_merge_refusals(op, name, change, want):
    found = [str(r) for r in kernel(op, name).refusals(replace(MERGE, op=op, **change))]
    assert found == [] if not want else any(r.startswith(want) for r in found), found


def test_in_a_graph_the_fused_merge_is_the_cheapest():
    # It needs no pass of its own to clear an empty side.
    assert select(replace(MERGE, tokens=CASES["merge_state"][0].call().problem.tokens)).kernel.name == "reference"


# Packages -------------------------------------------------------------------------------------------------------------


def test_what_is_absent_is_named(monkeypatch):
    nowhere = Target("cuda", 90, assume=())
    assert [str(r) for r in kernel("merge_state", "sgl_merge").absences(nowhere)] == [
        f"package=sgl_kernel missing (wants {_sgl.hint(torch.__version__, _sgl.OLDEST)})"
    ]
    assert [str(r) for r in kernel("merge_states", "flashinfer_merge").absences(nowhere)] == [
        "package=flashinfer missing (wants pip install 'flashinfer-python>=0.7.2')"
    ]
    package = _flashinfer_pkg.package()
    assert package.has("0.7.2.post1") and not package.has("0.6.13") and package.versions() == ">= 0.7.2"
    monkeypatch.setattr(_flashinfer_pkg, "find_spec", lambda name: None)
    assert str(_flashinfer_pkg.missing(Target("cuda", 90))) == "package=tvm_ffi missing (wants pip install apache-tvm-ffi)"
    assert _flashinfer_pkg.missing(SM90) is None


def test_each_gpu_has_its_build():
    assert _sgl.common_ops(Target("cuda", 90)) == "sm90/common_ops.*"
    assert {_sgl.common_ops(Target("cuda", a)) for a in (80, 89, 100, 120)} == {"sm100/common_ops.*"}
