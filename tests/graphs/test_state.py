"""State that a step changes beside pages: a capture leaves it alone, and every step changes it once."""

import pytest
import torch

from attnops.core.errors import InvalidInput, NotCapturable, ReplayMismatch, StaleGraph
from attnops.graphs import Buckets, outside, piecewise
from tests.graphs.helpers import MODES, close, graphed
from tests.graphs.models import Decaying
from tests.graphs.standin import StandIn

BUCKETS = Buckets(tokens=(2, 4))


def twin_of(model):
    twin = Decaying()
    twin.state.copy_(model.state)
    return twin


def decaying(mode, model, **more):
    device = StandIn()
    return graphed(mode, model, BUCKETS, **{"tokens": ("x",), "graphs": device, "state": (model.state, model.steps), **more}), device


def agree(step, model, twin, rows):
    x = torch.randn(rows, 3)
    want = twin(x)
    # Rows of nobody are zeros, and decay as the others do.
    twin.state[rows : 2 if rows <= 2 else 4] *= 0.5
    close(step(x), want)
    close(model.state, twin.state)
    assert int(model.steps) == int(twin.steps)


@pytest.mark.parametrize("check_every", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_step_changes_it_once(mode, check_every):
    model = Decaying()
    twin = twin_of(model)
    step, _ = decaying(mode, model, check_every=check_every)
    for rows in (2, 4, 2, 2, 3, 4, 1, 1):
        agree(step, model, twin, rows)
    assert step.report().compared == (3 if check_every else 0)  # of 5 replays of one bucket and 3 of the other


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_beforehand_changes_nothing(mode):
    model = Decaying()
    before = model.state.clone()
    step, device = decaying(mode, model)
    step.capture(torch.randn(1, 3))
    assert device.calls.count("begin") == 2
    assert torch.equal(model.state, before) and int(model.steps) == 0


@pytest.mark.parametrize("mode", MODES)
def test_not_named_it_is_changed_by_a_capture(mode):
    """What `state=` is for."""
    model = Decaying()
    step, _ = decaying(mode, model, state=())
    step.capture(torch.randn(1, 3))
    assert int(model.steps) > 0


@pytest.mark.parametrize("mode", MODES)
def test_put_back_when_a_capture_fails(mode):
    calls = []

    def failing(x):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("not now")
        return x

    model = Decaying(fails=outside(failing))
    before = model.state.clone()
    step, device = decaying(mode, model)
    with pytest.raises((RuntimeError, NotCapturable), match="not now"):
        step(torch.randn(2, 3))
    assert torch.equal(model.state, before) and int(model.steps) == 0 and device.open is None


@pytest.mark.parametrize("mode", MODES)
def test_it_may_not_move(mode):
    model = Decaying()
    step, _ = decaying(mode, model)
    step(torch.randn(2, 3))
    model.state.set_(torch.zeros_like(model.state))
    with pytest.raises(StaleGraph, match=r"^state\[0\]: got "):
        step(torch.randn(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_mismatch_leaves_it_as_after_one_step(mode):
    model = Decaying()
    twin = twin_of(model)
    step, _ = decaying(mode, model, check_every=2)
    agree(step, model, twin, 2)
    x = torch.randn(2, 3)
    twin(x)
    model.scale = 9.0  # a number in Python, which a replay does not read again
    with pytest.raises(ReplayMismatch):
        step(x)
    close(model.state, twin.state)
    assert int(model.steps) == 2


def test_what_is_no_tensor_is_refused():
    for state in (torch.zeros(2), [torch.zeros(2), 3]):
        with pytest.raises(InvalidInput, match="state: got"):
            piecewise(Decaying(), BUCKETS, batch=None, tokens=("x",), state=state)
