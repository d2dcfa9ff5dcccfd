"""`aten_flash`, `cudnn` and `mem_efficient` as on CUDA, through stand-ins of the ops they wrap: rules, gradients, choices."""

from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, problem_of
from attnops.core.select import choose, select
from attnops.ops import OPS
from attnops.testing import Features, Source, gradient_call, make_call
from tests.checks import right
from tests.standins.shapes import DENSE, SHAPES
from tests.standins.vendors import VENDORS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM90 = Target("cuda", 90, assume=())


def check_both_ways(name, call, mask_grad=False):
    """The call and its gradient. Returns the calls of aten's ops."""
    with VENDORS[name].running() as calls:
        for one in (call, gradient_call(Source(4), call, mask_grad=mask_grad)):
            right(kernels_of(one.op)[name], one)
    return calls


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 2), (-1, 1), (0, 0), (40, 40)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
def test_ragged_requests_with_windows(heads, causal, window):
    f = Features(dtype=BF16, head_dim=64, q_heads=heads[0], kv_heads=heads[1], causal=causal, window=window, lse=True)
    check_both_ways("aten_flash", SHAPES["ragged"](f))


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
def test_one_query_a_request_and_an_idle_one(padding):
    f = Features(dtype=F16, head_dim=64, q_heads=4, kv_heads=2, causal=True, lse=True)
    check_both_ways("aten_flash", make_call("varlen_attention", Source(3), (1, 0, 1), (5, 3, 7), f, padding=padding))


@pytest.mark.parametrize("window", [(33, -1), (-1, 8)], ids=str)
def test_a_dense_window_with_more_queries_than_keys_is_refused_on_cuda(window):
    query, key = (torch.empty(2, n, 2, 64, dtype=BF16, device="meta") for n in (130, 70))
    problem = problem_of(OPS["attention"].call(query, key, key, scale=0.1, window_left=window[0], window_right=window[1]))
    assert "window" in {r.field for r in select(altered(problem, target=SM90)).refused["aten_flash"]}


@pytest.mark.parametrize("tokens", [(2, 4096), (1, 16384), (8, 1024)], ids=str)
def test_a_backward_on_an_h200_is_not_the_references(tokens):
    """The estimate, too, says that FlashAttention is faster than formulas."""
    batch, length = tokens
    f = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
    for op, want in (("varlen_attention_backward", "aten_flash"), ("attention_backward", "cudnn")):
        problem = gradient_call(Source(0), SHAPES["ragged" if op.startswith("varlen") else "dense"](f)).problem
        sizes = {"tokens": batch * length, "batch": batch, "queries": length, "context": length}
        large = altered(problem, target=SM90, sizes_equal=True, **{n: Extent.of(size) for n, size in sizes.items()})
        assert choose(large).name == want


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_head_dims_and_groups(causal, heads, dims):
    f = Features(dtype=F16, head_dim=dims[0], v_head_dim=dims[1], q_heads=heads[0], kv_heads=heads[1], causal=causal, lse=True)
    check_both_ways("cudnn", make_call("attention", Source(3), 2, 9, 9 if causal else 20, f))


def test_a_torch_without_a_new_cudnn_is_refused_by_name(monkeypatch):
    here = Target("cuda", 90)
    for available, version, fine in ((False, None, False), (True, 90800, False), (True, 91002, True)):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert [r.field for r in kernels_of("attention")["cudnn"].absences(here)] == ([] if fine else ["cudnn"])


PLAIN = Features(dtype=BF16, head_dim=16, q_heads=4, kv_heads=2, lse=True)
RULES = {
    "causal": replace(PLAIN, causal=True, dtype=F16, kv_heads=4),
    "window": replace(PLAIN, window=(3, 1), v_head_dim=24, dtype=F32),
    "chunk": replace(PLAIN, causal=True, chunk=4, kv_heads=1),
    "bool": replace(PLAIN, mask="bool", mask_shape="b", causal=True),
    "biases": replace(PLAIN, mask="biases", mask_shape="hq", window=(4, -1)),
    **{f"mask_{shape}": replace(PLAIN, mask="additive", mask_shape=shape, dtype=F32) for shape in ("bhq", "b", "h", "q", "")},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("shape", [*DENSE, "long"])
@pytest.mark.parametrize("rules", RULES)
def test_rules_written_into_the_bias(rules, shape):
    f = RULES[rules]
    call = DENSE[shape](f) if shape in DENSE else make_call("attention", Source(3), 1, 40, 33, f)
    calls = check_both_ways("mem_efficient", call, mask_grad=f.mask in ("additive", "biases"))
    assert len(calls) == (0 if shape == "no_key" else 2)


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
