"""The suites by name. `run` measures them, in this process or one worker process a GPU, and writes
a results file of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnops.bench import (
    Setup,
    choices,
    cliffs,
    compile,
    decode,
    device_of,
    first_token,
    generate,
    hybrid,
    latent,
    ops,
    overhead,
    speculate,
    training,
    training_steps,
)
from attnops.bench.files import Report, environment, text_of
from attnops.bench.rows import Case, LeftOut
from attnops.configs import quiet_transformers
from attnops.core.errors import InvalidInput, one_line
from attnops.core.problem import Target
from attnops.measured.digests import candidates, digests
from attnops.measured.store import write_text
from attnops.testing.timed_calls import GRADIENT
from attnops.tune.clock import ceilings, synchronize


class Suite(NamedTuple):
    """A part of the measurements: cases by name for a Setup, and the share of the time.

    models: does it measure models of transformers? usual: is it part of a run that names no suite?
    Others take minutes.
    ops: those whose kernels it runs, (): it may run all.
    """

    name: str
    about: str
    cases: Callable[[Setup], Mapping[str, Case]]
    share: float = 1.0
    models: bool = True
    usual: bool = True
    ops: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Of its results file."""
        return (
            "kernel_times" if self.name == "kernels" else self.name
        )  # kernels.json holds numerics


CALLS = ops.KERNELS.ops
PAIRS = tuple(op.removesuffix(end) for op in training.SUITE.ops for end in (GRADIENT, ""))

SUITES = (
    Suite(
        "kernels",
        "every kernel, the one chosen, and torch's own, by kinds of calls",
        ops.KERNELS,
        2.0,
        False,
        ops=CALLS,
    ),
    Suite("decode", "one new token a request, of whole Hugging Face models", decode.cases, 8.0),
    Suite(
        "prefill",
        "the time to the first token of whole Hugging Face models",
        decode.prefill_cases,
        2.0,
    ),
    Suite("compile", "cold and warm compilation", compile.cases, 2.0),
    Suite("graphs", "capture of all default buckets, and a step's host time", compile.graph_cases),
    Suite("latent", "an attention layer of DeepSeek-V3 over latents", latent.cases, usual=False),
    Suite(
        "data", "kernels that move keys, values and latents", ops.DATA, 0.5, False, ops=ops.DATA.ops
    ),
    Suite(
        "linear",
        "the products of a decode step, with what is around them",
        ops.LINEAR,
        0.5,
        False,
        ops=ops.LINEAR.ops,
    ),
    Suite(
        "experts", "the experts of a mixture at few tokens", ops.EXPERTS, 0.5, ops=ops.EXPERTS.ops
    ),
    Suite(
        "training",
        "attention forward and backward, beside others' calls",
        training.SUITE,
        2.0,
        False,
        ops=PAIRS,
    ),
    Suite(
        "generate",
        "whole calls of generate(), and the first one of a process",
        generate.cases,
        4.0,
        usual=False,
    ),
    Suite(
        "first_token",
        "calls of generate() for one token: prompts of fixed sizes and of random lengths",
        first_token.cases,
        4.0,
        usual=False,
    ),
    Suite(
        "hybrid",
        "layers that carry a state, and whole models that have them",
        hybrid.cases,
        2.0,
        usual=False,
    ),
    Suite(
        "speculate",
        "generate() with drafts that are right with a set probability",
        speculate.cases,
        2.0,
        usual=False,
    ),
    Suite(
        "cliffs",
        "calls with ever new lengths, batches, caches, policies, threads, adapters, dtypes, models",
        cliffs.cases,
        usual=False,
    ),
    Suite("overhead", "the host time of a call through attnops", overhead.cases, models=False),
    Suite(
        "regret",
        "the automatic choice against the best kernel, on calls that no table has",
        choices.REGRET,
        models=False,
        usual=False,
        ops=CALLS,
    ),
    Suite(
        "training_steps",
        "training steps of whole Hugging Face models over packed documents",
        training_steps.cases,
        usual=False,
    ),
    Suite(
        "training_regret",
        "the chosen forward and gradient against the best pair",
        choices.TRAINING,
        models=False,
        usual=False,
        ops=PAIRS,
    ),
)


