"""How far the kernels' own estimates are from a table: who would be chosen by them, and how many pairs they order wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from attnops.kernel import kernels_of
from attnops.measured import Grid, Sizes, Table
from attnops.problem import Problem, Target
from attnops.tune.calls import problem_of
from attnops.tune.run import lengths

ALIKE = 1.05
"""Times closer than this are in no order."""


@dataclass(frozen=True)
class Ranking:
    """Over points, in percent: the time of the kernel that estimates choose over the best one's, less 1, and the pairs in wrong order."""

    points: int
    mean_regret: float
    worst_regret: float
    wrong_pairs: float


def timed(table: Table, target: Target) -> Iterator[tuple[Grid, Sizes, Problem, Mapping[str, float]]]:
    """Every measured point with two times at least: its grid, its sizes, its Problem as the kernels were given it, the times by kernel."""
    for grid in table.grids:
        for i, at in enumerate(grid.points()):
            us = {name: t for name, times in grid.us.items() if (t := times[i]) is not None}
            if len(us) > 1:
                bare = problem_of(grid.shape, *lengths(grid.shape, at), target)
                yield grid, at, replace(bare, plan="host", workspace=1 << 62), us


def rankings(table: Table, target: Target, without: tuple[str, ...] = ()) -> dict[str, Ranking]:
    """By op, and "all". without: kernels, as `op.name`, whose times are not of today's code."""
    regrets: dict[str, list[float]] = {}
    pairs: dict[str, list[bool]] = {}
    for _, _, problem, us in timed(table, target):
        kernels = kernels_of(problem.op)
        guess = {name: kernels[name].cost_us(problem) for name in us if not kernels[name].judge and f"{problem.op}.{name}" not in without}
        if len(guess) < 2:
            continue
        best = min(us[name] for name in guess)
        for op in (problem.op, "all"):
            regrets.setdefault(op, []).append(100 * (us[min(guess, key=guess.__getitem__)] / best - 1))
            pairs.setdefault(op, []).extend(
                (us[a] < us[b]) != (guess[a] < guess[b]) for a, b in combinations(guess, 2) if max(us[a], us[b]) > ALIKE * min(us[a], us[b])
            )
    return {
        op: Ranking(len(found), sum(found) / len(found), max(found), 100 * sum(pairs[op]) / max(len(pairs[op]), 1))
        for op, found in regrets.items()
    }
