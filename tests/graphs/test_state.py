"""State that a step changes beside pages: a capture leaves it alone, and every step changes it
once."""

import pytest
import torch

from attnops.core.errors import NotCapturable, ReplayMismatch, StaleGraph
from attnops.graphs import Buckets, outside
from tests.graphs.helpers import both_modes, close, graphed
from tests.graphs.models import Decaying


def made(mode, model, **more):
    return graphed(
        mode,
        model,
        Buckets(tokens=(2, 4)),
        **{"tokens": ("x",), "state": (model.state, model.steps), **more},
    )


def agree(step, model, twin, rows):
    x = torch.randn(rows, 3)
    want = twin(x)
    # Rows of nobody are zeros, and decay as the others do.
    twin.state[rows : 2 if rows <= 2 else 4] *= 0.5
    close((step(x), model.state, model.steps), (want, twin.state, twin.steps))


@pytest.mark.parametrize("check_every", [0, 2])
@both_modes
def test_every_step_changes_it_once(mode, check_every):
    """A mismatch leaves it as after one step."""
    model, twin = Decaying(), Decaying()
    twin.state.copy_(model.state)
    step = made(mode, model, check_every=check_every)
    for rows in (2, 4, 2, 2, 3, 4, 1):
        agree(step, model, twin, rows)
    assert step.report().compared == (
        3 if check_every else 0
    )  # of 4 replays of one bucket and 3 of the other
    model.scale = 9.0  # a number in Python, which a replay does not read again
    twin(torch.ones(4, 3))
    if check_every:
        with pytest.raises(ReplayMismatch):
            step(torch.ones(4, 3))
    else:
        step(torch.ones(4, 3))
    close((model.state, model.steps), (twin.state, twin.steps))


@pytest.mark.parametrize("named", [True, False])
@both_modes
def test_a_capture_beforehand_changes_nothing(mode, named):
    """Not named it does, which is what `state=` is for."""
    model = Decaying()
    before = model.state.clone()
    step = made(mode, model) if named else made(mode, model, state=())
    step.capture(torch.randn(1, 3))
    assert len(step.report().rows) == 2
    assert torch.equal(model.state, before) is named and (int(model.steps) == 0) is named


@both_modes
def test_put_back_when_a_capture_fails(mode):
    calls = []

    def failing(x):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("not now")
        return x

    model = Decaying(fails=outside(failing))
    before = model.state.clone()
    step = made(mode, model)
    with pytest.raises((RuntimeError, NotCapturable), match="not now"):
        step(torch.randn(2, 3))
    assert torch.equal(model.state, before) and int(model.steps) == 0 and step.graphs.open is None


@both_modes
def test_it_may_not_move(mode):
    model = Decaying()
    step = made(mode, model)
    step(torch.randn(2, 3))
    model.state.set_(torch.zeros_like(model.state))
    with pytest.raises(StaleGraph, match=r"^state\[0\]: got "):
        step(torch.randn(2, 3))
