"""The device side of graphs, begin, end, replay and memory: a protocol, and its implementation for
CUDA."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.errors import AttnopsError, NotCapturable
from ..core.private_torch import clear_workspaces, storage_at
from ..core.record import need
from .capturing import DRAWS, begins, capture_stream, clean_up, mend, quiet
from .graph_breaks import Break
from .streams import LastStream


class Graph(Protocol):
    """A captured stretch of work."""

    def replay(self) -> None:
        """Run it again, on the same addresses."""

    def reset(self) -> None:
        """Free its memory; it may not be replayed again."""


class Device(Protocol):
    """Captures the work between `begin` and `end`. Graphs of one Device share one memory pool."""

    def session(self) -> AbstractContextManager[None]:
        """A context that every other method runs in. A nested session skips the work that one
        session needs once."""
        ...

    def begin(self) -> None:
        """Begin to record work instead of running it."""

    def end(self) -> Graph:
        """End the capture."""
        ...

    def abort(self) -> None:
        """End the capture and drop it."""

    def weak(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not keep later captures from it."""
        ...

    def warm(self, run: Callable[[], Any]) -> None:
        """Call `run` without capture."""

    def measured(self, run: Callable[[], Any]) -> int:
        """As `warm`. Returns the peak of bytes that it allocated."""
        ...

    def follow(self) -> None:
        """Let work to come on the current stream follow the work so far on the graphs.

        They share memory, and may have run on another stream.
        """

    def used(self) -> int:
        """Bytes that the graphs of this Device hold, those of no other process or Device."""
        ...

    def settle(self) -> None:
        """Wait until all replays are done."""

    def release(self) -> None:
        """Return the memory of graphs that were reset to the driver."""


class Recorded:
    """A captured step. steps: graph replays and the calls between them, in order. breaks: those
    calls.

    bytes_of: the memory that each graph took at its capture. current: the part of the step that
    runs, for errors.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.current = device, "the function"
        self.steps: list[Callable[[], None]] = []
        self.graphs: list[Graph] = []
        self.breaks: list[Break] = []
        self.bytes_of: list[int] = []
        self._before: int | None = None

    def begin(self) -> None:
        """Begin a graph, unless one is open."""
        if self._before is None:
            self._before = self.device.used()
            self.device.begin()

    def end(self) -> None:
        """End the open graph, if any."""
        if self._before is not None:
            graph = self.device.end()
            self.graphs.append(graph)
            self.steps.append(graph.replay)
            self.bytes_of.append(self.device.used() - self._before)
            self._before = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Capture in the block. Raises NotCapturable for code that fails in a graph. After an error
        no graph is left."""
        try:
            yield
            self.end()
        except BaseException as e:
            opened = self._before is not None
            if opened:
                self.device.abort()
            self.reset()
            if (
                opened
                and isinstance(e, Exception)
                and not isinstance(e, (AttnopsError, torch.OutOfMemoryError))
            ):
                raise NotCapturable(
                    self.current, (str(e).strip() or type(e).__name__).splitlines()[0]
                ) from e
            raise

    def reset(self) -> None:
        """Free the graphs."""
        for graph in self.graphs:
            graph.reset()


def _check_allocator() -> None:
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        want = (
            "want 'native', torch's default (PYTORCH_CUDA_ALLOC_CONF), whose tensors keep the "
            "addresses that a replay reads"
        )
        raise NotCapturable("CUDA graphs", f"got the allocator {backend!r}, {want}")


def _is_short(device: torch.device) -> bool:
    """Is less than an eighth of the memory free, blocks of the allocator included that hold no
    tensor?"""
    free, total = torch.cuda.mem_get_info(device)
    return (
        8 * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        < total
    )


class _Captured:
    """A graph that is a member of `live` until it is reset or deleted."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, live: weakref.WeakSet[_Captured], device: torch.device
    ) -> None:
        self._graph, self._live, self._device = graph, live, device

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._live.discard(self)
        with quiet(self._device):
            self._graph.reset()


CAPTURING = threading.RLock()
"""Sessions of all devices take turns. Dynamo takes a dispatch mode of any thread for one of its
own, and its settings and those of Python's garbage collection are those of the process."""

# CPython 3.12 starts with some hundred frozen objects. A program with more froze them on purpose,
# and keeps them frozen.
_EXEMPT = 10_000


_frozen = False
"""Has a `frozen` block under way frozen the objects of the process? To count frozen ones takes as
long as to look at them."""


@contextmanager
def frozen() -> Iterator[None]:
    """Garbage collections in the block look at objects made in it: a process that has compiled
    holds a million, and to look at them takes longer than a capture. Objects that the program froze
    on purpose stay frozen.

    gc.collect(1), which looks at young objects alone, leaves garbage that outlived an earlier
    collection, with its memory of the device: a session collects between captures.
    """
    global _frozen
    with CAPTURING:
        freezes = not _frozen and gc.get_freeze_count() < _EXEMPT
        try:
            if freezes:
                _frozen = True
                gc.freeze()
            yield
        finally:
            if freezes:
                gc.unfreeze()
                _frozen = False


