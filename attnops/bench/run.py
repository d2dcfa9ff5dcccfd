"""Runs suites, in this process or with one worker process a GPU, and writes a results file a suite after every case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attnops.bench.files import environment, make_folder, write
from attnops.bench.rows import Case, LeftOut
from attnops.bench.setup import Setup
from attnops.bench.suites import Suite
from attnops.errors import InvalidInput
from attnops.tune.clock import ceilings, one_line, synchronize

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


Order = Iterator[tuple[Suite, str]]


def run(
    suites: Sequence[Suite], setup: Setup, *, budget_s: float = 400.0, out: Path | None = None, commit: str = "", gpus: int = 1,
    tell: Callable[[str], None] = lambda case: None,
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
    cases: dict[str, list[str]] = {suite.name: [] for suite in suites}
    for suite in suites:
        try:
            cases[suite.name] = list(suite.cases(setup))
        except InvalidInput:
            raise
        except Exception as error:  # the other suites go on
            done[suite.name][suite.name] = Outcome(failed=one_line(error))
    if out is not None:
        make_folder("out", out)
    tell("ceilings")
    setup = replace(setup, ceilings=ceilings(setup.device, setup.dtype, setup.quick))
    if setup.on_gpu:
        torch.cuda.empty_cache()  # for the worker on this GPU
    head = {**environment(setup.device, commit), "size": setup.size, "ceilings": dict(setup.ceilings)} | (
        {"gpus": gpus} if gpus > 1 else {}
    )
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
    missing = SPENT if measure(in_order(suites, cases, budget_s), setup, gpus, put, tell) else LOST
    return {suite.name: save(suite) for suite in suites}


def in_order(suites: Sequence[Suite], cases: Mapping[str, Sequence[str]], budget_s: float) -> Order:
    """The cases to start next, until the budget is spent.

    A suite gets its share of the rest of the budget; afterwards its other cases use the time that the other suites left.
    """
    end, left = time.monotonic() + budget_s, {suite.name: list(cases[suite.name]) for suite in suites}
    for again in (False, True):
        for i, suite in enumerate(suites):
            now, names = time.monotonic(), left[suite.name]
            part = 1.0 if again else suite.share / sum(s.share for s in suites[i:])
            until = now + part * max(0.0, end - now)
            while names and time.monotonic() <= until:
                yield suite, names.pop(0)


class InThisProcess(Executor):
    """Runs a call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result of the call, as a future."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def worker(gpu: int | None) -> Executor:
    """A worker process, on one GPU or, with None, on the CPU."""
    return ProcessPoolExecutor(1, get_context("spawn"), _start_worker, (gpu,))


def measure(
    order: Order, setup: Setup, gpus: int, put: Callable[[Suite, str, Outcome], None], tell: Callable[[str], None], apart: bool = False
) -> bool:
    """Measure in this process, or for several GPUs or `apart` in a worker for each, which is replaced if it dies or loses its device.

    Returns False if this process lost the device.
    """
    apart = apart or gpus > 1
    numbers: list[int | None] = [gpu if setup.on_gpu else None for gpu in range(gpus)]
    workers: list[Executor] = [worker(gpu) if apart else InThisProcess() for gpu in numbers]
    running: dict[Future[Outcome], tuple[int, Suite, str]] = {}

    def start(at: int) -> None:
        if (following := next(order, None)) is not None:
            suite, case = following
            tell(f"GPU {at}: {suite.name}: {case}" if apart else f"{suite.name}: {case}")
            here = replace(setup, device=torch.device("cuda", at)) if apart and setup.on_gpu else setup
            running[workers[at].submit(outcome_of, suite, case, here)] = at, suite, case

    try:
        for at in range(gpus):
            start(at)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                at, suite, case = running.pop(future)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    outcome = Outcome(failed="its process died", lost=True)
                except Exception as error:
                    outcome = Outcome(failed=one_line(error))
                put(suite, case, outcome)
                if outcome.lost and not apart:
                    return False
                if outcome.lost:
                    workers[at].shutdown(wait=False)
                    workers[at] = worker(numbers[at])
                start(at)
    finally:
        for pool in workers:
            pool.shutdown(wait=False, cancel_futures=True)
        cases_of.cache_clear()
    return True


def _start_worker(gpu: int | None) -> None:
    from attnops.configs import quiet_transformers

    quiet_transformers().__enter__()  # until the process ends
    if gpu is not None:
        torch.cuda.set_device(gpu)


@lru_cache(maxsize=1)
def cases_of(suite: Suite, setup: Setup) -> Mapping[str, Case]:
    """The cases of a suite, kept for the next one: they share a model."""
    return suite.cases(setup)


def outcome_of(suite: Suite, case: str, setup: Setup) -> Outcome:
    """Run one case. An error becomes its outcome."""
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    failed, left_out, lost = "", "", False
    try:
        rows = [row.as_dict() for row in cases_of(suite, setup)[case]()]
    except LeftOut as reason:
        left_out = str(reason)
    except Exception as error:  # the other cases go on
        failed = one_line(error)
    try:
        torch._dynamo.reset()
        synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # after an illegal access every CUDA call raises
        failed, left_out, lost = failed or one_line(error), "", True
    return Outcome(rows, failed, left_out, round(time.monotonic() - start, 1), lost)


def joined(names: Sequence[str], done: Mapping[str, Outcome], missing: str = SPENT) -> dict[str, Any]:
    """The sections of a report that its cases fill. missing: why cases without an outcome were left out."""
    every = {name: done.get(name, Outcome(left_out=missing)) for name in dict.fromkeys((*names, *done))}
    sections = (("left_out", "left_out"), ("failed", "failed"), ("case_seconds", "seconds"))
    return {
        "rows": [row for one in every.values() for row in one.rows],
        **{section: {n: found for n, one in every.items() if (found := getattr(one, name))} for section, name in sections},
        "seconds": round(sum(one.seconds for one in every.values()), 1),
    }
