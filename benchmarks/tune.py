"""Makes the table of measured times without the command's extras and writes table.json: what `attnops tune --output` writes.

    python benchmarks/tune.py [--device cpu|cuda] [--grid full|brief] [--budget-s 190] [--ops a,b] [--kernels a,b]

The table that ships as attnops/tables/<gpu>.json is a copy of it. The file is written after every shape, the most used ones first, so
that a run that is cut off leaves a table of what it had. All takes 1.2 budgets at most, after AHEAD_S at most of compiling. `--grid brief`
has all shapes at a third of the sizes: `--grid brief --budget-s 150 --first-calls-s 8` is four minutes of a GPU on a host of 16 cores.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import torch
from common import default_device, folder_of

from attnops.bench.ceilings import measure as measured_rates
from attnops.bench.setup import Setup
from attnops.measured import Table, save
from attnops.tune import COMPILED, Stopwatch, clock_for, compile_ahead, measure, plans_of

AHEAD_S = 40.0
"""Seconds for what is compiled before anything is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--grid", default="")
    parser.add_argument("--budget-s", type=float, default=190.0)
    parser.add_argument("--first-calls-s", type=float, default=20.0)
    parser.add_argument("--ops", default="")
    parser.add_argument("--kernels", default="")
    given = parser.parse_args()
    device = torch.device(given.device, torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    plans = plans_of(given.grid or ("full" if given.device == "cuda" else "cpu"), tuple(filter(None, given.ops.split(","))))
    stopwatch = Stopwatch(clock_for(device), given.first_calls_s, tuple(filter(None, given.kernels.split(","))))
    if given.device == "cuda" and (not given.kernels or set(COMPILED) & set(given.kernels.split(","))):
        workers = max((os.cpu_count() or 2) - 2, 1)
        seconds = compile_ahead(given.grid or "full", device, tuple(filter(None, given.ops.split(","))), workers=workers, limit_s=AHEAD_S)
        print(f"compiled ahead in {seconds:.0f} s", flush=True)
    last = [time.monotonic()]

    def progress(what: str, done: int, total: int) -> None:
        if time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(f"{done}/{total} {what}", flush=True)

    path = folder_of(given.device) / "table.json"
    rates = measured_rates(Setup(device))

    def keep(table: Table) -> None:
        save(replace(table, made={**table.made, **rates}), path)

    table, report = measure(plans, stopwatch, device, given.budget_s, progress, keep)
    keep(table)
    print(f"{report} {path} {path.stat().st_size} bytes")
    print("first calls over 2 s:", {name: round(s, 1) for name, s in stopwatch.spent_s.items()})
    for grid in table.grids:
        if grid.skipped:
            print(grid.shape.op, grid.shape.q_heads, grid.shape.head_dim, dict(grid.skipped))


if __name__ == "__main__":
    main()
