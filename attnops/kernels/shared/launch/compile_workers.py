"""`Workers`: processes that compile kernels, each beside this process and its interpreter's lock.

Half of what Triton does for a kernel is Python. Threads do that one after the other, and keep the
model's own code waiting. Kernels that were compiled before are marked in Triton's cache, so that a
later process starts no worker for them.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import fields
from typing import Any

from attnops.kernels.shared.launch import compile_worker
from attnops.kernels.shared.launch.compile_worker import (
    ALIGNED,
    DONE,
    MOST_S,
    Described,
    Dtype,
    Job,
    Pointer,
)
from attnops.measured.store import foreign_variable

log = logging.getLogger("attnops.kernels")

LEAST_CPUS = 4
"""Processors from which on it is faster to start processes than to compile in threads."""

MARK = "attnops-compiled"
"""A file of Triton's cache, in the folder of a kernel and GPU for which a process had a job."""

Target = tuple[Any, ...]
"""The arguments of Triton's GPUTarget."""

Worker = subprocess.Popen[bytes]


def processors() -> int:
    """Those of this process, which shares them with others that torchrun started."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = foreign_variable("LOCAL_WORLD_SIZE") or ""
    return max(1, (own or 1) // max(1, int(ranks) if ranks.isdigit() else 1))


def _marks(*known: Any) -> Any:
    """The folder of Triton's cache that may hold the mark. known: what it is for."""
    import triton
    from triton.runtime.cache import get_cache_manager

    text = repr((MARK, triton.__version__, *known))
    return get_cache_manager(hashlib.sha256(text.encode()).hexdigest())


def _message(launch: Any) -> bytes | None:
    """The job of a launch; None where one of its arguments cannot be sent."""
    kernel = launch.kernel.fn
    try:
        varying = {name for name in launch.kernel.arg_names if name.islower()}
        args = tuple(_packed(x, varies=True) for x in launch.args)
        given = {name: _packed(x, name in varying) for name, x in launch.given.items()}
        job: Job = kernel.__module__, kernel.__name__, args, given
        return pickle.dumps(job)
    except Exception as error:
        log.debug("a kernel is compiled in this process: %s", error)
        return None


def _packed(x: Any, varies: bool) -> Any:
    """An argument without torch, and equal for launches of one compiled kernel where that is known.

    varies: one compiled kernel serves other numbers, too.
    """
    if hasattr(x, "block_shape"):
        rest = {f.name: getattr(x, f.name) for f in fields(x) if f.name != "base"}
        return Described(_packed(x.base, varies), rest)
    if hasattr(x, "data_ptr"):
        dtype = Dtype(str(x.dtype), x.dtype.itemsize)
        return Pointer(dtype, x.data_ptr() % ALIGNED or ALIGNED)
    if varies and type(x) is int and x != 1 and 0 <= x < 1 << 31:
        return ALIGNED if x % ALIGNED == 0 else ALIGNED + 1
    return x


class Workers:
    """Processes for the threads of this one, each for a thread at a time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new. For the child of a fork, whose processes are its parent's."""
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        # The executable of a program that is frozen into one file is the program itself.
        frozen = getattr(sys, "frozen", False) or not sys.executable
        self._broken = frozen or processors() < LEAST_CPUS or not hasattr(signal, "alarm")

    def start(self, count: int, target: Target) -> None:
        """Begin to start so many, unless kernels were compiled on this machine before."""
        if _marks(target).has_file(MARK):
            return
        for _ in range(count):
            worker = self._started(target)
            if worker is None:
                return
            self._give(worker)

    def compile(self, launch: Any, target: Target) -> None:
        """Compile the kernel of a launch in a process, unless it was compiled before. Where no
        process can, nothing is done."""
        if self._broken or (message := _message(launch)) is None:
            return
        mark = _marks(target, launch.kernel.cache_key, hashlib.sha256(message).hexdigest())
        if mark.has_file(MARK):
            return
        worker = self._taken() or self._started(target)
        if worker is None:
            return
        if not _asked(worker, message):
            log.debug("kernels are compiled in this process: one that compiled them ended, or hung")
            self._broken = True
            return
        self._give(worker)
        # Also of a job that failed: this process compiles its kernel, which the next one finds.
        for each in (mark, _marks(target)):
            each.put(b"", MARK)

    def _taken(self) -> Worker | None:
        """One that waits for a job."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.poll() is None:
                return worker
            worker.communicate()  # it has ended, as after a minute without a job

    def _give(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _started(self, target: Target) -> Worker | None:
        """A new one. None where the process may not start any."""
        if self._broken:
            return None
        packages = {
            name: [*module.__path__]
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == "attnops" and hasattr(module, "__path__")
        }
        # Without the environment's own paths and start-up code: it is sent the paths of this one.
        command = [sys.executable, "-I", "-S", str(compile_worker.__file__)]
        try:
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.debug("kernels are compiled in this process: %s", error)
            self._broken = True
            return None
        _sent(worker, (sys.path, packages, target))
        return worker

    def end(self) -> None:
        """End those that wait for a job."""
        while (worker := self._taken()) is not None:
            _ended(worker)


def _sent(worker: Worker, message: Any) -> None:
    assert worker.stdin is not None
    with suppress(OSError):  # it has ended
        worker.stdin.write(pickle.dumps(message))
        worker.stdin.flush()


def _asked(worker: Worker, message: bytes) -> bool:
    """Has it done this job? One that has not is ended."""
    assert worker.stdout is not None
    _sent(worker, message)
    with selectors.DefaultSelector() as ready:
        ready.register(worker.stdout, selectors.EVENT_READ)
        done = bool(ready.select(MOST_S)) and worker.stdout.read(1) == DONE
    if not done:
        _ended(worker)
    return done


def _ended(worker: Worker) -> None:
    worker.kill()
    worker.communicate()


WORKERS = Workers()
atexit.register(WORKERS.end)
