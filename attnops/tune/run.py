"""`measure`: times every usable kernel over a grid and makes the table of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attnops.kernel import kernels_of
from attnops.measured import Grid, Shape, Sizes, Table, cpu_name, version_of
from attnops.problem import Target
from attnops.tune.calls import Pool, build
from attnops.tune.shapes import LARGEST_BYTES, Plan
from attnops.tune.timing import Stopwatch
from attnops.version import VERSION

TOO_SLOW = 8.0
"""A kernel this many times slower than the best at a smaller size is not timed at a larger one."""

LEAST_S, HARD = 5.0, 1.2
"""Seconds that every shape gets, and how many budgets all may take with what is compiled on the way."""

ENOUGH = 0.5
"""Of a shape's points: of fewer, the smallest, nothing follows for large calls."""

SHORTEST = 0.6
"""The shortest request of a timed batch that reads a cache, as a share of the longest."""

Progress = Callable[[str, int, int], None]
Keep = Callable[[Table], None]


@dataclass
class Report:
    """What a measurement did. points, timings: how many. seconds: in all. late: points left out for want of time or memory."""

    points: int = 0
    timings: int = 0
    seconds: float = 0.0
    late: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def measure(
    plans: Sequence[Plan],
    stopwatch: Stopwatch,
    device: torch.device,
    budget_s: float = 150.0,
    progress: Progress = lambda what, done, total: None,
    keep: Keep = lambda table: None,
) -> tuple[Table, Report]:
    """Time every kernel of `stopwatch` that can run, at every size of every plan, smaller sizes first.

    Each shape gets its share of what is left of `budget_s`, by its number of points and never less than LEAST_S, first calls not
    counted; with them it all takes HARD budgets at most. Points that come too late have no time, and a table scales their smaller
    neighbour's; a shape of which less than ENOUGH was in time is left out, and so is one that a single kernel answers: there is nothing
    to choose.
    progress: called with (shape, points done, points in all). keep: called with the table so far after every shape.
    """
    start, report = time.monotonic(), Report()
    began = _timed_s(stopwatch)
    total = left = sum(sum(map(plan.allows, _points(plan))) for plan in plans)
    pool = Pool(device)
    if device.type == "cuda" and plans:
        with contextlib.suppress(torch.OutOfMemoryError):  # else it grows as far as it can
            pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))
    grids: list[Grid] = []

    def table() -> Table:
        report.seconds = round(time.monotonic() - start, 1)
        return Table(gpu_name(device), str(Target.of(device)), _versions(grids), tuple(grids), _made(stopwatch, report))

    for plan in plans:
        mine = sum(map(plan.allows, _points(plan)))
        rest = budget_s - (_timed_s(stopwatch) - began)
        share = min(max(rest * 1.5 * mine / max(left, 1), LEAST_S), rest)
        step = partial(_step, progress, plan.shape.op, total - left, total)
        grid, cut = _measure(plan, stopwatch, pool, (share, start + HARD * budget_s), report, step)
        if len(grid.us) > 1 and cut <= (1 - ENOUGH) * mine:
            grids.append(grid)
            keep(table())
        left -= mine
    report.broken |= {f"plan of {name}": why for name, why in stopwatch.unplanned.items()}
    return table(), report


def _step(progress: Progress, op: str, before: int, total: int, done: int) -> None:
    progress(op, before + done, total)


def _points(plan: Plan) -> list[Sizes]:
    return Grid(plan.shape, plan.batch, plan.queries, plan.ratio, {}).points()


def lengths(shape: Shape, at: Sizes) -> tuple[list[int], list[int]]:
    """(new tokens, keys) of each request of a timed call.

    What is known of a cache when a kernel is chosen is the longest it may be, so where keys come from a cache the requests have from
    all of them down to SHORTEST of them, evenly spread. Elsewhere they are alike.
    """
    batch, queries, keys = int(at.batch), int(at.queries), int(at.queries * at.ratio)
    cached = shape.decode or shape.kv_range or (shape.page_size > 0 and at.ratio > 1)
    step = (1 - SHORTEST) / max(batch - 1, 1) if cached else 0.0
    return [queries] * batch, [max(round(keys * (1 - i * step)), 1 if shape.kv_range else queries) for i in range(batch)]


