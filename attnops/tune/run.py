"""`measure`: times every usable kernel over a grid and makes a table of the times."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from attnops.inputs import Pool, build, lengths
from attnops.kernel import kernels_of
from attnops.measured import Grid, Table, cpu_name, version_of
from attnops.problem import Target
from attnops.tune.shapes import LARGEST_BYTES, Sweep
from attnops.tune.timing import Stopwatch
from attnops.version import VERSION

TOO_SLOW = 8.0
"""A kernel this many times slower than the best at a smaller size is not timed at a larger one."""

LEAST_S, HARD = 5.0, 1.2
"""Seconds that every shape gets, and the limit in budgets of all timing and compilation together."""

ENOUGH = 0.5
"""The share of a shape's points that must be timed: fewer, the smallest ones, say too little about large calls."""


@dataclass
class Report:
    """Counts. late: points left out for lack of time or memory. broken: by kernel that raised, the error."""

    points: int = 0
    timings: int = 0
    seconds: float = 0.0
    late: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def measure(
    sweeps: Sequence[Sweep],
    stopwatch: Stopwatch,
    device: torch.device,
    budget_s: float = 150.0,
    progress: Callable[[str, int, int], None] = lambda op, done, total: None,
    keep: Callable[[Table], object] = lambda table: None,
) -> tuple[Table, Report]:
    """Time every kernel of `stopwatch` that can run, at every size of every sweep, smaller sizes first.

    Each shape gets its share of the rest of `budget_s` by its number of points, at least LEAST_S, first calls not counted; with them all
    shapes together take at most HARD budgets. A late point has no time, and a table scales the time of its smaller neighbour. A shape
    is left out if fewer than ENOUGH of its points were timed, or if one kernel alone answers it.

    Args:
        progress: called with (op, points done, points in all).
        keep: called with the table so far after every shape.
    """
    start, report, pool, grids = time.monotonic(), Report(), Pool(device), list[Grid]()
    began, total, done = _timed_s(stopwatch), sum(p.allowed for p in sweeps), 0
    if device.type == "cuda" and sweeps:
        with contextlib.suppress(torch.OutOfMemoryError):  # the pool then grows as far as it can
            pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))

    def table() -> Table:
        report.seconds = round(time.monotonic() - start, 1)
        names = sorted({(g.shape.op, name) for g in grids for name in g.us})
        launch = getattr(stopwatch.clock, "launch_us", None)
        made = {"date": time.strftime("%Y-%m-%d"), "attnops": VERSION, "torch": torch.__version__, "cuda": torch.version.cuda}
        made |= {"seconds": report.seconds, "timings": report.timings} | ({} if launch is None else {"launch_us": round(launch, 2)})
        versions = {f"{op}.{name}": version_of(kernels_of(op)[name]) for op, name in names}
        return Table(gpu_name(device), str(Target.of(device)), versions, tuple(grids), made)

    for sweep in sweeps:
        rest = budget_s - (_timed_s(stopwatch) - began)
        share = min(max(rest * 1.5 * sweep.allowed / max(total - done, 1), LEAST_S), rest)

        def step(within: int, sweep: Sweep = sweep, before: int = done) -> None:
            progress(sweep.shape.op, before + within, total)

        grid, cut = _measure(sweep, stopwatch, pool, (share, start + HARD * budget_s), report, step)
        if len(grid.us) > 1 and cut <= (1 - ENOUGH) * sweep.allowed:
            grids.append(grid)
            keep(table())
        done += sweep.allowed
    report.broken |= {f"plan of {name}": why for name, why in stopwatch.unplanned.items()}
    return table(), report


def _timed_s(stopwatch: Stopwatch) -> float:
    """A clock that stops during first calls: compilation must not cost a shape its other points."""
    return time.monotonic() - stopwatch.starting_s


def _measure(
    sweep: Sweep, stopwatch: Stopwatch, pool: Pool, limits: tuple[float, float], report: Report, step: Callable[[int], None]
) -> tuple[Grid, int]:
    """The grid of a sweep, and the number of its points for which the time was too short.

    limits: seconds of this shape without first calls, and the end of the whole measurement.
    """
    share_s, end = limits
    times: dict[str, list[float | None]] = {}
    plans_us: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    points, start, cut = sweep.points(), _timed_s(stopwatch), 0
    for done, (index, at) in enumerate(((index, at) for index, at in enumerate(points) if sweep.allows(at)), 1):
        step(done)
        if _timed_s(stopwatch) - start > share_s or time.monotonic() > end:
            report.late, cut = report.late + 1, cut + 1
            continue
        try:
            candidates = stopwatch.candidates(build(sweep.shape, *lengths(sweep.shape, at), pool))
        except torch.OutOfMemoryError:
            pool.drop()
            report.late += 1
            continue
        if len(candidates) < 2:
            continue
        report.points += 1
        for kernel, given, plan_us in candidates:
            row = times.setdefault(kernel.name, [None] * len(points))
            if kernel.name in skipped or _hopeless(sweep, times, kernel.name, index):
                continue
            found = stopwatch.time(kernel, given, sweep.shape)
            if found.us is not None:
                row[index] = _rounded(found.us)
                report.timings += 1
                if plan_us is not None:
                    plans_us.setdefault(kernel.name, []).append(plan_us)
            elif found.broken:
                skipped[kernel.name] = found.reason
                size = f"(batch {int(at.batch)}, queries {int(at.queries)}, ratio {at.ratio:g})"
                report.broken[f"{sweep.shape.op}.{kernel.name}"] = f"{found.reason} {size}"
            elif not any(row) or found.given_up:
                skipped[kernel.name] = found.reason
    # A kernel that raised at one size is not trusted at others, and a kernel that was given up has no times of large sizes.
    us = {name: tuple(row) for name, row in times.items() if name not in skipped and any(row)}
    host = {name: float(f"{statistics.median(all_us):.3g}") for name, all_us in plans_us.items() if name in us}
    return Grid(sweep.shape, sweep.batch, sweep.queries, sweep.ratio, us, host, skipped), cut


def _rounded(us: float) -> float:
    """Three digits, and no fractions of long times: timings vary by more."""
    return float(round(us)) if us >= 100 else float(f"{us:.3g}")


def _hopeless(sweep: Sweep, times: dict[str, list[float | None]], name: str, index: int) -> bool:
    """Was the kernel TOO_SLOW one size smaller, or not timed there for that reason?"""
    stride = 1
    for count in map(len, (sweep.ratio, sweep.queries, sweep.batch)):
        if index // stride % count:
            best = min((t for row in times.values() if (t := row[index - stride]) is not None), default=inf)
            mine = times[name][index - stride]
            if best < inf and (mine is None or mine > TOO_SLOW * best):
                return True
        stride *= count
    return False


def gpu_name(device: torch.device) -> str:
    """The name of a device in tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