def named(names: tuple[str, ...]) -> tuple[Suite, ...]:
    """The suites of these names in their own order; () is the usual ones. Raises InvalidInput for
    an unknown name."""
    known = {suite.name: suite for suite in SUITES}
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput("suites", ", ".join(map(repr, unknown)), " | ".join(known))
    return tuple(suite for suite in SUITES if suite.name in names or (suite.usual and not names))


SPENT = "the time was spent"
INTERRUPTED = "the run was ended before"
LOST = "a process or its device was lost"

Outcome = dict[str, Any]
"""Of a case: `rows`, or why it `failed` or was `left_out`; `case_seconds`. lost: the device raises
from now on."""

Order = Iterator[tuple[Suite, str]]
Put = Callable[[Suite, str, Outcome], None]


def run(
    suites: Sequence[Suite],
    setup: Setup,
    *,
    budget_s: float = 400.0,
    out: Path | None = None,
    commit: str = "",
    gpus: int = 1,
    tell: Callable[[str], None] = lambda case: None,
) -> dict[str, Report]:
    """The reports of some suites by name, each also a file in the folder `out`, rewritten after
    each of its cases. Options of the command.

    tell: receives the name of each case that starts. Raises InvalidInput: fewer GPUs, an unknown
    way or model, an `out` that is no folder.
    """
    there = torch.cuda.device_count() if setup.on_gpu else 1
    if not 1 <= gpus <= there:
        raise InvalidInput("gpus", gpus, f"1 to {there}, those that torch finds")
    done = {suite.name: outcomes_before(suite, setup) for suite in suites}
    cases = {
        name: [case for case, outcome in some.items() if not outcome] for name, some in done.items()
    }
    if out is not None:
        make_folder(out)
    tell("ceilings")
    setup = replace(setup, ceilings=ceilings(setup.device, setup.dtype, setup.quick))
    if setup.on_gpu:
        torch.cuda.empty_cache()  # for the worker on this GPU
    head = {
        **environment(setup.device, commit),
        "size": setup.size,
        "ceilings": dict(setup.ceilings),
        "gpus": gpus,
    }

    target, packages = Target.of(setup.device), head["packages"]
    code = {suite.name: digests(candidates(target, suite.ops, packages)) for suite in suites}

    def save(suite: Suite, missing: str = INTERRUPTED) -> Report:
        report = {
            **head,
            "suite": suite.name,
            "code": code[suite.name],
            **joined(done[suite.name], missing),
        }
        if out is not None:
            write_text(out / f"{suite.stem}.json", text_of(report))
        return report

    def put(suite: Suite, case: str, outcome: Outcome) -> None:
        done[suite.name][case] = outcome
        save(suite)

    for suite in suites:
        save(suite)
    missing = SPENT if measure(in_order(suites, cases, budget_s), setup, gpus, put, tell) else LOST
    return {suite.name: save(suite, missing) for suite in suites}


