"""Autocast ends at an op: results, gradients and dtypes are those of the call without it, on every
way to a kernel."""

from functools import partial
from itertools import islice

import pytest
import torch

import attnops
import attnops.core.op as op_module
from attnops.core import eager_cache, private_torch
from attnops.core.kernel import kernels_of
from attnops.core.record import changed, split
from attnops.core.select import key_for
from attnops.ops import OPS
from attnops.testing import CASES
from attnops.testing.calls import equip
from attnops.testing.check import refusals
from tests.checks import results, runs_here, those

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile:UserWarning"
)

DIFFERENTIABLE = {"attention": {}, "varlen_attention": {"max_seqlen_q": 7, "max_seqlen_k": 7}}
STARTS = torch.tensor([0, 7, 12], dtype=torch.int32)
TRIED = 2


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def singles(kernel):
    """Calls with float32 numbers that the kernel takes, those with many options and with none
    first."""
    cases = sorted(
        CASES[kernel.op], key=lambda c: not {"all", "plain", "lse"} & set(c.label.split("_"))
    )
    calls = (c.call() for c in cases)
    wide = (
        c
        for c in calls
        if any(t.dtype == torch.float32 and t.numel() for t in c.tensors().values())
    )
    return list(islice((equip(kernel, c) for c in wide if not refusals(kernel, c)), TRIED))


def ways(kernel):
    """The ways to a kernel: an eager call of the op, its overload from the dispatcher, and the
    overload as compiled code calls it."""
    op = OPS[kernel.op]
    overload = getattr(op.packet, kernel.name)

    def through(function):
        def run(call):
            args, kwargs = split(call)
            return function(*args, **kwargs)

        return run

    return {
        "op": lambda call: op(changed(call, policy=key_for(op.name, kernel.name))),
        "dispatcher": through(overload),
        "compiled code": through(overload.run),
    }


same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", those())
def test_no_kernel_sees_it(kernel):
    calls = singles(kernel)
    if not calls:
        pytest.skip("takes no case of float32 numbers on a CPU")
    for call in calls:
        for run in ways(kernel).values():
            want = results(run, call)
            with autocast():
                same(results(run, call), want)
                assert torch.is_autocast_enabled("cpu")


def inputs(grad=True):
    torch.manual_seed(0)
    return [
        torch.randn(*lead, heads, 16).requires_grad_(grad)
        for lead, heads in (((2, 6), 4), ((2, 6), 2), ((2, 6), 2))
    ]


def attend(op, kernel=None):
    """A public function of query, key and value `[B, S, H, D]`."""
    more = {"causal": True, "kernel": kernel, **DIFFERENTIABLE[op]}

    def run(*qkv):
        if op == "attention":
            return attnops.attention(*qkv, **more)
        return attnops.varlen_attention(*(t.flatten(0, 1) for t in qkv), STARTS, STARTS, **more)

    return run


def pairs(op):
    """Kernels of `op` with a log-sum-exp, which a gradient wants, and of its gradient."""
    kernels, gradients = (
        [k for k in kernels_of(name).values() if runs_here(k)] for name in (op, f"{op}_backward")
    )
    return [(op, k.name, g.name) for k in kernels if "return_lse" in k.takes for g in gradients]


@pytest.mark.parametrize(
    ("op", "kernel", "gradient"), [pair for op in DIFFERENTIABLE for pair in pairs(op)]
)
def test_gradients_are_those_without_it(op, kernel, gradient):
    """Whether the backward runs within autocast or after it; the dispatcher's way, too."""

    def step(run, forward, backward):
        given = inputs()
        with attnops.use(kernel={op: kernel, f"{op}_backward": gradient}):
            with autocast(forward):
                out = run(*given)
            with autocast(backward):
                return [out, *torch.autograd.grad(out.square().sum(), given)]

    want = step(attend(op), False, False)
    assert want[0].dtype == torch.float32
    for within in (True, False):
        same(step(attend(op), True, within), want)
    with torch.profiler.profile():  # makes a call take the dispatcher's way
        same(step(attend(op), True, True), want)


@pytest.mark.parametrize("asked", [private_torch._publicly_autocasting, lambda: True])
def test_switched_off_by_public_torch(asked, monkeypatch):
    """As where torch has moved its own switch, or asks for a device that the public one does not
    know."""
    run, given = attend("attention", "reference"), inputs(False)
    want = run(*given)
    for module in (eager_cache, op_module):
        monkeypatch.setattr(module, "uncast", private_torch._publicly_uncast)
        monkeypatch.setattr(module, "autocasting", asked)
    with autocast():
        same([run(*given)], [want])
        with torch.profiler.profile():  # makes a call take the dispatcher's way
            same([run(*given)], [want])
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_one_answer_eager_and_compiled(op):
    run, given = attend(op), inputs()
    want = run(*inputs(False))

    def within(*qkv):
        with autocast():
            return run(*qkv)

    with autocast():
        around = torch.compile(run, fullgraph=True)(*given)
    for got in (around, torch.compile(within, fullgraph=True)(*given)):
        assert got.requires_grad
        torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)
