"""`OpSuite`: a suite of calls that the families of ops list, and `Task`: calls that one of its measurements compares and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Setup, choices
from attnops.bench.rows import Case, Row
from attnops.core.kernel import Kernel
from attnops.core.record import changed
from attnops.ops import OPS
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.tune.clock import Run


def eager(kernel: Kernel, call: Call, policy: str = "") -> Run:
    """What runs a kernel under a policy, as an eager call does."""
    return partial(kernel.run, changed(call.record, policy=policy))


@dataclass(frozen=True)
class Task:
    """Calls that are alike, which a measurement makes one after the other, and what they should give.

    allowed: the error of each number of `want`. moved, flops: the bytes and the operations of a call; 0
    if unknown. peers: what others have for a call. alone: vendors' calls that give another result,
    which is not compared. used: the parts of results that are compared. steady: is the deterministic
    choice timed as well? run_of: what runs a kernel. rounds: of the clock.
    """

    name: str
    calls: Sequence[Call]
    want: Any = None
    allowed: Any = None
    moved: float = 0.0
    flops: float = 0.0
    peers: Mapping[str, Callable[[Call], Run]] = field(default_factory=dict)
    alone: Mapping[str, Callable[..., Run]] = field(default_factory=dict)
    used: Callable[[list[Tensor]], list[Tensor]] = list
    steady: bool = True
    run_of: Callable[[Kernel, Call], Run] = eager
    rounds: int = 5

    def shares(self, setup: Setup, us: float) -> Row:
        """What is moved and done in `us`, of the ceilings that were measured."""
        work = {"of_bandwidth": (self.moved, "bandwidth_tb_s"), "of_flops": (self.flops, "matmul_tflop_s")}
        found = {n: done / us / 1e6 / setup.ceilings[c] for n, (done, c) in work.items() if done and c in setup.ceilings}
        found |= {"of_ceiling": max(found.values())} if self.flops and found else {}
        return {name: round(share, 4) for name, share in found.items()}


def points_of(op: str) -> Mapping[str, tuple[Any, ...]]:
    """By suite the calls that the op's family lists."""
    found: Mapping[str, tuple[Any, ...]] | None = OPS[op].of_family("bench_points", "POINTS")
    return found or {}


def listed(suite: str) -> list[tuple[str, Any]]:
    """(op, point) of all calls that are listed for a suite, in order."""
    return sorted(((op, point) for op in OPS for point in points_of(op).get(suite, ())), key=lambda found: found[1].place)


def as_it_is(point: Any, size: str) -> Any:
    """A point of one size."""
    return point


@dataclass(frozen=True)
class OpSuite:
    """A suite of the calls that families list for it: a function of a Setup.

    tasks: what is compared at a point of an op, as a rule Tasks. rows: those of a task. count: by size of the run, how many
    points. sized: a point at that size, None if it is left out. points: those of a suite with their ops. summary: do the rows
    of a case end with the regret of its choices?
    """

    name: str
    tasks: Callable[[Setup, Pool, str, Any], Iterable[Any]]
    rows: Callable[[Setup, Any], list[Row]]
    count: Mapping[str, int] = field(default_factory=dict, hash=False)
    sized: Callable[[Any, str], Any] = as_it_is
    points: Callable[[str], list[tuple[str, Any]]] = listed
    summary: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops whose kernels it may run."""
        return tuple(dict.fromkeys((*(op for op, _ in self.points(self.name)), *(op for op in OPS if self.name in points_of(op)))))

    def __call__(self, setup: Setup) -> dict[str, Case]:
        """One a point."""
        pool, some = Pool(setup.device), self.points(self.name)[: self.count.get(setup.size)]
        sized = [(op, found) for op, point in some if (found := self.sized(point, setup.size)) is not None]
        return {point.name: partial(self.measure, setup, pool, op, point) for op, point in sized}

    @torch.no_grad()
    def measure(self, setup: Setup, pool: Pool, op: str, point: Any) -> list[Row]:
        """The rows of a point."""
        rows = [row for task in self.tasks(setup, pool, op, point) for row in self.rows(setup, task)]
        chosen = [row for row in rows if "us" in row]
        return [*rows, *(choices.summary(point.name, chosen) if self.summary and chosen else ())]
