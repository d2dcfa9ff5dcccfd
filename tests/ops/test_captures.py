"""Eager calls inside a CUDA graph that the user captures by hand: no kernel runs there that may not
be captured."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.errors import NoKernel, NotCapturable
from attnops.core.kernel import _REGISTRY, Capture, Kernel, kernels_of, register
from attnops.core.problem import Target, altered, pretend
from attnops.core.select import select
from attnops.testing import CASES
from tests.checks import case_of

NEVER = "host_bound"
RAN: list[str] = []
MADE: dict[str, Kernel] = {}
OPS = ("attention", "paged_attention", "mla_attention")


def counted(run):
    @functools.wraps(run)
    def call(*args, **kwargs):
        RAN.append(NEVER)
        return run(*args, **kwargs)

    return call


@pytest.fixture
def capture(monkeypatch):
    """Switches the capture on and off, as if the tensors lay on a GPU. `host_bound` is chosen
    wherever it may be."""
    for op in OPS:
        if op in MADE:
            _REGISTRY.kernels[op][NEVER] = MADE[op]
            continue
        reference = kernels_of(op)["reference"]

        run = counted(reference.run)
        MADE[op] = register(
            replace(
                reference,
                name=NEVER,
                run=run,
                capture=Capture.NEVER,
                cost_us=lambda p: 1e9,
                judge=False,
            )
        )
    _REGISTRY.generation += 1
    state = {"on": False}
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])

    def switch(on):
        state["on"] = on
        RAN.clear()

    with attnops.use(prefer=(NEVER,)), torch.no_grad():
        yield switch
    # Overloads stay, but other tests count the kernels of an op.
    for op in OPS:
        del _REGISTRY.kernels[op][NEVER]
    _REGISTRY.generation += 1


def call_of(op):
    call = case_of(op, "plain")
    return lambda policy: getattr(torch.ops.attnops, op).default(
        *call.args, **call.kwargs, policy=policy
    )


@pytest.mark.parametrize("first", [False, True], ids=["met outside", "met inside"])
@pytest.mark.parametrize("op", OPS)
def test_the_op(op, first, capture):
    run = call_of(op)
    for on in (first, not first, first, not first):
        capture(on)
        run(f"prefer={NEVER}")
        assert ([] if on else [NEVER]) == RAN


@pytest.mark.parametrize("op", OPS)
def test_a_forced_kernel_is_refused_with_the_reason(op, capture):
    run = call_of(op)
    for on in (True, False, True):
        capture(on)
        if not on:
            run(f"kernel={op}:{NEVER}")
            assert RAN == [NEVER]
            continue
        with pytest.raises(
            NoKernel,
            match=rf"not {NEVER}: capture=never \(wants whole: a CUDA graph is being captured\)",
        ):
            run(f"kernel={op}:{NEVER}")


def test_its_own_overload_is_refused(capture):
    call = case_of("attention", "plain")
    capture(True)
    with pytest.raises(NotCapturable, match=rf"attention\.{NEVER}: cannot be captured"):
        getattr(torch.ops.attnops.attention, NEVER)(*call.args, **call.kwargs)


def attention(q, k, v):
    return attnops.attention(q, k, v, causal=True)


@pytest.mark.parametrize("first", [False, True], ids=["met outside", "met inside"])
def test_calls_that_are_remembered(first, capture):
    """What was chosen before a capture is not used within, and the other way round."""
    given = torch.randn(3, 2, 5, 4, 8).unbind()
    want = attnops.attention(*given, causal=True, kernel="reference")
    for on in (first, first, not first, not first, first, not first):
        capture(on)
        torch.testing.assert_close(attention(*given), want)
        assert ([] if on else [NEVER]) == RAN, on


def test_the_stream_is_asked_only_for_kernels_that_may_not_be_captured(capture, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(1) or False)
    given = torch.randn(3, 2, 5, 4, 8).unbind()
    with attnops.use("reference"):
        for _ in range(3):
            attention(*given)
    assert not asked


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, k.name) for op in OPS for k in kernels_of(op).values() if k.capture is Capture.NEVER],
)
def test_every_such_kernel_refuses_by_the_problem(op, name):
    with pretend(Target("cuda", 90)):
        problem = case_of(op, "plain").problem
    for within in (False, True):
        refused = select(altered(problem, capturing=within), f"kernel={op}:{name}").refused.get(
            name, ()
        )
        assert ("capture" in [r.field for r in refused]) == within


class OfTheDevice(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: a copy of numbers of the host, and numbers that the
    host reads."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in (
            "aten::lift_fresh",
            "aten::_local_scalar_dense",
            "aten::nonzero",
        ), func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["aten", "reference"])
@pytest.mark.parametrize("op", ["experts", "mxfp4_experts", "route"])
def test_captured_mixtures_leave_the_host_alone(op, name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in [
        case.call() for case in CASES[op] if case.label in ("plain", "odd", "odd-all", "no_tokens")
    ]:
        want = call.map(lambda n, t, call=call: t.clone() if n in call.writes else t)
        attnops.ops.OPS[op].reference(want.record)
        with OfTheDevice(), torch.no_grad():
            kernels_of(op)[name].run(call.record)
        for written in call.writes:
            torch.testing.assert_close(call.arguments[written], want.arguments[written])
