"""Runs suites, in this process or with one worker process a GPU, and writes a results file a suite after every case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attnops.bench.files import environment, write
from attnops.bench.rows import Case, LeftOut, one_line
from attnops.bench.setup import Setup
from attnops.bench.suites import Suite, named
from attnops.errors import InvalidInput
from attnops.tune.clock import ceilings

SPENT = "the time was spent"
INTERRUPTED = "the run was ended before"
LOST = "the device was lost"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: rows as `Row.as_dict` gives them, or why it failed or was left out.

    lost: the device raises from now on, so this process can measure no further case.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    left_out: str = ""
    seconds: float = 0.0
    lost: bool = False


Cases = Mapping[str, Mapping[str, Case]]
"""By suite and name."""


def run(
    suites: Sequence[Suite], setup: Setup, *, budget_s: float = 400.0, out: Path | None = None, commit: str = "", gpus: int = 1,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The reports of some suites by name.

    Args:
        suites: as `suites.named` gives them.
        setup: options of the run.
        budget_s: seconds after which no case starts, see `in_order`.
        out: folder for a file of each suite, rewritten after each of its cases.
        commit: of the code; "" asks git.
        gpus: number of GPUs that share the cases, one worker process each. The first one measures the ceilings.
        tell: receives the name of each case that starts.

    Raises InvalidInput: fewer GPUs, an unknown way or model, or a folder that cannot be made.
    """
    there = torch.cuda.device_count() if setup.on_gpu else 1
    if not 1 <= gpus <= there:
        raise InvalidInput("gpus", gpus, f"1 to {there}, those that torch finds")
    done: dict[str, dict[str, Outcome]] = {suite.name: {} for suite in suites}
    cases: dict[str, Mapping[str, Case]] = {}
    for suite in suites:
        try:
            cases[suite.name] = suite.cases(setup)
        except InvalidInput:
            raise
        except Exception as error:  # the other suites go on
            cases[suite.name], done[suite.name][suite.name] = {}, Outcome(failed=one_line(error))
    if out is not None:
        make_folder("out", out)
    tell("ceilings")
    setup = replace(setup, ceilings=ceilings(setup.device, setup.dtype, setup.quick))
    if setup.on_gpu:
        torch.cuda.empty_cache()  # for the worker on this GPU
    head = {
        **environment(setup.device, commit),
        "size": setup.size,
        "ceilings": dict(setup.ceilings),
        **({"gpus": gpus} if gpus > 1 else {}),
    }
    missing = INTERRUPTED

    def save(suite: Suite) -> dict[str, Any]:
        report = {**head, "suite": suite.name, **joined(cases[suite.name], done[suite.name], missing)}
        if out is not None:
            write(report, out / f"{suite.stem}.json")
        return report

    def put(suite: Suite, case: str, outcome: Outcome) -> None:
        done[suite.name][case] = outcome
        save(suite)

    for suite in suites:
        save(suite)
    order = in_order(suites, cases, budget_s)
    if gpus > 1:
        alive = _in_workers(order, setup, gpus, put, tell)
    else:
        made = {suite.name: suite.cases(setup) for suite in suites if cases[suite.name]}
        alive = _here(order, made, put, tell)
    missing = SPENT if alive else LOST
    return {suite.name: save(suite) for suite in suites}


def in_order(suites: Sequence[Suite], cases: Cases, budget_s: float) -> Iterator[tuple[Suite, str]]:
    """The cases to start next, until the budget is spent.

    A suite gets its share of the rest of the budget; afterwards its left cases use what the other suites left.
    """
    end, left = time.monotonic() + budget_s, {suite.name: list(cases[suite.name]) for suite in suites}
    for again in (False, True):
        for i, suite in enumerate(suites):
            now, names = time.monotonic(), left[suite.name]
            part = 1.0 if again else suite.share / sum(s.share for s in suites[i:])
            until = now + part * max(0.0, end - now)
            while names and time.monotonic() <= until:
                yield suite, names.pop(0)


