"""Calls whose weights are read cold: those of the suites `linear` and `experts`.

A measurement is a CUDA graph that goes once through calls whose weights no cache holds
together: copies of one weight, or experts that each call chooses at random, those of one token
without a common one. So most reads are cold. The results that the last replay left are compared,
too. `of_bandwidth`: the bytes of the weights over the time, as a share of the bandwidth measured in
the same run. `error` is the largest one as a share of the error allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Setup, choices
from attnops.bench.rows import Row, Rows, Way, largest_error, time_if_right
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.record import changed
from attnops.core.select import select
from attnops.testing.calls import Call
from attnops.tune.clock import Run, Timed, Times, kernels_us
from attnops.tune.run import tracing

DETERMINISTIC = "deterministic"  # the policy

LESS = {"toy": 128, "small": 16, "quick": 1, "full": 1}
"""By size of the run, the divisor of the weight's rows and columns."""


def running(kernel: Kernel, call: Call, policy: str = "") -> Run:
    """What runs a kernel under a policy, as an eager call does."""
    return partial(kernel.run, changed(call.record, policy=policy))


@dataclass(frozen=True)
class Task:
    """Calls that are alike, which a measurement makes one after the other, and what they should
    give.

    allowed: the error of each number of `want`. moved: the bytes of a call. peers: what others have
    for a call. alone: vendors' calls that give another result, which is not compared. steady: is
    the deterministic choice timed as well? run_of: what runs a kernel.
    rounds: of the clock.
    """

    name: str
    calls: Sequence[Call]
    want: Tensor
    allowed: Any
    moved: float
    peers: Mapping[str, Callable[[Call], Run]] = field(default_factory=dict)
    alone: Mapping[str, Callable[..., Run]] = field(default_factory=dict)
    steady: bool = True
    run_of: Callable[[Kernel, Call], Run] = running
    rounds: int = 5


def in_turn(runs: Iterable[Run]) -> list[Any]:
    """The results of some runs."""
    return [run() for run in runs]


def cold_rows(setup: Setup, task: Task) -> Rows:
    """The rows of calls that read their weights cold, and that of the choice."""
    first, want, allowed, [written] = task.calls[0], task.want, task.allowed, task.calls[0].mutated
    left: dict[str, list[Tensor]] = {}

    def way(name: str, run_of: Callable[[Call], Run]) -> Way:
        outputs = torch.stack([first.arguments[written]] * len(task.calls))
        owned = [
            call.with_(**{written: output})
            for call, output in zip(task.calls, outputs, strict=True)
        ]
        runs, now = [run_of(call) for call in owned], left.setdefault(name, list(outputs))

        def spoil() -> None:
            for result in now:
                result.fill_(float("nan"))

        def run() -> None:
            now[:] = [
                output if (result := one()) is None else result
                for one, output in zip(runs, outputs, strict=True)
            ]

        def results() -> Tensor:
            spoil()
            run()
            return torch.stack(now)

        return Way(Timed(run, before=spoil), results)

    def share(got: Tensor, want: Tensor) -> float:
        return largest_error(got.double() / allowed, (want / allowed).expand(got.shape))

    def clock(steps: Mapping[str, Timed]) -> Times:
        with tracing():
            found = kernels_us(setup.device, steps, task.rounds)
        for name in steps.keys() & checked:
            if not (off := share(torch.stack(left[name]), want)) <= 1:
                raise RuntimeError(
                    f"{task.name}: the timed graph of {name} left results that are off by "
                    f"{off:.3g} of the error allowed"
                )
        return {
            name: {figure: round(us / len(task.calls), 2) for figure, us in one.items()}
            for name, one in found.items()
        }

    kernels = [
        k for k in kernels_of(first.op).values() if not (k.judge or k.refusals(first.problem))
    ]
    ways = {k.name: way(k.name, partial(task.run_of, k)) for k in kernels}
    steady = select(first.problem, DETERMINISTIC).kernel if task.steady else None
    if steady is not None and not steady.judge:
        ways[DETERMINISTIC] = way(DETERMINISTIC, partial(running, steady, policy=DETERMINISTIC))
    checked = tuple(ways)
    ways |= {name: way(name, make) for name, make in task.peers.items()}
    for name, make in task.alone.items():
        ways[name] = Way(
            Timed(partial(in_turn, [make(call.record, setup.compiled) for call in task.calls])),
            lambda: want,
        )

    def shares(us: float, way: Way) -> Row:
        return setup.shares(us, of_bandwidth=task.moved)

    with tracing():
        rows = time_if_right(
            task.name, ways, want, 1.0, clock, share, shares, (*checked, *task.alone)
        )
        return choices.with_choice(rows, first)
