"""The scripts' command line, results file, and loop over cases with a budget."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnops.bench.files import environment, write as write_file
from attnops.bench.rows import WRONG, Make, Row, Way, largest_error, time_if_right
from attnops.errors import one_line
from attnops.tune.clock import kernels_us

ROOT = Path(__file__).resolve().parent.parent
Job = tuple[str, str, Callable[[], Any]]  # section of the report, name of the case, and the function that measures it


def word_of(gpu: str) -> str:
    """The model in a device's name: letters and then digits, else the last word. `h200` for an NVIDIA H200."""
    found = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    return (found[0] if found else gpu.split()[-1]).lower()


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    machine = word_of(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / machine)


def write(report: Mapping[str, Any], name: str, device: str) -> Path:
    """Write one results file, with commit, date, device and versions. `$COMMIT` names the commit if there is no git."""
    return write_file(environment(device, os.environ.get("COMMIT", "")) | report, folder_of(device) / name)


def timed(
    device: str, ways: Mapping[str, Way | Make], want: Any, budget: float, distance: Callable[[Any, Any], float] = largest_error,
) -> tuple[dict[str, Row], dict[str, str]]:  # fmt: skip
    """(the rows of the ways that are right, by way; why the others have no times). GPU time of replays with a cold L2 cache."""
    torch._dynamo.reset()
    rows = time_if_right("", ways, want, budget, partial(kernels_us, torch.device(device)), distance)
    right = {row["way"]: row for row in rows if "wrong" not in row}
    return right, {row["way"]: row["wrong"] for row in rows if "wrong" in row}


def us_of(rows: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Median and spread of each row."""
    return {name: {n: row[n] for n in ("median_us", "spread_us") if n in row} for name, row in rows.items()}


def arguments(doc: str | None, budget_s: float = 0.0) -> argparse.ArgumentParser:
    """A parser with `--device` and, given a default, `--budget-s`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if budget_s:
        parser.add_argument("--budget-s", type=float, default=budget_s)
    return parser


def failure(found: dict[str, Any] | list[Row]) -> str:
    """Why a job fails its case, or "": `failed`, taken out of its figures, or the ways whose result is wrong, in `left_out` or rows."""
    if isinstance(found, dict):
        said, wrong = found.pop("failed", ""), found.get("left_out", {})
    else:
        said, wrong = "", {row["way"]: row["wrong"] for row in found if "wrong" in row}
    return said or "; ".join(f"{way}: {text}" for way, text in wrong.items() if text.startswith(WRONG))


def measure_all(
    jobs: Iterable[Job], report: dict[str, Any], file: str, device: str, budget_s: float,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda report: report,
) -> int:  # fmt: skip
    """Measure until the budget is spent, and write the report after every case. Returns the exit code: 1 if a case failed.

    A job returns figures, or a list of rows. An error fails its case alone, and so does what `failure` finds in them.
    finish: completes the report.
    """
    start, report = time.monotonic(), {**report, "failed": {}}
    with torch.no_grad():
        for section, name, job in jobs:
            if time.monotonic() - start > budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                found = job()
                report["failed"] |= {name: why} if (why := failure(found)) else {}
                if isinstance(found, dict):
                    report.setdefault(section, {})[name] = found
                else:
                    report.setdefault(section, []).extend(found)
                print(section, name, json.dumps(found), flush=True)
            except Exception as error:  # the other cases go on
                traceback.print_exc()
                report["failed"][name] = one_line(error)
            report["seconds"] = round(time.monotonic() - start, 1)
            write(report, file, device)
        report = finish(report)
    print(report["failed"], write(report, file, device))
    return 1 if report["failed"] else 0
