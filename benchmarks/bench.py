"""Runs the suites of `attnops bench` without the command's extras, and writes a file of each.

python benchmarks/bench.py [--device cpu|cuda] [--suites kernels,decode] [--quick] [--budget-s 400] [--model NAME] [--layers N]
"""

from __future__ import annotations

import argparse
import os

import torch
from common import default_device, folder_of

from attnops.bench import Point, Setup, device_of
from attnops.bench.report import bad
from attnops.bench.running import run
from attnops.bench.suites import named
from attnops.cli.explain import quiet_transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--suites", default="", help="with commas; default all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=0, help="that share the cases; default all")
    parser.add_argument("--stop-s", type=float, default=float("inf"), help="when what is not done is ended")
    parser.add_argument("--points", default="", help="requests x tokens before, with commas: 1x1k,8x1k")
    given = parser.parse_args()
    points = tuple(Point.parse(p) for p in given.points.split(",")) if given.points else ()
    suites = named(tuple(filter(None, given.suites.split(","))))
    setup = Setup(
        device_of(given.device), given.quick, given.model, given.layers, points, tell=lambda what: print(what, flush=True)
    )  # fmt: skip
    with quiet_transformers():
        reports = run(
            suites, setup, budget_s=given.budget_s, out=folder_of(given.device), commit=os.environ.get("COMMIT", ""),
            gpus=given.gpus or (max(1, torch.cuda.device_count()) if setup.on_gpu else 1), stop_s=given.stop_s,
        )  # fmt: skip
    for name, report in reports.items():
        print(f"== {name}, {report['seconds']:.0f} s, ceilings {report['ceilings']}")
        for row in report["rows"]:
            print("  ", *(f"{value}" if key in ("case", "way") else f"{key} {value}" for key, value in row.items()))
        print("   left out:", report.get("left_out", {}), "failed:", report.get("failed", {}), flush=True)
    return 1 if bad(reports) else 0


if __name__ == "__main__":
    raise SystemExit(main())
