"""Compiles kernels beside each other, in threads, before they are launched.

Triton compiles a kernel at its first launch, which takes half a second to two. `Beside.begin` runs
the host side of a call, whose launches are noted and not made. Threads have their kernels compiled,
each in a process of its own where there are processors for it (compile_workers.py). A launch
waits for a kernel that a thread compiles just then. It compiles one itself that no thread has
begun, or that a thread failed to compile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnops.kernels.shared.launch.compile_worker import (
    ALIGNED as ALIGNED,
    Pointer as Pointer,
    hash_compiler,
)
from attnops.kernels.shared.launch.compile_workers import WORKERS, processors
from attnops.kernels.shared.memory import address

log = logging.getLogger("attnops.kernels")

MOST_THREADS = max(4, min(8, processors() // 2))
"""A thread waits for a process, or compiles: LLVM and the assembler leave the interpreter to
others."""


@dataclass(eq=False)
class Launch:
    """A launch that is not made. device: the index of a GPU, or None. done: is set when the kernel
    is compiled, or could not be."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    given: dict[str, Any]
    device: int | None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches of one compiled kernel, as far as can be told without Triton."""
        given = (*zip(self.kernel.arg_names, self.args, strict=False), *self.given.items())
        return id(self.kernel), self.device, *((name, self._kind(name, x)) for name, x in given)

    def _kind(self, name: str, x: Any) -> Any:
        """As Triton tells arguments of this name apart: by no fact of an int where the kernel says
        so."""
        if type(x) is int and name in getattr(self.kernel, "do_not_specialize", ()):
            return int
        return _kind(x, name.islower() and name in self.kernel.arg_names)


def memory_kind(x: Any) -> tuple[Any, ...]:
    """What Triton tells tensors apart by."""
    return x.dtype, x.data_ptr() % ALIGNED == 0


def descriptor_kind(x: Any) -> tuple[Any, ...]:
    """What Triton tells descriptors of tensors apart by."""
    return x.base.dtype, *x.block_shape


def _kind(x: Any, varies: bool) -> Any:
    """As Triton tells arguments apart. varies: one compiled kernel serves other numbers, too."""
    if isinstance(x, Pointer):
        return memory_kind(x)
    if hasattr(x, "block_shape"):
        return descriptor_kind(x)
    if not varies or type(x) not in (int, float):
        return x
    return (x == 1, x % ALIGNED == 0) if type(x) is int else float


def _pointed(x: Any) -> Any:
    if hasattr(x, "block_shape"):
        return replace(x, base=_pointed(x.base))
    return Pointer(x.dtype, address(x)) if isinstance(x, Tensor) else x


_STARTING = threading.Lock()


def driver() -> Any:
    """Triton's, which is compiled at its first use, for a GPU: to be called by one thread at a
    time."""
    from triton.runtime import driver

    return driver.active


def _target(active: Any) -> tuple[Any, ...]:
    """The GPU that kernels are compiled for, by the arguments of Triton's GPUTarget."""
    target = active.get_current_target()
    return target.backend, target.arch, target.warp_size


def build(launch: Launch) -> None:
    """Compile a kernel, and the function that launches it. The GPU, which may be capturing, is left
    alone. What a process can compile is read from Triton's cache."""
    with nullcontext() if launch.device is None else torch.cuda.device(launch.device):
        with _STARTING:  # so are the caches of a kernel, at their first use
            active = driver()
            launch.kernel.device_caches[active.get_current_device()]
        if launch.device is not None:
            with suppress(Exception):  # of Triton's cache: this thread compiles it
                WORKERS.compile(launch, _target(active))
        made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.given)
        active.launcher_cls(made.src, made.metadata)


def _begun(run: Callable[[], None]) -> bool:
    """Run this in a thread. False where the process gets no thread, as at a limit of its
    container."""
    try:
        threading.Thread(target=run, name="attnops-compile").start()
    except RuntimeError as error:
        log.debug("kernels are compiled at their launches: %s", error)
        return False
    return True


