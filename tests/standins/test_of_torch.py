"""`aten_flash`, `cudnn` and `mem_efficient` as on CUDA, through stand-ins of the ops they wrap: rules, gradients, choices."""

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered
from attnops.core.select import choose, select
from attnops.testing import Features, Source, gradient_call, make_call
from tests.checks import right
from tests.standins.calls import dense, ragged
from tests.standins.vendors import VENDORS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM90 = Target("cuda", 90, assume=())


def check_both_ways(call):
    """The call and its gradient."""
    for one in (call, gradient_call(Source(4), call)):
        with VENDORS["aten_flash"].running():
            right(kernels_of(one.op)["aten_flash"], one)


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 2), (-1, 1), (0, 0), (40, 40)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_requests_with_windows(causal, window):
    check_both_ways(ragged(Features(dtype=BF16, head_dim=64, q_heads=6, causal=causal, window=window, lse=True)))


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
def test_one_query_a_request_and_an_idle_one(padding):
    f = Features(dtype=F16, head_dim=64, q_heads=4, kv_heads=2, causal=True, lse=True)
    check_both_ways(make_call("varlen_attention", Source(3), (1, 0, 1), (5, 3, 7), f, padding=padding))


@pytest.mark.parametrize("tokens", [(2, 4096), (1, 16384), (8, 1024)], ids=str)
def test_a_backward_on_an_h200_is_not_the_references(tokens):
    """The estimate, too, says that FlashAttention is faster than formulas."""
    batch, length = tokens
    f = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
    for op, want in (("varlen_attention_backward", "aten_flash"), ("attention_backward", "cudnn")):
        problem = gradient_call(Source(0), (ragged if op.startswith("varlen") else dense)(f)).problem
        sizes = {"tokens": batch * length, "batch": batch, "queries": length, "context": length}
        large = altered(problem, target=SM90, sizes_equal=True, **{n: Extent.of(size) for n, size in sizes.items()})
        assert choose(large).name == want


def test_a_torch_without_a_new_cudnn_is_refused_by_name(monkeypatch):
    here = Target("cuda", 90)
    for available, version, fine in ((False, None, False), (True, 90800, False), (True, 91002, True)):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert [r.field for r in kernels_of("attention")["cudnn"].absences(here)] == ([] if fine else ["cudnn"])


PLAIN = Features(dtype=BF16, head_dim=16, q_heads=4, kv_heads=2, lse=True)


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_a_training_step_with_a_mask(dtype):
    leaves = [torch.randn(2, 6, n, 16, requires_grad=True) for n in (8, 2, 2)]
    leaves.append(torch.randn(1, 8, 6, 6, dtype=dtype, requires_grad=True))
    found = []
    for name in ("mem_efficient", "reference"):
        with VENDORS["mem_efficient"].running(), attnops.use(kernel=dict.fromkeys(("attention", "attention_backward"), name)):
            out = attnops.attention(*leaves[:3], mask=leaves[3], causal=True)
            found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "additive"])
def test_kernels_that_a_gpu_has_timed_are_before_it(mask):
    problem = gradient_call(Source(0), make_call("attention", Source(0), 2, 9, 9, PLAIN)).problem
    for op in ("attention", "attention_backward"):
        asked = altered(problem, op=op, target=Target("cuda", 90, assume=("triton",)), mask=mask, grad=op != "attention")
        assert select(asked).kernel is not kernels_of(op)["mem_efficient"]
        assert "batch_invariant" in [r.field for r in select(asked, "deterministic").refused["mem_efficient"]]
