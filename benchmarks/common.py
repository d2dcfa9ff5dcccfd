"""The scripts' command line, results file, clock, and loop over cases with a budget."""

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
from types import SimpleNamespace
from typing import Any

import torch

from attnops.bench.files import environment as made_with, write as write_file
from attnops.bench.profile import launched
from attnops.inputs import Call
from attnops.kernel import Kernel
from attnops.tune import Stopwatch
from attnops.tune.clock import GraphClock, Run, Timed, host_us, one_line as why, synchronize

ROOT = Path(__file__).resolve().parent.parent
Job = tuple[str, str, Callable[[], dict[str, Any]]]  # section of the report, name of the case, and the function that measures it


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
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / machine)


def write(report: Mapping[str, Any], name: str, device: str) -> Path:
    """Write one results file."""
    return write_file(report, folder_of(device) / name)


def clock_of(device: str) -> Any:
    """A clock with `spreads`: GPU time of replays with a cold L2 cache, or wall-clock time on a CPU."""
    return GraphClock(device) if device == "cuda" else SimpleNamespace(launch_us=0.0, spreads=partial(host_us, repeats=3, inner=1))


def device_kernels(run: Run) -> list[str]:
    """The kernels that one call launches on the device, in order."""
    run()
    return [kernel.name[:100] for kernel in sorted(launched(Timed(run)), key=lambda kernel: kernel.start)]


def tried(makers: Mapping[str, Callable[[], Run]]) -> tuple[dict[str, Run], dict[str, str]]:
    """(the calls by name, each called once; those that raise, with the reason)."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name, make in makers.items():
        try:
            run = make()
            run()
            synchronize()
            runs[name] = run
        except Exception as error:  # the other calls go on
            left_out[name] = why(error)
    return runs, left_out


def candidates(call: Call, **options: Any) -> list[tuple[Kernel, Call]]:
    """The kernels that can answer a call, each with its plan and workspace. options: of a Stopwatch."""
    return [(kernel, given) for kernel, given, _ in Stopwatch(lambda *_: 0.0, **options).candidates(call)]


def arguments(doc: str | None, devices: tuple[str, ...] = ("cuda",), budget_s: float = 0.0) -> argparse.ArgumentParser:
    """A parser with `--device` and, given a default, `--budget-s`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default="cuda" if torch.cuda.is_available() else "cpu")
    if budget_s:
        parser.add_argument("--budget-s", type=float, default=budget_s)
    return parser


def measure_all(
    jobs: Iterable[Job], report: dict[str, Any], file: str, device: str, budget_s: float,
    brief: Callable[[dict[str, Any]], Any] = json.dumps,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda report: report,
) -> int:  # fmt: skip
    """Measure until the budget is spent, and write the report after every case. Returns the exit code: 1 if a case failed.

    brief: the text to print of a case. finish: completes the report. An error fails its case alone, and so does `failed` in its figures.
    """
    start, report = time.monotonic(), {**environment(device), **report, "failed": {}}
    with torch.no_grad():
        for section, name, job in jobs:
            cases = report.setdefault(section, {})
            if time.monotonic() - start > budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                found = cases[name] = job()
                if failed := found.pop("failed", ""):
                    report["failed"][name] = failed
                print(section, name, brief(found), flush=True)
            except Exception as error:  # the other cases go on
                traceback.print_exc()
                report["failed"][name] = why(error)
            report["seconds"] = round(time.monotonic() - start, 1)
            write(report, file, device)
    report = finish(report)
    print(report["failed"], write(report, file, device))
    return 1 if report["failed"] else 0