@contextmanager
def drawing_nothing(device: torch.device) -> Iterator[None]:
    """The device's random numbers go on after the block as if it had drawn none, and captures in it
    may draw.

    Other devices may draw in other threads meanwhile; on torch below 2.13 no other thread may draw
    on this one during a capture.
    """
    generator = _generator(device)
    state, before = generator.get_state(), DRAWS.set(True)
    try:
        yield
    finally:
        DRAWS.reset(before)
        generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    """The device's default generator."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


class CudaGraphs:
    """CUDA graphs, captured on a side stream into one memory pool.

    Work of other threads does not end a capture (mode "thread_local"). Python collects no garbage
    during a capture, because the destructor of a tensor or graph may make a forbidden call; while
    pieces compile, between captures, it does. A session starts with a collection of young objects,
    and of all where memory is short, because that takes longer than a capture. A nested one looks
    at objects made since the outer session began, unless the program froze objects of its own.

    device: a CUDA device. One without an index is the current one at the first use, and stays that.

    A session raises NotCapturable under the allocator cudaMallocAsync: a replay relies on addresses
    that it may give to other tensors.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._given = torch.device(device)
        need(
            self._given.type == "cuda",
            "device",
            self._given,
            "a CUDA device, or a Device of your own in graphs=",
        )
        self._pool: Any = None
        self._live: weakref.WeakSet[_Captured] = weakref.WeakSet()
        self._open: torch.cuda.CUDAGraph | None = None
        self._began = self._in_session = False
        # What a capture under way has taken: the lock of the device, and Python's collections.
        self._taken = ExitStack()

    @cached_property
    def device(self) -> torch.device:
        """With an index."""
        if self._given.index is not None:
            return self._given
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def _stream(self) -> torch.cuda.Stream:
        return capture_stream(self.device.index)

    @cached_property
    def _last(self) -> LastStream:
        return LastStream(self.device)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Run the block on the side stream, after the work queued on the caller's stream and before
        the work to come."""
        # Before the stream is touched, on which another thread may capture.
        with CAPTURING, ExitStack() as undo:
            if self._in_session:
                if self._open is None:
                    gc.collect()
                yield
                return
            _check_allocator()
            outer, stream = torch.cuda.current_stream(self.device), self._stream
            gc.collect(*(() if _is_short(self.device) else (1,)))
            undo.callback(outer.wait_stream, stream)
            stream.wait_stream(outer)
            undo.callback(self._leave)
            self._in_session = True
            with frozen(), torch.cuda.stream(stream):
                yield

    def _leave(self) -> None:
        self._in_session = False
        self._taken.close()

    def begin(self) -> None:
        """Begin a capture, on an idle stream: a capture may not wait for the allocator's blocks of
        other streams."""
        self._taken.enter_context(quiet(self.device))
        self._stream.synchronize()
        # The allocator refuses the handle of a pool whose last graph was freed.
        if self._pool is None or not self._live:
            self._pool = torch.cuda.graph_pool_handle()
        clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        # A collection within the capture could free a graph, which ends it. torch.cuda.graph, the
        # public way, lets collections happen.
        if gc.isenabled():
            self._taken.callback(gc.enable)
            gc.disable()
        self._open, self._began = graph, False
        with begins(_generator(self.device)):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._began = True

    def end(self) -> Graph:
        graph = self._open
        if graph is None:
            raise RuntimeError("end() without begin()")
        graph.capture_end()
        self._open = None
        clear_workspaces()
        self._taken.close()
        captured = _Captured(graph, self._live, self.device)
        self._live.add(captured)
        return captured

    def abort(self) -> None:
        """End a capture that failed; CUDA reports the failure again. The device is then as it was
        before `begin`."""
        graph, self._open = self._open, None
        try:
            if graph is not None:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                clear_workspaces()
                pool = self._pool
                # What the capture has made may live on in its pool, which no later one takes.
                self._pool, self._live = None, weakref.WeakSet()
                clean_up(graph, pool, self.device, self._began)
                if DRAWS.get():
                    mend(_generator(self.device), self.device)
        finally:
            self._taken.close()

    def weak(self, tensor: Tensor) -> Tensor:
        """A tensor over the same bytes that does not own them. `tensor` itself where torch cannot
        make one: memory is then not shared."""
        if tensor.numel() == 0:
            return tensor
        whole = tensor.untyped_storage()
        storage = storage_at(whole.data_ptr(), tensor.device, whole.nbytes())
        if storage is None:
            return tensor
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def warm(self, run: Callable[[], Any]) -> None:
        """Empties the allocator's cache afterwards where the driver has little memory, because a
        capture can neither use nor free cached memory. Elsewhere others would wait for the driver
        to give them the same memory again."""
        run()
        with quiet(self.device):
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            if 8 * free < total:
                torch.cuda.empty_cache()

    def measured(self, run: Callable[[], Any]) -> int:
        """By the allocator's statistics, of which it resets the peaks."""
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.warm(run)
        return torch.cuda.max_memory_allocated(self.device) - before

    def follow(self) -> None:
        self._last.use()

    def used(self) -> int:
        """The segments of the pool of graphs, as torch's allocator counts them.

        What the driver keeps for the nodes of graphs is left out. 0 where no graph is alive: the
        next capture takes another pool.
        """
        if not self._live:
            return 0
        # Of one pool, and without traces of allocations: a few blocks, of thousands.
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)
        return sum(segment["total_size"] for segment in segments)

    def settle(self) -> None:
        """Synchronise: a running graph may not be destroyed."""
        with quiet(self.device):
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Empty the allocator's cache, which holds the memory of a pool without graphs."""
        with quiet(self.device):
            torch.cuda.empty_cache()