Put = Callable[[Suite, str, Outcome], None]


def _here(order: Iterator[tuple[Suite, str]], cases: Cases, put: Put, tell: Callable[[str], None]) -> bool:
    """Measure in this process. False: the device was lost."""
    for suite, case in order:
        tell(f"{suite.name}: {case}")
        outcome = outcome_of(cases[suite.name][case])
        put(suite, case, outcome)
        if outcome.lost:
            return False
    return True


def _in_workers(order: Iterator[tuple[Suite, str]], setup: Setup, gpus: int, put: Put, tell: Callable[[str], None]) -> bool:
    """Measure with a worker a GPU. A worker that dies, or loses its device, fails its case and is replaced."""

    def worker(gpu: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), _start_worker, (gpu if setup.on_gpu else None,))

    workers = [worker(gpu) for gpu in range(gpus)]
    running: dict[Future[Outcome], tuple[int, Suite, str]] = {}

    def start(gpu: int) -> None:
        if (following := next(order, None)) is not None:
            suite, case = following
            tell(f"GPU {gpu}: {suite.name}: {case}")
            running[workers[gpu].submit(_in_worker, suite.name, case, replace(setup, device=_device(setup, gpu)))] = gpu, *following

    try:
        for gpu in range(gpus):
            start(gpu)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                gpu, suite, case = running.pop(future)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    outcome = Outcome(failed="its process died", lost=True)
                except Exception as error:
                    outcome = Outcome(failed=one_line(error))
                put(suite, case, outcome)
                if outcome.lost:
                    workers[gpu].shutdown(wait=False)
                    workers[gpu] = worker(gpu)
                start(gpu)
    finally:
        for pool in workers:
            pool.shutdown(wait=False, cancel_futures=True)
    return True


def _device(setup: Setup, gpu: int) -> torch.device:
    return torch.device("cuda", gpu) if setup.on_gpu else setup.device


def _start_worker(gpu: int | None) -> None:
    from attnops.configs import quiet_transformers

    quiet_transformers().__enter__()  # until the process ends
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _in_worker(suite: str, case: str, setup: Setup) -> Outcome:
    return outcome_of(_cases_of(suite, setup)[case])


@lru_cache(maxsize=1)
def _cases_of(suite: str, setup: Setup) -> Mapping[str, Case]:
    """The cases of a suite share a model, so a worker keeps them while it stays with the suite."""
    return named((suite,))[0].cases(setup)


def outcome_of(case: Case) -> Outcome:
    """Run one case. Never raises."""
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    failed = left_out = ""
    try:
        rows = [row.as_dict() for row in case()]
    except LeftOut as reason:
        left_out = str(reason)
    except Exception as error:  # the other cases go on
        failed = one_line(error)
    lost = False
    try:
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:  # after an illegal access every CUDA call raises
        failed, left_out, lost = failed or one_line(error), "", True
    return Outcome(rows, failed, left_out, round(time.monotonic() - start, 1), lost)


def joined(names: Mapping[str, Case], done: Mapping[str, Outcome], missing: str = SPENT) -> dict[str, Any]:
    """The sections of a report that its cases fill. missing: why cases without an outcome were left out."""
    every = {name: done.get(name, Outcome(left_out=missing)) for name in {**names, **done}}
    return {
        "rows": [row for one in every.values() for row in one.rows],
        "left_out": {name: one.left_out for name, one in every.items() if one.left_out},
        "failed": {name: one.failed for name, one in every.items() if one.failed},
        "case_seconds": {name: one.seconds for name, one in every.items() if one.seconds},
        "seconds": round(sum(one.seconds for one in every.values()), 1),
    }


def make_folder(field: str, path: Path) -> None:
    """Raises InvalidInput if `path` is no folder and cannot become one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, f"{path} ({type(error).__name__})", "a folder, or where one may be made") from None
