"""Autocast does not reach into an op: its results have the query's dtype and the same bits, with gradients, compiled and profiled."""

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import profile

import attnops
from attnops.kernel import kernels_of
from attnops.select import Policy, select

OPS = ("attention", "varlen_attention")
ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)


def call(op, x):
    if op == "attention":
        return attnops.attention(x[None], x[None], x[None], causal=True)[0]
    return attnops.varlen_attention(x, x, x, ENDS, ENDS, max_seqlen_q=4, max_seqlen_k=4, causal=True)


def kernels(op):
    """Those that a CPU can run on these calls."""
    problem = attnops.explain(lambda x: call(op, x), torch.randn(7, 2, 16), quiet=True).sites[0].decision.problem
    return [name for name in kernels_of(op) if select(problem, Policy(kernel=(name,))).kernel is not None]


@pytest.mark.parametrize("how", ["eager", "profiled", "compiled"])
@pytest.mark.parametrize(("op", "kernel"), [(op, name) for op in OPS for name in kernels(op)])
def test_results(op, kernel, how):
    x = torch.randn(7, 2, 16)
    with attnops.use(kernel={op: kernel}), torch.no_grad():
        want = call(op, x)
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if how == "compiled" else call
        with torch.autocast("cpu", torch.bfloat16), profile() if how == "profiled" else nullcontext():
            got = run(op, x)
    assert got.dtype == torch.float32 and torch.equal(got, want)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, how):
    """Of a backward pass in the block, too."""
    x, found = torch.randn(7, 2, 16, requires_grad=True), []
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if how == "compiled" else call
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = run(op, x)
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    for got, want in zip(*found, strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)
