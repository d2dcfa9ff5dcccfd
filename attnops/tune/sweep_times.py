"""The times of one sweep, as they come in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from math import inf
from typing import NamedTuple

from attnops.measured import Grid
from attnops.ops.sweeps import Sweep

# A kernel this many times slower than the best at a smaller size is not timed at a larger one.
TOO_SLOW = 8.0


class Timing(NamedTuple):
    """Device microseconds of one kernel at one size; None with the reason. broken: the kernel
    raised. given_up: it was not started."""

    us: float | None
    reason: str = ""
    broken: bool = False
    given_up: bool = False


class SweepTimes:
    """The times of a sweep's points by kernel, and of host plans; and why kernels have none."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.count = sweep, len(sweep.points())
        self.us: defaultdict[str, list[float | None]]
        self.us = defaultdict(lambda: [None] * self.count)
        self.plans_us: dict[str, list[float]] = defaultdict(list)
        self.skipped: dict[str, str] = {}

    def wants(self, name: str, index: int) -> bool:
        """Is the kernel to be timed at this point? Not where it was TOO_SLOW one size smaller, or
        was not timed for that reason."""
        mine, stride = self.us[name], 1
        for count in map(len, (self.sweep.ratio, self.sweep.queries, self.sweep.batch)):
            if index // stride % count:
                smaller = index - stride
                best = min(
                    (us for row in self.us.values() if (us := row[smaller]) is not None),
                    default=inf,
                )
                if best < inf and (mine[smaller] or inf) > TOO_SLOW * best:
                    return False
            stride *= count
        return name not in self.skipped

    def add(self, name: str, index: int, timing: Timing, plan_us: float | None) -> None:
        """Take over a time, or the reason against further ones."""
        if timing.us is not None:
            self.us[name][index] = rounded(timing.us)
            if plan_us is not None:
                self.plans_us[name].append(plan_us)
        elif timing.broken or timing.given_up or not any(self.us[name]):
            self.skipped[name] = timing.reason

    def grid(self) -> Grid:
        """All that was timed.

        A kernel that raised at one size is not trusted at others, and a kernel that was given up
        has no times of large sizes.
        """
        us = {
            name: tuple(row)
            for name, row in self.us.items()
            if name not in self.skipped and any(row)
        }
        host = {
            name: float(f"{statistics.median(all_us):.3g}")
            for name, all_us in self.plans_us.items()
            if all_us and name in us
        }
        s = self.sweep
        return Grid(s.kind, s.batch, s.queries, s.ratio, us, host, self.skipped)


def rounded(us: float) -> float:
    """Three digits, and no fractions of long times: timings vary by more."""
    return float(round(us)) if us >= 100 else float(f"{us:.3g}")
