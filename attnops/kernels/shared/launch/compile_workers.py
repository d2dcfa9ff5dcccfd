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
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import fields
from typing import Any

from attnops.kernels.shared.launch import compile_worker
from attnops.kernels.shared.launch.compile_worker import ALIGNED, Described, Dtype, Job, Shown

log = logging.getLogger("attnops.kernels")


LEAST_CPUS = 4
"""Processors from which on it is faster to start processes than to compile in threads."""

MARK = "attnops-compiled"

Target = tuple[Any, ...]
"""The arguments of Triton's GPUTarget."""


def _marks(*known: Any) -> Any:
    """Where Triton's cache keeps a mark on what is known so."""
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
        return Shown(dtype, x.data_ptr() % ALIGNED or ALIGNED)
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
        self._idle: list[subprocess.Popen[bytes]] = []
        few = (os.cpu_count() or 1) < LEAST_CPUS
        self._broken = few or not sys.executable or not hasattr(signal, "alarm")

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
        message = _message(launch)
        if self._broken or message is None:
            return
        mark = _marks(target, launch.kernel.cache_key, hashlib.sha256(message).hexdigest())
        if mark.has_file(MARK):
            return
        worker = self._taken() or self._started(target)
        answer = worker and _asked(worker, message)
        if worker is not None and not answer:
            # It has ended, as after a minute without a job.
            worker = self._started(target)
            answer = worker and _asked(worker, message)
        if worker is None or not answer:
            self._broken = True
            return
        self._give(worker)
        # Also of a job that failed: this process compiles its kernel, which the next one finds.
        for each in (mark, _marks(target)):
            each.put(b"", MARK)

    def _taken(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give(self, worker: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._idle.append(worker)

    def _started(self, target: Target) -> subprocess.Popen[bytes] | None:
        """A new one. None where the process may not start any."""
        if self._broken:
            return None
        packages = {
            name: [*module.__path__]
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == "attnops" and hasattr(module, "__path__")
        }
        try:
            worker = subprocess.Popen(
                [sys.executable, str(compile_worker.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.debug("kernels are compiled in this process: %s", error)
            self._broken = True
            return None
        _sent(worker, pickle.dumps((sys.path, packages, target)))
        return worker

    def end(self) -> None:
        """End those that wait for a job."""
        while (worker := self._taken()) is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                worker.communicate(timeout=1)


def _sent(worker: subprocess.Popen[bytes], message: bytes) -> None:
    assert worker.stdin is not None
    with suppress(OSError):  # it has ended
        worker.stdin.write(message)
        worker.stdin.flush()


def _asked(worker: subprocess.Popen[bytes], message: bytes) -> bytes:
    """The answer to a job; b"" of a process that has ended."""
    assert worker.stdout is not None
    _sent(worker, message)
    return worker.stdout.read(1)


WORKERS = Workers()
atexit.register(WORKERS.end)
