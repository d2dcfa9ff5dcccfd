"""`side_by_side`: functions in worker processes, with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)


def side_by_side(jobs: Mapping[K, tuple[Callable[..., Any], tuple[Any, ...]]], workers: int, limit_s: float | None = None) -> dict[K, Any]:
    """Results by name of a job, or the exception it raised: TimeoutError after `limit_s` seconds, when its process is killed.

    jobs: a function of a module's top level, and its arguments.
    """
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    futures = {pool.submit(function, *arguments): name for name, (function, arguments) in jobs.items()}
    _, late = wait(futures, timeout=limit_s)
    running = list((getattr(pool, "_processes", None) or {}).values()) if late else []
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in running:  # a compiler that still runs would disturb the clock
        process.kill()
    results: dict[K, Any] = {name: TimeoutError(f"not done after {limit_s} s") for f, name in futures.items() if f in late}
    return results | {name: f.exception() or f.result() for f, name in futures.items() if f not in late}