def make_folder(out: Path) -> None:
    """Raises InvalidInput where none may be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            "out", f"{out} ({type(error).__name__})", "a folder, or where one may be made"
        ) from None


def outcomes_before(suite: Suite, setup: Setup) -> dict[str, Outcome]:
    """By case an empty one; of a suite that lists no cases, why it failed. Raises InvalidInput."""
    try:
        return {case: {} for case in suite.cases(setup)}
    except InvalidInput:
        raise
    except Exception as error:  # the other suites go on
        return {suite.name: {"failed": one_line(error)}}


def in_order(suites: Sequence[Suite], cases: Mapping[str, Iterable[str]], budget_s: float) -> Order:
    """The cases to start next, until the budget is spent: those in their suite's share of the rest,
    then those that were left."""
    end = time.monotonic() + budget_s
    left = {suite.name: list(cases[suite.name]) for suite in suites}
    for again in (False, True):
        for i, suite in enumerate(suites):
            now, names = time.monotonic(), left[suite.name]
            part = 1.0 if again else suite.share / sum(s.share for s in suites[i:])
            while names and time.monotonic() <= now + part * max(0.0, end - now):
                yield suite, names.pop(0)


def measure(order: Order, setup: Setup, gpus: int, put: Put, tell: Callable[[str], None]) -> bool:
    """Measure in this process, or in a worker process for each of several GPUs. One that is lost,
    or whose device is, gets no further case.

    Returns False if one was lost.
    """
    if gpus == 1:
        return measure_here(order, setup, put, tell)
    context = get_context("spawn")
    workers = [
        ProcessPoolExecutor(1, context, _start_worker, (at, setup.on_gpu)) for at in range(gpus)
    ]
    idle, lost = list(workers), False
    running: dict[Future[Outcome], tuple[ProcessPoolExecutor, Suite, str]] = {}
    try:
        while True:
            for worker, (suite, case) in zip(tuple(idle), order, strict=False):
                idle.remove(worker)
                tell(f"{suite.name}: {case}")
                try:
                    future = worker.submit(outcome_of, suite, case, setup)
                except BrokenProcessPool as broken:  # the process died after its last case
                    future = Future()
                    future.set_exception(broken)
                running[future] = worker, suite, case
            if not running:
                return not lost
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, suite, case = running.pop(future)
                error = future.exception()
                outcome = (
                    future.result() if error is None else {"failed": one_line(error), "lost": True}
                )
                put(suite, case, outcome)
                idle += [] if outcome.get("lost") else [worker]
                lost |= "lost" in outcome
    finally:
        for worker in workers:
            worker.shutdown(wait=False, cancel_futures=True)


def measure_here(order: Order, setup: Setup, put: Put, tell: Callable[[str], None]) -> bool:
    """As `measure`, in this process."""
    for suite, case in order:
        tell(f"{suite.name}: {case}")
        put(suite, case, outcome := outcome_of(suite, case, setup))
        if outcome.get("lost"):
            return False
    cases_of.cache_clear()
    return True


def _start_worker(gpu: int, on_gpu: bool) -> None:
    quiet_transformers().__enter__()  # until the process ends
    if on_gpu:
        torch.cuda.set_device(gpu)


@lru_cache(maxsize=1)
def cases_of(suite: Suite, setup: Setup) -> Mapping[str, Case]:
    """The cases of a suite, kept for the next one: they share a model."""
    return suite.cases(setup)


def outcome_of(suite: Suite, case: str, setup: Setup) -> Outcome:
    """Run one case on this process's device. An error becomes its outcome."""
    start, outcome = time.monotonic(), Outcome()
    try:
        outcome["rows"] = list(
            cases_of(suite, replace(setup, device=device_of(setup.device.type)))[case]()
        )
    except LeftOut as reason:
        outcome["left_out"] = str(reason)
    except Exception as error:  # the other cases go on
        outcome["failed"] = one_line(error)
    try:
        torch.compiler.reset()
        synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # after an illegal access every CUDA call raises
        outcome.pop("left_out", None)
        outcome = {"failed": one_line(error), **outcome, "lost": True}
    return outcome | {"case_seconds": round(time.monotonic() - start, 1)}


def joined(done: Mapping[str, Outcome], missing: str = SPENT) -> Report:
    """The sections of a report that its cases fill. missing: why cases without an outcome were left
    out."""
    every = {name: one or {"left_out": missing} for name, one in done.items()}
    sections = {
        at: {name: one[at] for name, one in every.items() if one.get(at)}
        for at in ("left_out", "failed", "case_seconds")
    }
    rows = [row for one in every.values() for row in one.get("rows", ())]
    return {"rows": rows, **sections, "seconds": round(sum(sections["case_seconds"].values()), 1)}
