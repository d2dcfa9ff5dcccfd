"""Running suites: the cases here or by several processes, and a results file of each suite that grows with every case."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnops.bench import ceilings
from attnops.bench.claims import Claims
from attnops.bench.lanes import LOST, spread_over, work
from attnops.bench.report import NOT_YET, SPENT, Found, environment, joined, write
from attnops.bench.setup import Setup
from attnops.bench.suites import Suite
from attnops.errors import InvalidInput


def run(
    suites: Sequence[Suite], setup: Setup, *, budget_s: float = 400.0, out: Path | None = None, commit: str = "", gpus: int = 1,
    stop_s: float = float("inf"),
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The reports of some suites by name.

    budget_s: seconds, after which no case begins; `attnops.bench.lanes.work` says how suites share them. out: a folder for a file of each,
    written whenever a case of it is done. commit: of the code, "" asks git. gpus: that share the cases, each with a process of its own;
    ceilings are measured on the first. stop_s: seconds, after which the cases, then in processes of their own, are ended. Raises
    InvalidInput: there are not so many GPUs, a suite has no such way or model, or the folder cannot be made.
    """
    there = torch.cuda.device_count() if setup.on_gpu else 1
    if not 1 <= gpus <= there:
        raise InvalidInput("gpus", gpus, f"1 to {there}, those that torch finds")
    names = {suite.name: _names(suite, setup) for suite in suites}
    if out is not None:
        make_folder("out", out)
    setup.tell("ceilings")
    setup = replace(setup, ceilings=ceilings.measure(setup))
    said = {**environment(setup.device, commit), "size": setup.size, "ceilings": dict(setup.ceilings)}
    if gpus > 1:
        said["gpus"] = gpus
    by_name = {suite.name: suite for suite in suites}
    found: dict[str, dict[str, Found]] = {suite.name: {} for suite in suites}
    reason = NOT_YET

    def report(name: str) -> dict[str, Any]:
        return {**said, "suite": name, **joined(names[name], found[name], reason)}

    def save(name: str) -> None:
        if out is not None:
            write(report(name), out / f"{by_name[name].stem}.json")

    def put(name: str, case: str, what: Found) -> None:
        found[name][case] = what
        save(name)

    for name in names:
        save(name)
    if gpus > 1 or stop_s < float("inf"):
        alive = spread_over(gpus, suites, setup, budget_s, put, stop_s)
    else:
        with tempfile.TemporaryDirectory(prefix="attnops-bench-") as folder:
            alive = work(suites, setup, Claims(Path(folder)), budget_s, put)
    reason = SPENT if alive else LOST
    for name in names:
        save(name)
    return {suite.name: report(suite.name) for suite in suites}


def _names(suite: Suite, setup: Setup) -> list[str]:
    """Of its cases; none, where making them raises, which is said of it later. Raises InvalidInput: it was asked for what it has not."""
    try:
        return list(suite.cases(setup))
    except InvalidInput:
        raise
    except Exception:
        return []


def make_folder(field: str, path: Path) -> None:
    """Raises InvalidInput: it is there and no folder, or may not be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, f"{path} ({type(error).__name__})", "a folder, or where one may be made") from None
