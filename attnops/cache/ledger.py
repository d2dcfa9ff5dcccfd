"""`Ledger`: the owners of pages. Plain Python on the host: it prepares a change, and commits it
once the tensors have followed.

Only preparing raises the cache's typed errors. Pages are shared by reference count. Page 0 of each
pool is the null page: it fills the unused entries of a page table and has no owner.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnops.core.checks import python_number
from attnops.core.errors import OutOfPages, RequestTooLong, TooManyRequests, UnknownRequest, fail
from attnops.core.record import need

# One count for the whole process: an id of one cache is never an id of another.
_IDS = itertools.count(1)

Cell = tuple[int, int, int, int]
"""(pool, column, page, source): a new entry of a page table. Page 0 releases the column. source:
the page to copy from, or 0."""


class Layer(NamedTuple):
    """The pages of one layer.

    shapes: of a token's numbers in each of its tensors: a key's and a value's, or a latent's.
    window: tokens a query sees, its own included; 0: all of them.
    """

    shapes: tuple[tuple[int, ...], ...]
    window: int = 0


@dataclass(frozen=True)
class Room:
    """The sizes of a cache.

    layers: the pages of each layer.
    num_pages: pages of a pool, the null page included.
    page_size: in tokens.
    max_requests, max_pages: rows and columns of a page table.
    max_new_tokens: of a request in a step, for which a window has room.
    limit: the most tokens of a request.
    limited_by: the argument that set the limit, for messages.
    """

    layers: Sequence[Layer]
    num_pages: int
    page_size: int
    max_requests: int
    max_pages: int
    max_new_tokens: int
    limit: int
    limited_by: str

    def columns(self, window: int) -> int:
        """Pages for a window and the new tokens of a step, wherever in a page the window begins; at
        most `max_pages`."""
        ring = -(-(window - 1 + self.max_new_tokens + self.page_size - 1) // self.page_size)
        return min(ring, self.max_pages) if window else self.max_pages


@dataclass
class Pool:
    """The pages that layers with one window share, and who refers to them.

    num_pages: the null page included.
    columns: of the page table. Page i of a request is in column `i % columns`, so that a window's
    pages are reused in turn.
    window: tokens a query sees, its own included; 0: all of them.
    """

    num_pages: int
    columns: int
    window: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.num_pages - 1, 0, -1))
        self.refs = [0] * self.num_pages


@dataclass
class Request:
    """A live request. row: of the tables. length: in tokens. high: the largest length since it was
    empty. pages: by pool and column. changes: how many there were, forks of it included."""

    row: int
    length: int
    high: int
    pages: tuple[list[int], ...]
    changes: int = 0


class Step(NamedTuple):
    """One request's part of a change: the cells that change, and its length and `high` afterwards.
    entry: the request before it."""

    request: int
    entry: Request
    length: int
    high: int
    cells: Sequence[Cell] = ()
    gone: bool = False


Change = list[Step]  # made as a whole


class Ledger:
    """Requests, pages and reference counts. See `PagedCache` for the meaning of each verb.

    pools: one for each page table.
    table_of: for each layer the number of its pool.
    """

    def __init__(self, room: Room) -> None:
        self.room, self.page_size = room, room.page_size
        # A window as long as the text saves no page.
        windows = [
            layer.window if room.columns(layer.window) < room.max_pages else 0
            for layer in room.layers
        ]
        kinds = {window: room.columns(window) for window in windows}
        self.table_of = tuple(map(list(kinds).index, windows))
        most = room.num_pages
        self.pools = tuple(
            Pool(min(most, 1 + room.max_requests * n) if window else most, n, window)
            for window, n in kinds.items()
        )
        self.free_rows = list(range(room.max_requests - 1, -1, -1))
        self.requests: dict[int, Request] = {}

    def get(self, request: object) -> Request:
        """The live request of this id. Raises UnknownRequest."""
        number = python_number(request)
        found = (
            self.requests.get(number)
            if isinstance(number, int) and not isinstance(number, bool)
            else None
        )
        if found is None:
            fail(UnknownRequest, request, len(self.requests))
        return found

    def alloc(self, tokens: int) -> Change:
        """A new request of `tokens` tokens. Raises TooManyRequests, RequestTooLong, OutOfPages."""
        return self._grow([(next(_IDS), self._empty(), tokens)])

    def append(self, more: Sequence[tuple[int, int]]) -> Change:
        """(request, tokens to add) for distinct requests, all or none. Raises UnknownRequest,
        RequestTooLong, OutOfPages."""
        return self._grow([(request, self.get(request), tokens) for request, tokens in more])

    def fits(self, more: Sequence[tuple[int, int]], new: Sequence[int]) -> bool:
        """Is there room for (request, tokens to add) of distinct requests beside new requests of so
        many tokens? Raises UnknownRequest."""
        live = [(request, self.get(request), tokens) for request, tokens in more]
        fresh = [(0, Request(0, 0, 0, tuple([] for _ in self.pools)), tokens) for tokens in new]
        try:
            self._grow(live + fresh)
        except (RequestTooLong, OutOfPages):
            return False
        return len(new) <= len(self.free_rows)

    def fork(self, request: int) -> Change:
        """A new request on the same pages. Raises UnknownRequest, TooManyRequests."""
        parent = self.get(request)
        cells = [
            (i, column, page, 0)
            for i, pages in enumerate(parent.pages)
            for column, page in enumerate(pages)
        ]
        return [
            Step(next(_IDS), self._empty(), parent.length, parent.high, cells),
            Step(request, parent, parent.length, parent.high),
        ]

    def truncate(self, request: int, length: int) -> Change:
        """Forget the tokens from `length` on. Raises UnknownRequest, InvalidInput."""
        entry = self.get(request)
        need(
            length <= entry.length,
            "length",
            length,
            f"<= {entry.length} tokens, the request's length",
        )
        for pool in self.pools:
            check_kept("length", length, entry.high, pool.window, pool.columns * self.page_size)
        return self._release(request, entry, length)

    def free(self, request: int) -> Change:
        """End a request. Raises UnknownRequest."""
        return self._release(request, self.get(request), 0, gone=True)

    def commit(self, change: Change) -> None:
        for step in change:
            entry = step.entry
            if step.request not in self.requests:
                self.free_rows.remove(entry.row)
                self.requests[step.request] = entry
            for i, column, page, _ in step.cells:
                pool, pages = self.pools[i], entry.pages[i]
                pages.extend([0] * (column + 1 - len(pages)))
                old, pages[column] = pages[column], page
                if not page:
                    pages.pop()  # columns are released from the last one on
                elif not pool.refs[page]:
                    pool.free.pop()  # free pages are taken from the end on
                pool.refs[page] += page > 0
                pool.refs[old] -= old > 0
                if old and not pool.refs[old]:
                    pool.free.append(old)
            entry.length, entry.high = step.length, step.high
            entry.changes += 1
            if step.gone:
                del self.requests[step.request]
                self.free_rows.append(entry.row)

    def edits(self, change: Change, undo: bool = False) -> list[list[tuple[int, ...]]]:
        """The entries that `change` writes into the tables or, with `undo`, overwrites. Call it
        before the commit.

        Lists of (row, column, page) for each pool, of (source, page) to copy for each pool, and of
        (row, length).
        """
        tables: list[list[tuple[int, ...]]] = [[] for _ in self.pools]
        copies: list[list[tuple[int, ...]]] = [[] for _ in self.pools]
        for _, entry, _, _, cells, _ in change:
            for i, column, page, source in cells:
                old = entry.pages[i][column] if column < len(entry.pages[i]) else 0
                tables[i].append((entry.row, column, old if undo else page))
                if source and not undo:
                    copies[i].append((source, page))
        return [
            *tables,
            *copies,
            [(step.entry.row, step.entry.length if undo else step.length) for step in change],
        ]

    def slots(self, request: int, start: int, stop: int, pool: int = 0) -> list[int]:
        """`page_id * page_size + offset` of the tokens `start` to `stop`; -1 for a token whose page
        holds a later one."""
        entry, size, columns = self.get(request), self.page_size, self.pools[pool].columns
        pages, kept = entry.pages[pool], entry.high - columns * size
        return [
            -1 if t < kept else pages[t // size % columns] * size + t % size
            for t in range(start, stop)
        ]

    def _grow(self, more: list[tuple[int, Request, int]]) -> Change:
        """(id, request, tokens to add) of distinct requests."""
        lengths = [entry.length + tokens for _, entry, tokens in more]
        for (request, _, _), length in zip(more, lengths, strict=True):
            if length > self.room.limit:
                fail(
                    RequestTooLong,
                    request if request in self.requests else "(new)",
                    length,
                    self.room.limit,
                    self.room.limited_by,
                )
        cells: list[list[Cell]] = [[] for _ in more]
        for i, pool in enumerate(self.pools):
            wanted = [*self._wanted(i, [entry for _, entry, _ in more], lengths)]
            if len(wanted) > len(pool.free):
                fail(OutOfPages, len(wanted), len(pool.free), pool.num_pages - 1)
            for (at, column, source), page in zip(wanted, reversed(pool.free), strict=False):
                cells[at].append((i, column, page, source))
        parts = zip(more, lengths, cells, strict=True)
        return [
            Step(key, entry, length, max(entry.high, length), own)
            for (key, entry, _), length, own in parts
        ]

    def _wanted(
        self, i: int, entries: Sequence[Request], lengths: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """(place among the requests, column, the page to copy from, or 0) of each new page of pool
        i that the requests need to grow."""
        pool, size, released = self.pools[i], self.page_size, Counter[int]()
        for at, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
            pages, begin, end = entry.pages[i], entry.length // size, -(-length // size)
            for index in range(max(begin, end - pool.columns), end):
                column = index % pool.columns
                old = pages[column] if column < len(pages) else 0
                # Of several requests that outgrow a shared page in one change, the last keeps it.
                if old and pool.refs[old] - released[old] == 1:
                    continue
                released[old] += 1
                # A page keeps what the new tokens leave of it: those before them, or, where a
                # window comes round to it, those behind.
                partly = (index == begin and entry.length % size) or (
                    index == end - 1 and length % size
                )
                yield at, column, old if partly else 0

    def _release(self, request: int, entry: Request, length: int, gone: bool = False) -> Change:
        keep = -(-length // self.page_size)
        cells = [
            (i, c, 0, 0)
            for i, pages in enumerate(entry.pages)
            for c in range(len(pages) - 1, keep - 1, -1)
        ]
        return [Step(request, entry, length, entry.high if length else 0, cells, gone)]

    def _empty(self) -> Request:
        if not self.free_rows:
            fail(TooManyRequests, len(self.requests))
        return Request(self.free_rows[-1], 0, 0, tuple([] for _ in self.pools))


def check_kept(field: str, length: int, high: int, window: int, room: int) -> None:
    """Raise InvalidInput when a query at position `length` sees tokens of its window that later
    ones have overwritten.

    field: the argument that asks, for the message. high: the most tokens there have been. room:
    tokens the pages hold.
    """
    # Until there were more tokens than the pages hold, none has been overwritten.
    least = high - room + window - 1 if high > room else 0
    want = (
        f"0, or at least {least} of {high}: a window of {window} needs tokens whose pages "
        "were used again"
    )
    need(not window or not 0 < length < least, field, length, want)
