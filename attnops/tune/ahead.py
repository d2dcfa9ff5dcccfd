"""Compiles kernels before they are timed, in worker processes that fill the compilers' caches on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from attnops.inputs import Pool, build, lengths
from attnops.kernel import all_kernels
from attnops.measured import Sizes
from attnops.problem import Target
from attnops.tune.shapes import Sweep, sweeps_of
from attnops.tune.timing import Stopwatch, runner

K = TypeVar("K", bound=Hashable)
COMPILED = ("triton",)
"""Kernels with many small variants that the compiler caches on disk."""

SMALL_BYTES, SMALL_FLOPS = 4e8, 4e11


def side_by_side(jobs: Mapping[K, tuple[Callable[..., Any], tuple[Any, ...]]], workers: int, limit_s: float | None = None) -> dict[K, Any]:
    """The result of each job, or its exception; TimeoutError for jobs that still run after `limit_s` seconds, whose process is killed.

    jobs: by name, a function of a module's top level and its arguments.
    """
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    futures = {pool.submit(function, *arguments): name for name, (function, arguments) in jobs.items()}
    _, late = wait(futures, timeout=limit_s)
    running = list((getattr(pool, "_processes", None) or {}).values()) if late else []
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in running:  # a compiler that still runs would disturb the clock
        process.kill()
    return {name: TimeoutError(f"not done after {limit_s} s") if f in late else f.exception() or f.result() for f, name in futures.items()}


def compile_ahead(grid: str, device: torch.device, ops: Sequence[str], kernels: Sequence[str], workers: int, limit_s: float) -> int:
    """Compile `kernels` for every sweep of `grid`. Returns the number of calls made: 0 if none of `kernels` is installed.

    Variants that fail or come too late compile when they are timed.
    """
    names = tuple(dict.fromkeys(k.name for k in all_kernels() if k.name in kernels and not k.absences(Target.of(device))))
    sweeps = sweeps_of(grid, ops) if names else ()
    jobs = {at: (compile_for, (sweeps[at::workers], names, device)) for at in range(min(workers, len(sweeps)))}
    return sum(made for made in side_by_side(jobs, workers, limit_s).values() if isinstance(made, int))


def kinds(sweep: Sweep) -> Iterator[Sizes]:
    """Small sizes that cover the launch variants: one request and many, few and many queries, few and many keys."""
    batches, ratios = (dict.fromkeys((axis[0], axis[len(axis) // 2], axis[-1])) for axis in (sweep.batch, sweep.ratio))
    for at in (Sizes(batch, queries, ratio) for queries in sweep.queries for batch in batches for ratio in ratios):
        work = sweep.shape.work(at)
        if sweep.allows(at) and work.bytes <= SMALL_BYTES and work.flops <= SMALL_FLOPS:
            yield at


def compile_for(sweeps: Sequence[Sweep], names: tuple[str, ...], device: torch.device) -> int:
    """Call each of the kernels at the `kinds` of every sweep, ignoring their errors. Returns the number of calls made."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool, stopwatch, made = Pool(device), Stopwatch(lambda *_: 0.0, names=names), 0
    for shape, at in ((sweep.shape, at) for sweep in sweeps for at in kinds(sweep)):
        for kernel, given, _ in stopwatch.candidates(build(shape, *lengths(shape, at), pool)):
            with contextlib.suppress(Exception), torch.no_grad():
                runner(kernel, given)()
                made += 1
    return made
