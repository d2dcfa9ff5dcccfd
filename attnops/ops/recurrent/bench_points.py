"""Steps, prompts and training of layers that carry a state that are timed."""

from __future__ import annotations

from typing import Any

from attnops.core.problem import Problem
from attnops.ops.points import Points, Requests, Trained
from attnops.ops.recurrent.timed import CONV, RULE, SCAN
from attnops.ops.sweeps import decoding

STEPS = {8: 1, 1: 4, 32: 5, 128: 6}
PROMPTS = {4096: 2, 512: 7, 65536: 8}
TRAINED = {4096: 3, 32768: 9}
"""By requests, or by tokens of one, the place."""


def _points(kind: Problem) -> tuple[Any, ...]:
    op = kind.op
    return (
        *(Requests(at, f"{op} step", decoding(kind), n, 1, 1) for n, at in STEPS.items()),
        *(Requests(at, f"{op} prompt", kind, 1, n, n) for n, at in PROMPTS.items()),
        *(Trained(at, f"{op} training 1x{n}", kind, (n,)) for n, at in TRAINED.items()),
    )


POINTS: Points = {kind.op: {"hybrid": _points(kind)} for kind in (RULE, CONV, SCAN)}
