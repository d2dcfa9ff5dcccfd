"""`mem_efficient` through a stand-in of the ops it wraps: masks and their gradients, rules written into the bias, refusals."""

from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, pretend
from attnops.core.select import select
from attnops.testing import Features, Source, check_kernel, gradient_call, make_call
from tests.standins.shapes import DENSE

NAME = "mem_efficient"
OPS = ("attention", "attention_backward")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM90 = Target("cuda", 90, assume=())
PLAIN = Features(dtype=BF16, head_dim=16, q_heads=4, kv_heads=2, lse=True)
RULES = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True, dtype=F16, kv_heads=4),
    "window": replace(PLAIN, window=(3, 1), v_head_dim=24, dtype=F32),
    "chunk": replace(PLAIN, causal=True, chunk=4, kv_heads=1),
    "bool": replace(PLAIN, mask="bool", mask_shape="b", causal=True),
    "biases": replace(PLAIN, mask="biases", mask_shape="hq", window=(4, -1)),
    **{f"mask_{shape}": replace(PLAIN, mask="additive", mask_shape=shape, dtype=F32) for shape in ("bhq", "b", "h", "q", "")},
}
SHAPES = {
    **DENSE,
    "long": lambda f: make_call("attention", Source(3), 1, 40, 33, f),
}


def kernel(op):
    return kernels_of(op)["mem_efficient"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", RULES)
def test_rules(standin, rules, shape):
    call = SHAPES[shape](RULES[rules])
    graded = RULES[rules].mask in ("additive", "biases")
    for one in (call, gradient_call(Source(4), call, mask_grad=graded)):
        figures = check_kernel(kernel(one.op), one)
        assert not figures.refused and figures.worst <= 1.0, figures
    assert len(standin) == (0 if shape == "no_key" else 2)


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_a_training_step_with_a_mask_is_two_calls_of_aten(standin, dtype):
    q, k, v = (torch.randn(2, 6, n, 16, requires_grad=True) for n in (8, 2, 2))
    mask = torch.randn(1, 8, 6, 6, dtype=dtype, requires_grad=True)
    with attnops.use(kernel=dict.fromkeys(OPS, "mem_efficient")):
        found = torch.autograd.grad(attnops.attention(q, k, v, mask=mask, causal=True).sin().sum(), (q, k, v, mask))
    assert standin == ["_efficient_attention_forward", "_efficient_attention_backward"]
    with pretend(Target("cpu")):
        wanted = torch.autograd.grad(attnops.attention(q, k, v, mask=mask, causal=True).sin().sum(), (q, k, v, mask))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


PROBLEM = altered(gradient_call(Source(0), make_call("attention", Source(0), 2, 9, 9, PLAIN)).problem, target=SM90)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mask", ["none", "additive"])
def test_kernels_that_a_gpu_has_timed_are_before_it(mask, op):
    problem = altered(PROBLEM, op=op, target=Target("cuda", 90, assume=("triton",)), mask=mask, grad=op != "attention")
    assert select(problem).kernel is not kernel(op)
    assert "batch_invariant" in [r.field for r in select(problem, "deterministic").refused["mem_efficient"]]
