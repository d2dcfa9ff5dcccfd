"""`LastStream`: memory that several streams of a device use in turn.

A host lock orders threads, and not the streams on which they work: the kernels of two streams run
beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.private_torch import current_stream
from .capturing import side_stream


class Streams:
    """The streams of torch.cuda. Another kind of device has a class with these methods."""

    def number(self, device: torch.device) -> int:
        """The current stream, as an int that no other stream of the device has."""
        if device.index is not None:
            return current_stream(device.index)
        return int(torch.cuda.current_stream(device).cuda_stream)

    def current(self, device: torch.device) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(device)

    def capturing(self, device: torch.device) -> bool:
        """Is the work of the current stream captured?"""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def beside(self, device: torch.device) -> Any:
        """The stream for work beside the caller's."""
        return side_stream(torch.cuda.current_device() if device.index is None else device.index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block it is the current stream."""
        return torch.cuda.stream(stream)

    def wait(self, stream: Any, other: Any) -> None:
        """Work to come on `stream` waits for the work so far on `other`."""
        stream.wait_stream(other)

    def uses(self, stream: Any, tensor: Tensor) -> None:
        """Should the tensor be deleted, its memory waits for the work so far on `stream`."""
        tensor.record_stream(stream)


STREAMS: dict[str, Streams] = {"cuda": Streams()}
"""By the type of the device. Others run their work in the order of the host."""


class LastStream:
    """The last stream on which something was used. `use` before each use.

    device: where it lies.
    tensors: those that it owns, of torch's allocator.
    """

    def __init__(self, device: torch.device, tensors: tuple[Tensor, ...] = ()) -> None:
        self._device, self._tensors = device, tensors
        self._streams = STREAMS.get(device.type)
        self.ordered = self._streams is None
        """Is all work of the device in the order of the host? Then `use` has no effect."""
        self._last: Any = None
        self._number: int | None = None
        self._met: set[int] = set()

    def __reduce__(self) -> Any:
        return LastStream, (self._device, self._tensors)

    def own(self, *tensors: Tensor) -> None:
        """It owns these, too, from its next use on."""
        self._tensors += tensors
        self._met.clear()
        self._number = None

    def leave(self, *tensors: Tensor) -> None:
        """It owns these no more. Their memory waits for the work so far on the streams it met."""
        gone = {id(tensor) for tensor in tensors}
        self._tensors = tuple(tensor for tensor in self._tensors if id(tensor) not in gone)

    def use(self) -> None:
        """Work to come on the current stream waits for the work so far on the last one.

        Threads that use it at once take turns by a lock of theirs. In a capture it has no effect:
        the uses around it are ordered.
        """
        streams = self._streams
        if streams is not None and streams.number(self._device) != self._number:
            self._change(streams)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block work goes to the side stream, and follows the work so far on the last
        one."""
        streams = self._streams
        if streams is None:
            yield
            return
        with streams.on(streams.beside(self._device)):
            self.use()
            yield

    def reads(self, *tensors: Tensor) -> None:
        """Should these be deleted, their memory waits for the work so far on the current stream,
        which is not the one that made them."""
        if self._streams is not None:
            stream = self._streams.current(self._device)
            for tensor in tensors:
                self._streams.uses(stream, tensor)

    def _change(self, streams: Streams) -> None:
        if streams.capturing(self._device):
            return
        stream, number = streams.current(self._device), streams.number(self._device)
        if self._last is not None:
            streams.wait(stream, self._last)
        if number not in self._met:
            for tensor in self._tensors:
                streams.uses(stream, tensor)
            self._met.add(number)
        self._last, self._number = stream, number
