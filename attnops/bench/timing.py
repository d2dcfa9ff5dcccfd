"""How long calls take: medians and spread of calls that are made in turn, so that drift hits all alike.

A kernel's time on a GPU is that of replays of a CUDA graph that holds the one call (`attnops.tune.clock.GraphClock`). A step's is
wall-clock, the device waited for at its end, for a step is what its user waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

LEAST_S = 0.0005
"""What is timed at once takes at least so long: calls of a few microseconds are made several times between two looks at the clock."""


@dataclass(frozen=True)
class Timed:
    """What is timed. before: made before each time, and not timed. per: what its time is divided by, as the tokens it makes."""

    call: Call
    before: Call | None = None
    per: int = 1


def spread(us: list[float]) -> dict[str, float]:
    """Median and half the interquartile range of some times; of two, half their distance, and of one, none is known."""
    low, _, high = statistics.quantiles(us, n=4) if len(us) > 2 else (min(us), 0.0, max(us))
    known = {"spread_us": round((high - low) / 2, 2)} if len(us) > 1 else {}
    return {"median_us": round(statistics.median(us), 2), **known}


def synchronize() -> None:
    """For every device that has work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved_us(calls: Mapping[str, Call], repeats: int = 15, inner: int = 400, wait: bool = True) -> dict[str, dict[str, float]]:
    """Microseconds a call of each of `calls`, `inner` of them between two looks at the clock. wait: for the device, first."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if wait:
                synchronize()
            taken[name].append((time.perf_counter() - start) / inner * 1e6)
    return {name: spread(us) for name, us in taken.items()}


def steps_us(steps: Mapping[str, Timed], rounds: int = 25, cap_s: float = 4.0) -> dict[str, dict[str, float]]:
    """Microseconds of each of `steps`, made in turn; they have been called before.

    rounds: at most. cap_s: no further round is begun once a round of all would take longer in all; three are made at least.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    inner = {name: 1 if step.before else max(1, round(LEAST_S / max(_seconds(step, 1), 1e-7))) for name, step in steps.items()}
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and (time.perf_counter() - began) * (done + 1) / done > cap_s:
            break
        for name, step in steps.items():
            taken[name].append(_seconds(step, inner[name]) / inner[name] / step.per * 1e6)
    return {name: spread(us) for name, us in taken.items()}


def _seconds(step: Timed, inner: int) -> float:
    if step.before is not None:
        step.before()
    synchronize()
    start = time.perf_counter()
    for _ in range(inner):
        step.call()
    synchronize()
    return time.perf_counter() - start


def kernels_us(device: torch.device, calls: Mapping[str, Call], rounds: int = 25, cap_s: float = 2.0) -> dict[str, dict[str, float]]:
    """Microseconds of each of `calls` on the device; they have been called before. On a GPU the L2 cache is flushed before each."""
    if device.type == "cuda":
        from attnops.tune.clock import GraphClock

        return {name: spread(us) for name, us in GraphClock(device).in_turn(calls, rounds).items()}
    return steps_us({name: Timed(call) for name, call in calls.items()}, rounds=rounds, cap_s=cap_s)
