"""What a capture takes of its CUDA device: a lock, a stream, a state of random numbers; and what
one that failed leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..core.needs import parse
from ..core.private_torch import TorchDispatchMode, end_pool, release_pool

_LOCKS: dict[int, AbstractContextManager[Any]] = {}
"""By the index of a device."""

_NONBLOCKING = 1
"""CU_STREAM_NON_BLOCKING: work on the legacy default stream does not wait for the stream."""

DRAWS: ContextVar[bool] = ContextVar("DRAWS", default=False)
"""Does the work that is captured now draw random numbers?"""

AS_CAPTURED: ContextVar[bool] = ContextVar("AS_CAPTURED", default=False)
"""Does a model run as it does in a graph: to warm up, in a capture, or for a replay's
comparison?"""

_NO_DRAWS = "generator not in capture mode"

TRIES = 3
"""How often the generator is taken out of a capture by another capture."""


@contextmanager
def as_captured() -> Iterator[None]:
    """In the block, and this thread, models run as they do in a graph."""
    before = AS_CAPTURED.set(True)
    try:
        yield
    finally:
        AS_CAPTURED.reset(before)


def quiet(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which no other thread captures on the device: a device-wide wait, a graph that
    is destroyed or a cache that is emptied would end its capture.

    A capture holds it from begin to end, for milliseconds, and never while a compiler runs. Locks
    are taken in this order: a decoder's turn, `CAPTURING`, this one. A block within it takes none
    of the others.

    device: a CUDA device; the current one where it has no index.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _LOCKS.setdefault(index, threading.RLock())


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """The stream of all captures on a CUDA device."""
    return _own_stream(index)


@functools.cache
def side_stream(index: int) -> torch.cuda.Stream:
    """The stream of all work on a CUDA device that runs beside the caller's."""
    return _own_stream(index)


def _own_stream(index: int) -> torch.cuda.Stream:
    """A new stream. It is not one of the 32 that torch hands out in turn, on which others may work
    and capture, too.

    Where the driver makes none, it is one of these.
    """
    device = torch.device("cuda", index)
    handle = ctypes.c_void_p()
    try:
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes torch's context the current one of this thread
            code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NONBLOCKING)
    except (OSError, AttributeError):
        code = None
    if code != 0 or not handle.value:
        return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(handle.value, device=device)


def drew(error: BaseException) -> bool:
    """Is this the error of torch below 2.13 for a draw in a capture that was begun as one
    without?"""
    return any(_NO_DRAWS in str(each) for each in chain_of(error))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def version() -> tuple[int, int]:
    """(major, minor) of torch."""
    parsed = parse(torch.__version__)
    assert parsed is not None, torch.__version__
    major, minor, *_ = parsed.release
    return major, minor


# What a failed capture leaves undone, by version of torch. Below 2.13 CUDAGraph.capture_end raises
# before the allocator ends the pool, and a generator is in one capture at a time, or left in it.
# Below 2.14 CUDAGraph.reset releases only the pool of a capture that succeeded.
_STATES = (2, 13)
_RELEASES = (2, 14)


def has_capture_states() -> bool:
    """Does a generator of this torch keep a state for each capture, so that other threads may draw
    meanwhile?"""
    return version() >= _STATES


class _OnFirstOp(TorchDispatchMode):
    """Calls a function before the first op in its block."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call, self._call = self._call, None
        if call is not None:
            call()
        return func(*args, **(kwargs or {}))


@contextmanager
def standing_in(generator: torch.Generator) -> Iterator[None]:
    """A clone of the generator's state is the one that a capture that begins in the block takes, so
    that other threads may draw.

    Torch below 2.13 registers the state that the device's generator has, then allocates two tensors
    for it, then sets it to capture mode, in which it refuses draws outside the capture. The
    generator gets its own state back at the first of these allocations, with the draws of other
    threads until then.
    """
    own = generator.graphsafe_get_state()
    other = generator.clone_state()
    before = other.get_state()

    def back() -> None:
        drawn = other.get_state()
        if not torch.equal(drawn, before):
            own.set_state(drawn)
        generator.graphsafe_set_state(own)

    generator.graphsafe_set_state(other)
    try:
        with _OnFirstOp(back):
            yield
    finally:
        generator.graphsafe_set_state(own)


def begins(generator: torch.Generator) -> AbstractContextManager[Any]:
    """A context to begin a capture in."""
    if has_capture_states() or DRAWS.get():
        return contextlib.nullcontext()
    return standing_in(generator)


def clean_up(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device, began: bool) -> None:
    """Take back what `graph`, whose capture was ended, holds of the allocator, once.

    pool: of the capture. began: did `capture_begin` return?
    """
    succeeded = _succeeded(graph)
    ended = not succeeded and version() < _RELEASES and _ended(device, pool)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    # Each capture that began counts once as a user of the pool, and graphs that share it count for
    # themselves.
    if not succeeded and version() < _RELEASES and (began or ended):
        with contextlib.suppress(RuntimeError):
            release_pool(device, pool)


def _succeeded(graph: torch.cuda.CUDAGraph) -> bool:
    """Did the capture succeed, so that the graph itself releases its pool?"""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _ended(device: torch.device, pool: Any) -> bool:
    """End the pool of a capture. False where torch had ended it, or had not begun it."""
    try:
        end_pool(device, pool)
    except RuntimeError:
        return False
    return True


def mend(generator: torch.Generator, device: torch.device) -> None:
    """Take the generator out of a capture that failed.

    Torch below 2.13 does so at the end of a capture that succeeds, with the same state, so that
    graphs that draw stay right. Where such captures fail, too, the generator gets a copy of its
    state, which these graphs do not follow.
    """
    if has_capture_states():
        return
    for _ in range(TRIES):
        if _captures_nothing(device):
            return
    generator.graphsafe_set_state(generator.clone_state())


def _captures_nothing(device: torch.device) -> bool:
    """Capture a write to a number of its own. Returns whether that succeeded."""
    pool, graph, began = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), False
    try:
        number = torch.zeros(1, device=device)
        graph.capture_begin(pool, capture_error_mode="thread_local")
        began = True
        number.zero_()
    except RuntimeError:
        pass
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    succeeded = _succeeded(graph)
    clean_up(graph, pool, device, began)
    return succeeded
