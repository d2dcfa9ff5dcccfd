"""The device's side of graphs: begin, end, replay, memory. One small protocol, and CUDA's answer to it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InvalidInput


class Graph(Protocol):
    """A captured stretch of work."""

    def replay(self) -> None:
        """Do it again, on the same addresses."""
        ...

    def reset(self) -> None:
        """Give back its memory. Not to be replayed any more."""
        ...


class Device(Protocol):
    """Captures what runs between `begin` and `end`. Graphs of one Device share one pool of memory."""

    def session(self) -> AbstractContextManager[None]:
        """Everything below happens within one. One may lie in another, which then spares it what need be done only once."""
        ...

    def begin(self) -> None:
        """From here on work is recorded and not done."""
        ...

    def call(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op between the two."""
        ...

    def end(self) -> Graph:
        """The end of what `begin` began."""
        ...

    def abort(self) -> None:
        """The end of it, and of no use."""
        ...

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        """`run` as a graph, and what it returned: tensors that every replay writes anew."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping it from later captures."""
        ...

    def measured(self, run: Callable[[], Any]) -> int:
        """Call `run` without capture. Returns the most bytes it needed at once beside what was allocated."""
        ...

    def used(self) -> int:
        """Bytes of the device that are taken, to be compared with a later answer."""
        ...

    def settle(self) -> None:
        """Wait until whatever was replayed is done."""
        ...

    def release(self) -> None:
        """Give the memory of graphs that were reset back to the driver."""
        ...


def _clear_workspaces() -> None:
    # A graph keeps the address of cuBLAS' workspace. One of the warm-up is freed by whoever clears them, as Inductor does before captures
    # of its own; one that is allocated in the capture is of the graph's pool, and has to go back to it before other work finds it.
    torch._C._cuda_clearCublasWorkspaces()


class _Captured:
    """A graph that is in `held` until it is reset or dies."""

    def __init__(self, graph: torch.cuda.CUDAGraph, held: weakref.WeakSet[_Captured]) -> None:
        self._graph, self._held = graph, held

    def replay(self) -> None:
        """Do it again."""
        self._graph.replay()

    def reset(self) -> None:
        """Give back its memory."""
        self._held.discard(self)
        self._graph.reset()


# CPython 3.12 begins with some hundred objects that are exempt; whoever froze more did so on purpose, and that is not undone.
_EXEMPT = 10_000


class CudaGraphs:
    """CUDA's graphs, captured on a stream of their own into one pool.

    Errors of other threads do not end a capture ("thread_local"), and Python collects no garbage while one lasts, because a tensor or
    graph that dies then may call what is forbidden. It does so at the start of every session, so that no capture finds memory held by
    garbage; of sessions within another only what was made since that began is looked at, unless the program froze objects of its own.
    `measured` resets torch's statistics of peak memory and empties its cache.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise InvalidInput("device", self.device, "a CUDA device, or a Device of your own in graphs=")
        self._stream = torch.cuda.Stream(self.device)
        self._pool: Any = None
        self._held: weakref.WeakSet[_Captured] = weakref.WeakSet()
        self._open: torch.cuda.CUDAGraph | None = None
        self._sessions = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """On the side stream, after all that the caller's stream was given, and before all that it will be."""
        if self._sessions:
            if self._open is None:
                gc.collect()
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        gc.collect()
        collects, freezes = gc.isenabled(), gc.get_freeze_count() < _EXEMPT
        gc.disable()
        if freezes:
            # A process that has compiled holds a million objects, and to look at all of them takes longer than many a capture.
            gc.freeze()
        self._stream.wait_stream(outer)
        self._sessions += 1
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._sessions -= 1
            outer.wait_stream(self._stream)
            if freezes:
                gc.unfreeze()
            if collects:
                gc.enable()

    def begin(self) -> None:
        """Begin a capture. The stream has to be idle, as the allocator's blocks of other streams may not be waited for."""
        self._stream.synchronize()
        # The allocator refuses the handle of a pool whose last graph is gone.
        if not self._held:
            self._pool = torch.cuda.graph_pool_handle()
        _clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._open = graph

    def call(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op: its kernels find the stream in capture."""
        return op(*args, **kwargs)

    def end(self) -> Graph:
        """End it."""
        graph, self._open = self._open, None
        if graph is None:
            raise RuntimeError("end() without begin()")
        graph.capture_end()
        _clear_workspaces()
        captured = _Captured(graph, self._held)
        self._held.add(captured)
        return captured

    def abort(self) -> None:
        """End a capture that failed, which CUDA says once more."""
        graph, self._open = self._open, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            _clear_workspaces()
            with contextlib.suppress(RuntimeError):
                graph.reset()

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        """`run`, captured."""
        self.begin()
        try:
            out = run()
        except BaseException:
            self.abort()
            raise
        return self.end(), out

    def weak(self, tensor: Tensor) -> Tensor:
        """A tensor over the same bytes that owns none of them. Where torch cannot make one it is the tensor, and memory is not shared."""
        make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
        if make is None or tensor.numel() == 0:
            return tensor
        whole = tensor.untyped_storage()
        storage = make(whole.data_ptr(), tensor.device, whole.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def measured(self, run: Callable[[], Any]) -> int:
        """By the allocator's statistics. What it has cached is given back: a capture cannot have it, and cannot ask for it to be freed."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        return peak - before

    def used(self) -> int:
        """As the driver sees it: the graphs' own nodes count, and so does what other processes take meanwhile."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def settle(self) -> None:
        """A graph may not be destroyed while it runs."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Until the allocator's cache is emptied, a pool without graphs is held and serves nobody."""
        torch.cuda.empty_cache()
