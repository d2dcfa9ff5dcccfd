"""Helpers of the scripts: the command line, the results file, and a loop over cases with a budget."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from attnops.bench.files import environment as made_with
from attnops.bench.files import text_of as text_of
from attnops.bench.profile import launched
from attnops.tune.clock import Timed
from attnops.tune.clock import host_us as host_us
from attnops.tune.clock import one_line as why
from attnops.tune.clock import spread as spread

ROOT = Path(__file__).resolve().parent.parent
Job = tuple[str, str, Callable[[], dict[str, Any]]]
"""Section of the report, name of the case, and the function that measures it."""


def environment(device: str) -> dict[str, Any]:
    """Commit, date, device and versions. `$COMMIT` names the commit if there is no git."""
    return made_with(device, os.environ.get("COMMIT", ""))


def word_of(gpu: str) -> str:
    """The model in a device's name: letters and then digits, else the last word. `h200` for an NVIDIA H200."""
    found = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    return (found[0] if found else gpu.split()[-1]).lower()


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    machine = word_of(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
    return Path(out) if (out := os.environ.get("OUT")) else ROOT / "benchmarks" / "results" / machine


def write(report: dict[str, Any], name: str, device: str) -> Path:
    """Write one results file."""
    path = folder_of(device) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(report))
    return path


def default_device() -> str:
    """`cuda` if available."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_kernels(run: Callable[[], Any]) -> list[str]:
    """The kernels that one call launches on the device, in order."""
    run()
    return [kernel.name[:100] for kernel in sorted(launched(Timed(run)), key=lambda kernel: kernel.start)]


def arguments(doc: str | None, devices: tuple[str, ...] = ("cuda",), budget_s: float = 0.0) -> argparse.ArgumentParser:
    """A parser with `--device` and, given a default, `--budget-s`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default=default_device())
    if budget_s:
        parser.add_argument("--budget-s", type=float, default=budget_s)
    return parser


def measure_all(
    jobs: Iterable[Job], report: dict[str, Any], file: str, device: str, budget_s: float,
    told: Callable[[dict[str, Any]], Any] = json.dumps,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda report: report,
) -> int:  # fmt: skip
    """Measure until the budget is spent, and write the report after every case. Returns the exit code: 1 if a case failed.

    told: the text to print of a case. finish: completes the report. An error fails its case alone, and so does `failed` in its figures.
    """
    start, report = time.monotonic(), {**report, "failed": {}}
    with torch.no_grad():
        for section, name, job in jobs:
            report.setdefault(section, {})
            if time.monotonic() - start > budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                found = report[section][name] = job()
                if failed := found.pop("failed", ""):
                    report["failed"][name] = failed
                print(section, name, told(found), flush=True)
            except Exception as error:  # the other cases go on
                traceback.print_exc()
                report["failed"][name] = why(error)
            report["seconds"] = round(time.monotonic() - start, 1)
            write(report, file, device)
    report = finish(report)
    print(report["failed"], write(report, file, device))
    return 1 if report["failed"] else 0
