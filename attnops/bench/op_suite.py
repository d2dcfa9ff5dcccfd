"""`OpSuite`: a suite of calls that the families of ops list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attnops.bench import Setup, choices
from attnops.bench.rows import Case, Row, Rows
from attnops.ops import OPS
from attnops.testing.pool import Pool


def points_of(op: str) -> Mapping[str, tuple[Any, ...]]:
    """By suite the calls that the op's family lists."""
    found: Mapping[str, tuple[Any, ...]] | None = OPS[op].of_family("bench_points", "POINTS")
    return found or {}


def listed(suite: str) -> list[tuple[str, Any]]:
    """(op, point) of all calls that are listed for a suite, in order."""
    return sorted(
        ((op, point) for op in OPS for point in points_of(op).get(suite, ())),
        key=lambda found: found[1].place,
    )


def as_it_is(point: Any, size: str) -> Any:
    """A point of one size; a worker process gets this function by its name."""
    return point


@dataclass(frozen=True)
class OpSuite:
    """A suite of the calls that families list for it: a function of a Setup.

    rows: those of a point of an op. count: by size of the run, how many points. sized: a point at
    that size, None if it is left out. points: those of a suite with their ops. summary: do the rows
    of a case end with the regret of its choices?
    """

    name: str
    rows: Callable[[Setup, Pool, str, Any], Iterable[Row]]
    count: Mapping[str, int] = field(default_factory=dict, hash=False)
    sized: Callable[[Any, str], Any] = as_it_is
    points: Callable[[str], list[tuple[str, Any]]] = listed
    summary: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops whose kernels it may run."""
        return tuple(
            dict.fromkeys(
                (
                    *(op for op, _ in self.points(self.name)),
                    *(op for op in OPS if self.name in points_of(op)),
                )
            )
        )

    def __call__(self, setup: Setup) -> dict[str, Case]:
        """One a point."""
        pool, some = Pool(setup.device), self.points(self.name)[: self.count.get(setup.size)]
        sized = [
            (op, found)
            for op, point in some
            if (found := self.sized(point, setup.size)) is not None
        ]
        return {point.name: partial(self.measure, setup, pool, op, point) for op, point in sized}

    @torch.no_grad()
    def measure(self, setup: Setup, pool: Pool, op: str, point: Any) -> Rows:
        """The rows of a point."""
        rows = [*self.rows(setup, pool, op, point)]
        chosen = [row for row in rows if "us" in row]
        return [*rows, *(choices.summary(point.name, chosen) if self.summary and chosen else ())]
