"""The grids of `attnops tune`: the sweeps that the ops' families list. Kinds of a lower turn come
first, in case the budget ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from attnops.core.errors import InvalidInput
from attnops.core.problem import Problem
from attnops.measured.table import Axis
from attnops.ops import OPS
from attnops.ops.sweeps import Sweep
from attnops.testing.timed_calls import GRADIENT

GRIDS = ("full", "brief", "cpu", "tiny")


def asked_by(kind: Problem) -> str:
    """The op whose name asks for a kind: the forward of a training step is timed with its
    gradient."""
    return kind.op + GRADIENT * kind.results.lse


def _thinned(axis: Axis, most: int) -> Axis:
    """At most `most` of the points, evenly spaced, with both ends."""
    return (
        tuple(axis[round(i * (len(axis) - 1) / (most - 1))] for i in range(most))
        if len(axis) > most
        else axis
    )


def _brief(s: Sweep) -> Sweep:
    return replace(
        s,
        batch=s.few or _thinned(s.batch, 5),
        queries=_thinned(s.queries, 5),
        ratio=_thinned(s.ratio, 4),
    )


def sweeps_of(grid: str, ops: Sequence[str] = ()) -> tuple[Sweep, ...]:
    """The sweeps of a named grid; ops: of these only, a gradient with its forward. Raises
    InvalidInput for an unknown name."""
    if grid not in GRIDS:
        raise InvalidInput("grid", repr(grid), " | ".join(GRIDS))
    listed = [sweep for op in OPS.values() for sweep in op.of_family("timed", "TIMED") or ()]
    found = sorted(
        (s for s in listed if s.grid == ("full" if grid == "brief" else grid)),
        key=attrgetter("turn"),
    )
    known = {asked_by(s.kind) for s in found}
    if unknown := set(ops) - known:
        raise InvalidInput("ops", ", ".join(sorted(unknown)), " | ".join(sorted(known)))
    return tuple(
        _brief(s) if grid == "brief" else s for s in found if not ops or asked_by(s.kind) in ops
    )