class Beside:
    """Kernels that threads compile. looks: must a launch ask `takes`?"""

    def __init__(self, build: Callable[[Launch], None] = build) -> None:
        self._build = build
        self.reset()

    def reset(self) -> None:
        """As new. For the child of a fork, which has no threads but its own."""
        self.looks = False
        self._lock = threading.Lock()
        self._launches: dict[tuple[Any, ...], Launch] = {}  # whose kernels are not yet compiled
        self._waiting: deque[Launch] = deque()  # those that no thread has begun
        self._built: set[tuple[Any, ...]] = set()  # those that threads have compiled
        self._threads = self._noting = 0
        self._started = False
        self._here = threading.local()

    def start(self) -> None:
        """Begin to compile what all launches need, once."""
        with self._lock:
            starts, self._started = not self._started, True
        if starts:
            _begun(self._start)

    def _start(self) -> None:
        try:
            with _STARTING:
                active = driver()
            WORKERS.start(MOST_THREADS, _target(active))
            hash_compiler()
        except Exception as error:
            log.debug("Triton is started at the first launch: %s", error)

    def begin(self, run: Callable[[Any], Any], call: Any) -> None:
        """Begin to compile what `run(call)` launches, where `call` has fake tensors. Raises as
        `run` does."""
        noted: list[Launch] = []
        self._note(noted, 1)
        try:
            run(call)
        finally:
            self._note(None, -1)
        for launch in noted:
            self._add(launch)

    def takes(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], given: dict[str, Any]
    ) -> bool:
        """Is this launch noted, and not to be made? If it is to be made, wait for a thread that
        compiles its kernel."""
        noted: list[Launch] | None = getattr(self._here, "noted", None)
        if noted is None and not self._compiles(kernel):
            return False
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        launch = Launch(
            kernel,
            grid,
            tuple(map(_pointed, args)),
            {name: _pointed(x) for name, x in given.items()},
            device,
        )
        if noted is not None:
            noted.append(launch)
            return True
        with self._lock:
            found = self._launches.get(launch.key)
            if found is not None and found in self._waiting:
                self._waiting.remove(found)
                self._end(found)
        if found is not None:
            found.done.wait()
        return False

    def pending(self) -> list[Launch]:
        """Those whose kernels are not yet compiled."""
        with self._lock:
            return list(self._launches.values())

    def _compiles(self, kernel: Any) -> bool:
        """Is there a launch of it that is not yet compiled?"""
        with self._lock:
            return any(number == id(kernel) for number, *_ in self._launches)

    def _note(self, noted: list[Launch] | None, more: int) -> None:
        self._here.noted = noted
        with self._lock:
            self._noting += more
            self._look()

    def _look(self) -> None:
        self.looks = self._noting > 0 or bool(self._launches)

    def _add(self, launch: Launch) -> None:
        # A Triton without this lock, or its interpreter: two threads may not compile at once.
        if not hasattr(launch.kernel, "_hash_lock"):
            return
        with self._lock:
            key = launch.key
            if key in self._launches or key in self._built:
                return
            self._launches[key] = launch
            self._waiting.append(launch)
            self._look()
            starts = self._threads < MOST_THREADS
            self._threads += starts
        if starts and not _begun(self._work):
            with self._lock:
                self._threads -= 1
                # No thread will begin these. Each kernel is compiled at its first launch.
                while self._waiting and not self._threads:
                    self._end(self._waiting.popleft())

    def _work(self) -> None:
        while (launch := self._next()) is not None:
            try:
                self._build(launch)
                self._built.add(launch.key)
            except Exception as error:
                log.debug("a kernel is compiled at its launch: %s", error)
            finally:
                with self._lock:
                    self._end(launch)

    def _next(self) -> Launch | None:
        # A process that ends waits for its threads, and so for the kernels that they have begun.
        with self._lock:
            if self._waiting and threading.main_thread().is_alive():
                return self._waiting.popleft()
            self._threads -= 1
            return None

    def _end(self, launch: Launch) -> None:
        self._launches.pop(launch.key, None)
        launch.done.set()
        self._look()


BESIDE = Beside()
with suppress(AttributeError):  # Windows has no forks
    os.register_at_fork(after_in_child=BESIDE.reset)
    os.register_at_fork(after_in_child=WORKERS.reset)
