"""`attnops tune`: times the kernels of this machine and writes the table that selection reads."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from attnops.bench import device_of
from attnops.cli.tables import Data, new_table
from attnops.core.errors import BadTable, InvalidInput
from attnops.core.kernel import kernel_names
from attnops.core.problem import Target
from attnops.measured import Grid, Table, in_force, title
from attnops.measured.store import check_place, path_for, read_text, save
from attnops.measured.table import from_json
from attnops.tune.clock import ceilings, clock_for
from attnops.tune.grids import asked_by, sweeps_of
from attnops.tune.run import COMPILED, Report, Stopwatch, compile_ahead, gpu_name, measure


def run(
    console: Console,
    *,
    ops: tuple[str, ...] = (),
    kernels: tuple[str, ...] = (),
    grid: str = "",
    budget_s: float = 150.0,
    first_calls_s: float = 20.0,
    output: Path | None = None,
) -> Data:
    """Measure this machine's GPU, or its CPU without one, and write the table after every kind of
    call. Options of the command; () is all.

    Raises InvalidInput: an unknown name, a budget of 0 or less, an output that is no file, or no
    call that two kernels can answer.
    """
    if unknown := set(kernels) - set(kernel_names()):
        raise InvalidInput("kernels", ", ".join(sorted(unknown)), " | ".join(kernel_names()))
    check_seconds(budget_s=budget_s, first_calls_s=first_calls_s)
    if output is not None:
        check_place(output)
    device = device_of("")
    on_gpu = device.type == "cuda"
    grid = grid or ("full" if on_gpu else "cpu")
    sweeps, path = sweeps_of(grid, ops), output or path_for(gpu_name(device))
    stopwatch = Stopwatch(clock_for(device), first_calls_s, kernels)
    if on_gpu:
        with console.status("compiling ahead"):
            compile_some(grid, device, ops, kernels)
    others = without(table_before(device, output), ops) if ops else None
    rates = ceilings(device, torch.bfloat16 if on_gpu else torch.float32, quick=not on_gpu)

    def keep(table: Table) -> Table:
        save(table := joined(others, replace(table, made={**table.made, **rates})), path)
        return table

    with console.status("timing") as status:
        table, report = measure(sweeps, stopwatch, device, budget_s, status.update, keep)
    if not table.grids:
        raise InvalidInput(
            "kernels",
            ", ".join(kernels) or "all",
            f"two or more that can answer one call on {gpu_name(device)}",
        )
    digest = keep(table).digest
    show(table, report, path, console)
    grids = [
        {
            "shape": title(g.kind),
            "fastest": fastest(g),
            "skipped": dict(g.skipped),
            "plan_us": dict(g.plan_us),
        }
        for g in table.grids
    ]
    return {"path": str(path), "gpu": table.gpu, "digest": digest, **vars(report), "grids": grids}


def check_seconds(**given: float) -> None:
    """Raise InvalidInput unless all are finite numbers > 0."""
    for field, seconds in given.items():
        if not 0 < seconds < inf:
            raise InvalidInput(field, seconds, "a finite number > 0 of seconds")


def compile_some(
    grid: str, device: torch.device, ops: tuple[str, ...], kernels: tuple[str, ...]
) -> None:
    """Compile the kernels of these names whose compiler is slow; () is all."""
    workers = max((os.cpu_count() or 2) - 2, 1)
    if compiled := tuple(n for n in COMPILED if not kernels or n in kernels):
        compile_ahead(grid, device, ops, compiled, workers, limit_s=40.0)


def table_before(device: torch.device, output: Path | None) -> Table | None:
    """This device's own table: that at `output`, or the one in force."""
    if output is None:
        found = in_force(Target.of(device)).table
    else:
        try:
            found = from_json(read_text(output))
        except (BadTable, OSError, UnicodeError):
            return None
    return (
        found if found is not None and found.gpu == gpu_name(device) and not found.source else None
    )


def without(table: Table | None, ops: tuple[str, ...]) -> Table | None:
    """A table less the kinds that are measured anew."""
    if table is None:
        return None
    grids = tuple(g for g in table.grids if asked_by(g.kind) not in ops)
    timed = {f"{g.kind.op}.{name}" for g in grids for name in g.us}
    return replace(
        table,
        grids=grids,
        versions={name: v for name, v in table.versions.items() if name in timed},
    )


def joined(others: Table | None, table: Table) -> Table:
    """`table` with the kinds of `others`, less their times of kernels that `table` has in another
    version."""
    if others is None:
        return table
    old = {
        name
        for name, version in others.versions.items()
        if table.versions.get(name, version) != version
    }
    grids = [
        replace(g, us={n: us for n, us in g.us.items() if f"{g.kind.op}.{n}" not in old})
        for g in others.grids
    ]
    versions = dict(sorted({**others.versions, **table.versions}.items()))
    return replace(table, grids=(*(g for g in grids if g.us), *table.grids), versions=versions)


def show(table: Table, report: Report, path: Path, console: Console) -> None:
    """Print a row a kind of call: how often each kernel was the fastest, and the kernels that were
    not timed."""
    rows = new_table("shape", "fastest at", "not timed")
    for grid in table.grids:
        wins = ", ".join(f"{name} {count}" for name, count in fastest(grid).items())
        rows.add_row(
            escape(title(grid.kind)),
            wins,
            escape("; ".join(f"{n}: {why}" for n, why in grid.skipped.items())),
        )
    console.print(rows)
    console.print(
        f"{report.timings} times at {report.points} sizes on {table.gpu} in {report.seconds:.0f} "
        f"s: {path}",
        soft_wrap=True,
    )
    if report.late:
        console.print(
            f"[yellow]{report.late} sizes were left out[/]: the budget was spent; --budget-s "
            "gives more"
        )
    for name, why in report.broken.items():
        console.print(f"[red]{name} failed[/]: {escape(why)}", soft_wrap=True)


def fastest(grid: Grid) -> dict[str, int]:
    """The number of sizes at which each kernel was the fastest, most first."""
    wins = Counter(
        min(known)[1]
        for i in range(len(grid.points()))
        if (known := [(t, n) for n, us in grid.us.items() if (t := us[i])])
    )
    return dict(wins.most_common())