def _timed_s(stopwatch: Stopwatch) -> float:
    """A clock that stands still while kernels are called first: what they compile must not cost a shape its other points."""
    return time.monotonic() - stopwatch.starting_s


def _measure(
    plan: Plan, stopwatch: Stopwatch, pool: Pool, limits: tuple[float, float], report: Report, step: Callable[[int], None]
) -> tuple[Grid, int]:
    """The grid, and how many of its points there was no time for.

    limits: seconds that this shape may take without first calls, and the time at which all ends.
    """
    (share_s, end) = limits
    times: dict[str, list[float | None]] = {}
    plans_us: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    points, shape, start, done, cut = _points(plan), plan.shape, _timed_s(stopwatch), 0, 0
    for index, at in enumerate(points):
        if not plan.allows(at):
            continue
        done += 1
        step(done)
        if _timed_s(stopwatch) - start > share_s or time.monotonic() > end:
            report.late += 1
            cut += 1
            continue
        batch, queries = int(at.batch), int(at.queries)
        try:
            call = build(shape, *lengths(shape, at), pool)
            candidates = stopwatch.candidates(call)
        except torch.OutOfMemoryError:
            pool.drop()
            report.late += 1
            continue
        if len(candidates) < 2:
            continue
        report.points += 1
        for kernel, given, plan_us in candidates:
            row = times.setdefault(kernel.name, [None] * len(points))
            if kernel.name in skipped or _hopeless(plan, times, kernel.name, index):
                continue
            found = stopwatch.time(kernel, given, shape, plan_us)
            if found.us is not None:
                row[index] = _rounded(found.us)
                report.timings += 1
                if plan_us is not None:
                    plans_us.setdefault(kernel.name, []).append(plan_us)
            elif found.broken:
                skipped[kernel.name] = found.reason
                report.broken[f"{shape.op}.{kernel.name}"] = f"{found.reason} (batch {batch}, queries {queries}, ratio {at.ratio:g})"
            elif not any(row) or found.given_up:
                skipped[kernel.name] = found.reason
    # A kernel that raised at one size is not trusted at the others, and of one that was given up half-way the large sizes are missing.
    us = {name: tuple(row) for name, row in times.items() if name not in skipped and any(row)}
    host = {name: float(f"{statistics.median(all_us):.3g}") for name, all_us in plans_us.items() if name in us}
    return Grid(shape, plan.batch, plan.queries, plan.ratio, us, host, skipped), cut


def _rounded(us: float) -> float:
    """Three digits, and no fractions of long times: a table shall be small, and timings differ by more."""
    return float(round(us)) if us >= 100 else float(f"{us:.3g}")


def _hopeless(plan: Plan, times: dict[str, list[float | None]], name: str, index: int) -> bool:
    """Was the kernel TOO_SLOW at a size one step smaller, or not even timed there for that reason?"""
    counts = (len(plan.batch), len(plan.queries), len(plan.ratio))
    strides = (counts[1] * counts[2], counts[2], 1)
    for stride, count in zip(strides, counts, strict=True):
        if index // stride % count == 0:
            continue
        before = index - stride
        known = [row[before] for row in times.values()]
        best = min((t for t in known if t is not None), default=None)
        mine = times[name][before]
        if best is not None and (mine is None or mine > TOO_SLOW * best):
            return True
    return False


def gpu_name(device: torch.device) -> str:
    """What tables call this device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _versions(grids: Sequence[Grid]) -> dict[str, str]:
    names = {(g.shape.op, name) for g in grids for name in g.us}
    return {f"{op}.{name}": version_of(kernels_of(op)[name]) for op, name in sorted(names)}


def _made(stopwatch: Stopwatch, report: Report) -> dict[str, Any]:
    launch = getattr(stopwatch.clock, "launch_us", None)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "attnops": VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": report.seconds,
        "timings": report.timings,
        **({} if launch is None else {"launch_us": round(launch, 2)}),
    }
