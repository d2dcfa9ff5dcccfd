"""`Ledger`: which request owns which page. Plain Python on the host: it plans a change, and commits it when the tensors follow.

Planning raises the cache's typed errors and changes nothing. Pages are shared by reference count; page 0 is the null page, which
stands in unused entries of the page table and belongs to nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnops.errors import InvalidInput, OutOfPages, RequestTooLong, TooManyRequests, UnknownRequest

# One count for the whole process: an id of one cache is never an id of another.
_IDS = itertools.count(1)


@dataclass
class Request:
    """A live request: its row in the tables, its length in tokens, and its pages in order."""

    row: int
    length: int
    pages: list[int]


@dataclass(frozen=True)
class Step:
    """One request's part of a plan: keep the first `keep` pages, then `tail`; be `length` tokens long, or be gone."""

    request: int
    row: int
    keep: int
    tail: tuple[int, ...]
    length: int
    gone: bool = False


@dataclass(frozen=True)
class Plan:
    """A change that can be made as a whole. `taken` free pages are handed out; `copies` are (from, to) page ids."""

    steps: tuple[Step, ...] = ()
    taken: int = 0
    copies: tuple[tuple[int, int], ...] = ()


class Ledger:
    """Requests, pages and reference counts. See `PagedCache` for the meaning of the numbers and of each verb.

    limit: the most tokens of a request; limited_by: what the user set it by, for messages.
    """

    def __init__(self, num_pages: int, page_size: int, max_requests: int, limit: int, limited_by: str) -> None:
        self.page_size = page_size
        self.limit, self.limited_by = limit, limited_by
        self.total = num_pages - 1
        self.free_pages = list(range(num_pages - 1, 0, -1))
        self.free_rows = list(range(max_requests - 1, -1, -1))
        self.refs = [0] * num_pages
        self.requests: dict[int, Request] = {}

    def get(self, request: object) -> Request:
        """The live request of this id. Raises UnknownRequest."""
        found = self.requests.get(request) if isinstance(request, int) and not isinstance(request, bool) else None
        if found is None:
            raise UnknownRequest(request, len(self.requests))
        return found

    def alloc(self, tokens: int) -> Plan:
        """A new request of `tokens` tokens. Raises TooManyRequests, RequestTooLong, OutOfPages."""
        row = self._row()
        self._fits("(new)", tokens)
        pages = self._take(-(-tokens // self.page_size))
        return Plan((Step(next(_IDS), row, 0, pages, tokens),), len(pages))

    def fork(self, request: int) -> Plan:
        """A new request on the same pages. Raises UnknownRequest, TooManyRequests."""
        parent = self.get(request)
        row = self._row()
        return Plan((Step(next(_IDS), row, 0, tuple(parent.pages), parent.length),))

    def append(self, more: Sequence[tuple[int, int]]) -> Plan:
        """(request, tokens to add) for distinct requests, all or none. Raises UnknownRequest, RequestTooLong, OutOfPages."""
        grown = []
        needed = 0
        released: dict[int, int] = {}
        for request, tokens in more:
            entry = self.get(request)
            length = entry.length + tokens
            self._fits(request, length)
            keep = len(entry.pages)
            if tokens and entry.length % self.page_size:
                last = entry.pages[-1]
                # Of several requests that outgrow a shared page in one plan, the last finds it its own.
                if self.refs[last] - released.get(last, 0) > 1:
                    released[last] = released.get(last, 0) + 1
                    keep -= 1
            count = -(-length // self.page_size) - keep
            needed += count
            grown.append((request, entry, keep, count, length))
        free = self._take(needed)
        steps, copies, at = [], [], 0
        for request, entry, keep, count, length in grown:
            tail = free[at : at + count]
            at += count
            steps.append(Step(request, entry.row, keep, tail, length))
            if keep < len(entry.pages):
                copies.append((entry.pages[keep], tail[0]))
        return Plan(tuple(steps), needed, tuple(copies))

    def truncate(self, request: int, length: int) -> Plan:
        """Forget the tokens from `length` on. Raises UnknownRequest, InvalidInput."""
        entry = self.get(request)
        if length > entry.length:
            raise InvalidInput("length", length, f"<= {entry.length} tokens, the request's length")
        return Plan((Step(request, entry.row, -(-length // self.page_size), (), length),))

    def free(self, request: int) -> Plan:
        """End a request. Raises UnknownRequest."""
        return Plan((Step(request, self.get(request).row, 0, (), 0, gone=True),))

    def commit(self, plan: Plan) -> None:
        """Make the change."""
        del self.free_pages[len(self.free_pages) - plan.taken :]
        for step in plan.steps:
            entry = self.requests.get(step.request)
            if entry is None:
                self.free_rows.remove(step.row)
                entry = self.requests[step.request] = Request(step.row, 0, [])
            for page in step.tail:
                self.refs[page] += 1
            for page in reversed(entry.pages[step.keep :]):
                self.refs[page] -= 1
                if not self.refs[page]:
                    self.free_pages.append(page)
            entry.pages[step.keep :] = step.tail
            entry.length = step.length
            if step.gone:
                del self.requests[step.request]
                self.free_rows.append(step.row)

    def edits(self, plan: Plan, undo: bool = False) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """(row, column, page) and (row, length): what the tables must hold once `plan` is made, or (undo) what they held before.

        To be asked before the commit.
        """
        table, lengths = [], []
        for step in plan.steps:
            before = self.requests.get(step.request) or Request(step.row, 0, [])
            after = (*before.pages[: step.keep], *step.tail)
            for column in range(step.keep, max(len(before.pages), len(after))):
                pages = before.pages if undo else after
                table.append((step.row, column, pages[column] if column < len(pages) else 0))
            lengths.append((step.row, before.length if undo else step.length))
        return table, lengths

    def slots(self, request: int, start: int, stop: int) -> Iterator[int]:
        """`page_id * page_size + offset` of the tokens `start` to `stop` of a request."""
        pages = self.get(request).pages
        return (pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(start, stop))

    def _row(self) -> int:
        if not self.free_rows:
            raise TooManyRequests(len(self.requests))
        return self.free_rows[-1]

    def _fits(self, request: object, length: int) -> None:
        if length > self.limit:
            raise RequestTooLong(request, length, self.limit, self.limited_by)

    def _take(self, count: int) -> tuple[int, ...]:
        if count > len(self.free_pages):
            raise OutOfPages(count, len(self.free_pages), self.total)
        return tuple(self.free_pages[-1 : -count - 1 : -1]) if count else ()
