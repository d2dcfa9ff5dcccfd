"""One step in graphs on two streams in turn: replays, captures and state follow each other."""

import pytest
import torch

from attnops.graphs import Buckets, breakable, capturing, streams
from tests.graphs.models import Decaying
from tests.graphs.races import Races
from tests.graphs.standin import StandIn


@pytest.mark.parametrize("ordered", [True, False])
def test_calls_on_streams_in_turn(ordered, monkeypatch):
    """A capture writes the buffers that a replay on another stream reads."""
    races = Races()
    monkeypatch.setitem(streams.STREAMS, "cpu", races)
    model, given = Decaying(), torch.randn(4, 3)
    step = breakable(
        model,
        Buckets(tokens=(2, 4)),
        batch=None,
        tokens=("x",),
        state=(model.state, model.steps),
        graphs=StandIn(),
    )
    if not ordered:
        monkeypatch.setattr(streams.LastStream, "use", lambda self: None)
    with races:
        for stream, rows in ((1, 4), (2, 2), (1, 2), (2, 4)):
            with races.on(stream):
                step(given[:rows])
    assert bool(races.found) is not ordered, "\n".join(races.found)


def test_one_stream_of_ours_for_all_work_beside_the_caller_s(monkeypatch):
    """Others may capture on each that torch hands out, and we on ours for captures."""
    monkeypatch.setattr(capturing, "_own_stream", lambda index: object())
    found, device = streams.Streams(), torch.device("cuda", 77)
    assert found.beside(device) is found.beside(device) is not capturing.capture_stream(77)
