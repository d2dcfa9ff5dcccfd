"""Makes the table of measured times without the command's extras and writes table.json: what `attnops tune --output` writes.

    python benchmarks/tune.py [--device cpu|cuda] [--grid full] [--budget-s 190] [--ops a,b] [--kernels a,b]

The table that ships as attnops/tables/<gpu>.json is a copy of it.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import default_device, folder_of

from attnops.measured import save
from attnops.tune import COMPILED, Stopwatch, clock_for, compile_ahead, measure, plans_of


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
        seconds = compile_ahead(given.grid or "full", device, tuple(filter(None, given.ops.split(","))))
        print(f"compiled ahead in {seconds:.0f} s", flush=True)
    last = [time.monotonic()]

    def progress(what: str, done: int, total: int) -> None:
        if time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(f"{done}/{total} {what}", flush=True)

    table, report = measure(plans, stopwatch, device, given.budget_s, progress)
    path = folder_of(given.device) / "table.json"
    save(table, path)
    print(f"{report} {path} {path.stat().st_size} bytes")
    print("first calls over 2 s:", {name: round(s, 1) for name, s in stopwatch.spent_s.items()})
    for grid in table.grids:
        if grid.skipped:
            print(grid.shape.op, grid.shape.q_heads, grid.shape.head_dim, dict(grid.skipped))


if __name__ == "__main__":
    main()
