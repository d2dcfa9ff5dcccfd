"""`Pool`: sets of pages that caches have left, kept with their graphs for the next caches."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from math import inf, isfinite, prod

import torch

from attnops.core.problem import Problem
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.names import Returned
from attnops.hf.cache.page_sizes import Sizes, layer_of
from attnops.hf.cache.paged_cache import PagedModelCache, State
from attnops.hf.models.states import StateSizes

MOST_IDLE = 2
"""Sets of pages that are kept for later caches, if they fit in `most_idle_bytes`."""

FEW, STEP = 4608, 256
"""Tokens of a row that new pages have room for, in steps where a GPU has less memory: pages of
another size have other graphs. So many hold a prompt of one chunk, and an answer."""
SMALL = 256
"""Such pages take at most one part in so many of a GPU's memory."""

# Pages that fit two calls of generate() may be so many times those of the larger call.
MOST_FOR_BOTH = 2


@functools.cache
def gpu_bytes(device: torch.device) -> float:
    """A GPU's memory. Of another device it is not known, and without a bound."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else inf


def most_idle_bytes(device: torch.device) -> float:
    """An eighth of a GPU's memory."""
    return gpu_bytes(device) / 8


class Pool:
    """The idle sets of pages of one model, within the bounds after each call of `lend` and `trim`.

    drop: frees what was captured over a set of pages. A finalizer never calls it: a cache may be
    collected at any time, in the middle of a capture too.
    """

    def __init__(self, drop: Callable[[ModelPages], None]) -> None:
        self._drop, self._lock = drop, threading.Lock()
        # Appended to without the lock: a finalizer may run in a thread that holds it.
        self._idle: deque[ModelPages] = deque()
        self._lent: weakref.WeakSet[State] = weakref.WeakSet()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle pages, graphs over them not counted."""
        return sum(pages.nbytes for pages in tuple(self._idle))

    def lend(
        self,
        over: Callable[[ModelPages], PagedModelCache],
        wanted: Sizes,
        page_size: int | None = None,
        *,
        exact: bool = False,
    ) -> PagedModelCache:
        """A cache over idle pages that fit, else over new ones, for which idle pages are freed when
        memory is short.

        Idle pages on another device, from which the model has moved, are freed.

        The pages come back when the cache is gone, or when `state.give_back` is called. After an
        error or an interrupt idle pages are idle still.

        Args:
            over: makes a cache over pages.
            wanted: the sizes of the pages.
            page_size: as a caller forces it.
            exact: the rows and the length are those of a cache that says so.

        Raises PageSizeConflict, torch.OutOfMemoryError.
        """
        with self._lock:
            self._leave(wanted.device)
            found = self._fitting(wanted, page_size, exact)
            sizes = (
                wanted if exact or found is not None else self._merged(_rounded(wanted), page_size)
            )
            self._shrink(MOST_IDLE, found)
            cache = over(found or self._new(sizes, wanted, page_size))
            if found is not None:
                self._idle.remove(found)
                found.captured = False  # graphs of the caller's were of another cache
            state = cache.state
            state.give_back = finalizer = weakref.finalize(state, self._idle.append, state.pages)
            finalizer.atexit = False
            self._lent.add(state)
            return cache

    def _new(self, sizes: Sizes, least: Sizes, page_size: int | None) -> ModelPages:
        """least: the sizes where memory is short."""
        try:
            return ModelPages(sizes, page_size)
        except torch.OutOfMemoryError:
            self._shrink(0)
        return ModelPages(least, page_size)

    def _leave(self, device: torch.device) -> None:
        """Free idle pages that are not on this device, to which the model has moved."""
        for pages in tuple(self._idle):
            if pages.sizes.device != device:
                self._free(pages)

    def _alike(self, wanted: Sizes, page_size: int | None) -> list[ModelPages]:
        return [p for p in tuple(self._idle) if (p.sizes[2:], p.forced) == (wanted[2:], page_size)]

    def _fitting(self, wanted: Sizes, page_size: int | None, exact: bool) -> ModelPages | None:
        """The smallest idle pages that fit."""
        rows, length = wanted[:2]
        alike = self._alike(wanted, page_size)
        fitting = [
            p
            for p in alike
            if (p.sizes == wanted if exact else p.sizes.rows >= rows and p.sizes.length >= length)
        ]
        return min(fitting, key=lambda p: _area(p.sizes), default=None)

    def _merged(self, sizes: Sizes, page_size: int | None) -> Sizes:
        """Sizes for these and for those of idle pages, which are freed, unless that is far more:
        many short rows, and a few long ones."""
        for pages in self._alike(sizes, page_size):
            both = sizes._replace(
                rows=max(sizes.rows, pages.sizes.rows), length=max(sizes.length, pages.sizes.length)
            )
            if _area(both) <= MOST_FOR_BOTH * max(_area(sizes), _area(pages.sizes)):
                sizes = both
                self._free(pages)
        return sizes

    def end(self) -> None:
        """Take the pages from every cache, whose later uses raise InvalidInput: the model no longer
        knows them."""
        want = "transformers' own cache, or after patch() one of new_cache()"
        with self._lock:
            for state in tuple(self._lent):
                if state.give_back is not None and state.give_back.detach() is not None:
                    state.pages = Returned("a cache of a model that was unpatched since", want)
                    state.step = None
            self._idle.clear()

    def trim(self) -> None:
        """Free the oldest idle pages, down to the bounds."""
        with self._lock:
            self._shrink(MOST_IDLE)

    def clear(self) -> None:
        """Free all idle pages."""
        with self._lock:
            self._shrink(0)

    def _shrink(self, most: int, kept: ModelPages | None = None) -> None:
        """Free the oldest idle pages but `kept`, down to so many sets and to the bytes."""
        while others := [pages for pages in tuple(self._idle) if pages is not kept]:
            if len(others) <= most and sum(pages.nbytes for pages in others) <= most_idle_bytes(
                others[0].sizes.device
            ):
                break
            self._free(others[0])

    def _free(self, pages: ModelPages) -> None:
        # Graphs first: after an interrupt the pages are idle still, and freed later.
        self._drop(pages)
        self._idle.remove(pages)


def give_back(cache: PagedModelCache) -> None:
    """Take the pages from a cache that was lent, so that others may use them. Later uses of the
    cache raise InvalidInput."""
    state = cache.state
    if state.give_back is not None:
        want = "return_dict_in_generate=True, or a cache of Patched.new_cache, to keep it"
        state.pages = Returned("the cache of a generate() call that has ended", want)
        state.step = None
        state.give_back()


def _area(sizes: Sizes) -> int:
    return sizes.rows * sizes.length


def _rounded(sizes: Sizes) -> Sizes:
    """With rows and length rounded up, so that a larger batch, a conversation whose text grows, or
    a call of another length seldom needs other pages: on a GPU with much memory the rows to a power
    of two and the length to `FEW` tokens, and above that the length by at most an eighth."""
    rows, step = sizes.rows, 1 << max((sizes.length - 1).bit_length() - 4, 0)
    length = -(-sizes.length // step) * step
    memory = gpu_bytes(sizes.device)
    if isfinite(memory):
        token = sum(map(_token_bytes, sizes.layers))
        states = sum(map(_state_bytes, sizes.states))
        room = int(memory / SMALL)
        more = 1 << (rows - 1).bit_length()
        rows = more if more * (length * token + states) <= room else rows
        # More tokens of a row need no more states.
        tokens = room // (rows * token)
        length = max(length, min(FEW, tokens // STEP * STEP))
    return sizes._replace(rows=rows, length=length)


def _token_bytes(layer: Problem) -> int:
    """Bytes that a layer keeps of a token, its window not counted."""
    numbers = sum(map(prod, layer_of(layer).shapes))
    return numbers * layer.dtype.itemsize


def _state_bytes(layer: StateSizes) -> int:
    """Bytes of a row's states of a layer."""
    conv = prod(layer.conv) * layer.conv_dtype.itemsize
    return conv + prod(layer.state) * layer.state_dtype.itemsize
