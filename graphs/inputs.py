"""The options of a step, and the input buffers of graphs: one set at static addresses, whose first rows every bucket reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache.batch import PagedBatch
from ..cache.paged import Pages, ordinary
from ..core.errors import InvalidInput, StaleGraph, fail
from ..core.record import need
from .buckets import Bucket, Buckets, Kind
from .device import Device
from .guard import Guard, described

Values = dict[str, Any]

# One kernel for many small tensors. torch exports it under no other name.
_copy: Callable[[list[Tensor], list[Tensor]], None] = vars(torch)["_foreach_copy_"]


@dataclass(eq=False, repr=False)
class Setup:
    """The arguments that `piecewise` and `breakable` share: see `Piecewise`."""

    model: Callable[..., Any]
    buckets: Buckets
    _: KW_ONLY
    batch: str | None = "batch"
    tokens: Sequence[str]
    requests: Sequence[str] = ()
    returns: Literal["tokens", "requests", "whole"] = "tokens"
    cache: Pages | None = None
    prepare: Callable[[PagedBatch], PagedBatch] | None = None
    eager: Mapping[Kind, Sequence[str]] | None = None
    budget_bytes: int | None = None
    over_budget: Literal["raise", "drop"] = "raise"
    check_every: int = 0
    tolerance: float | None = None
    graphs: Device | None = None
    state: Sequence[Tensor] = ()
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext
    draws: bool = False

    def __post_init__(self) -> None:
        rows = (*self.tokens, *self.requests)
        right = len(set(rows)) == len(rows) > 0 and self.batch not in rows
        need(right, "tokens, requests", rows, "one or more different names, none equal to batch")
        for name, words in (("returns", ("tokens", "requests", "whole")), ("over_budget", ("raise", "drop"))):
            need(getattr(self, name) in words, name, repr(getattr(self, name)), " | ".join(map(repr, words)))
        for kind, names in (self.eager or {}).items():
            need(kind in ("decode", "verify", "mixed"), "eager", [kind], "'decode', 'verify' and 'mixed' as keys")
            need(not isinstance(names, str), "eager", repr(names), "a sequence of names of ops for each kind of batch")
        need(self.check_every >= 0, "check_every", self.check_every, "an int >= 0, 0 for never")
        tensors = not isinstance(self.state, Tensor) and all(isinstance(t, Tensor) for t in self.state)
        need(tensors, "state", type(self.state).__name__, "a sequence of tensors, those that a step changes")

    def fixed(self, values: Mapping[str, Any]) -> Values:
        """The arguments that are the same objects at every call."""
        return {n: v for n, v in values.items() if n not in (self.batch, *self.tokens, *self.requests)}

    def sizes(self, values: Mapping[str, Any]) -> tuple[Kind, int, int, int]:
        """(kind, new tokens, requests, the most tokens of a request) of a call. Raises InvalidInput.

        Without a batch, the rows of the first tensor by request are the requests, with one token each if no tensor is by token.
        """
        if self.batch is None:
            requests = int(rows_of(self.requests[0], values).shape[0]) if self.requests else 0
            tokens = int(rows_of(self.tokens[0], values).shape[0]) if self.tokens else requests
            return ("decode" if self.buckets.decode and self.requests and tokens == requests else "mixed"), tokens, requests, tokens
        batch = values.get(self.batch)
        if not isinstance(batch, PagedBatch):
            fail(InvalidInput, self.batch, type(batch).__name__, "a PagedBatch, as PagedCache.batch makes it")
        if batch.prefix or batch.shared is not None:
            want = "None or (): the sizes of their tensors differ at every step"
            fail(InvalidInput, f"{self.batch}.prefix, shared", "cached tokens", want)
        if batch.others:
            fail(InvalidInput, f"{self.batch}.others", f"{len(batch.others)} more tables", "(): a cache without windows")
        tokens, requests = batch.slots.shape[0], batch.page_table.shape[0]
        return self.buckets.kind(tokens, requests, batch.max_seqlen_q), tokens, requests, batch.max_seqlen_q

    def plan_maker(self, bucket: Bucket) -> Callable[[PagedBatch], Tensor] | None:
        """Makes the device plan in the graph of a bucket: a plan that came with the batch would be of the lengths at capture."""
        if self.cache is None or self.prepare is not None or bucket.kind == "mixed":
            return None
        return self.cache.plan_maker(bucket.tokens, bucket.requests, bucket.queries)


def rows_of(name: str, values: Mapping[str, Any]) -> Tensor:
    """The tensor of this name. Raises InvalidInput."""
    found = values.get(name)
    if not isinstance(found, Tensor) or found.dim() == 0:
        fail(InvalidInput, name, type(found).__name__, "a tensor whose first dim counts tokens or requests")
    return found


class _Rows(NamedTuple):
    """A buffer with a row for every token or request, and `more`. pad: fills padding rows; None: lengths, see `_pad_requests`."""

    tensor: Tensor
    by_token: bool
    pad: int | None = 0
    more: int = 0

    def length(self, tokens: int, requests: int) -> int:
        return (tokens if self.by_token else requests) + self.more


class Inputs:
    """Buffers like the tensors of a first call and as long as the largest bucket. width: the most columns of a page table."""

    def __init__(self, setup: Setup, values: Mapping[str, Any], watched: Mapping[str, Tensor]) -> None:
        """watched: further tensors that keep their addresses."""
        self._name, self._padding, self._batch, self.width = setup.batch, setup.buckets.padding, None, 0
        self._tables: dict[str, _Rows] = {}
        tokens, requests = setup.buckets.most
        with ordinary():
            self._rows = {n: _like(rows_of(n, values), tokens, True) for n in setup.tokens}
            self._rows |= {n: _like(rows_of(n, values), requests, False) for n in setup.requests}
            if setup.batch is not None:
                given: PagedBatch = values[setup.batch]
                device = given.page_table.device
                self.width = max(0 if setup.cache is None else setup.cache.page_table.shape[1], given.page_table.shape[1])
                self._ones = torch.arange(requests + 1, dtype=torch.int32, device=device)
                long = torch.zeros(tokens, dtype=torch.int64, device=device)
                self._tables = {
                    "page_table": _Rows(self._ones.new_zeros(requests, self.width), False),
                    "seq_lens": _Rows(self._ones.new_zeros(requests), False, None),
                    "cu_seqlens_q": _Rows(self._ones.new_zeros(requests + 1), False, None, 1),
                    "slots": _Rows(long - 1, True, -1), "positions": _Rows(long, True),
                }  # fmt: skip
                tables: Values = {n: r.tensor for n, r in self._tables.items()}
                self._batch = PagedBatch(**tables, max_seqlen_q=0, holes=given.holes, workspace=given.workspace)
        fixed = setup.fixed(values)
        self._guard = Guard(fixed, watched, len(values) - len(fixed))

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(r.tensor.nbytes for r in (*self._rows.values(), *self._tables.values()))

    def of(self, bucket: Bucket) -> Values:
        """The bucket's rows of every buffer, the batch among them."""

        def views(buffers: dict[str, _Rows]) -> Values:
            return {n: r.tensor[: r.length(bucket.tokens, bucket.requests)] for n, r in buffers.items()}

        found = views(self._rows)
        if self._batch is not None and self._name is not None:
            null, tables = self._null(bucket), views(self._tables)
            found[self._name] = replace(self._batch, **tables, max_seqlen_q=bucket.queries, padded=not null)
        return found

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise StaleGraph for a call that differs from the captured one in more than the values of tensors by row."""
        self._guard.check(values)
        for row, r in self._rows.items():
            given, own = rows_of(row, values), r.tensor
            if given.dtype is not own.dtype or given.device != own.device or given.shape[1:] != own.shape[1:]:
                fail(StaleGraph, row, described(given, rows=True), described(own, rows=True))
        if (ours := self._batch) is not None and (name := self._name) is not None:
            batch: PagedBatch = values[name]
            table, scratch = batch.page_table, batch.workspace
            if table.size(1) > self.width:
                fail(StaleGraph, f"{name}.page_table", f"{table.size(1)} columns", f"at most {self.width}")
            if table.device != ours.page_table.device:
                fail(StaleGraph, f"{name}.page_table", table.device, ours.page_table.device)
            if batch.holes and not ours.holes:
                fail(StaleGraph, f"{name}.holes", True, False)
            if scratch is not ours.workspace and (got := _at(scratch)) != (want := _at(ours.workspace)):
                fail(StaleGraph, f"{name}.workspace", got, want)

    def load(self, bucket: Bucket, values: Mapping[str, Any], tokens: int, requests: int) -> None:
        """Copy a call's tensors into the bucket's rows and clear its padding rows. Raises InvalidInput."""
        batch: PagedBatch | None = None if self._name is None else values[self._name]
        if batch is not None and self._null(bucket) and (batch.padded or tokens != requests):
            fail(InvalidInput, "batch", "tokens of no request", "one token a request and padded=False, which padding='null' requires")
        pairs: list[tuple[Tensor, Tensor]] = []
        rows = [(n, r, values[n]) for n, r in self._rows.items()] + [(n, r, getattr(batch, n)) for n, r in self._tables.items()]
        # Every step runs this loop before its replay, so that it calls no Python function.
        for name, (buffer, by_token, pad, more), given in rows:
            filled, count = (tokens + more, bucket.tokens + more) if by_token else (requests + more, bucket.requests + more)
            if given.shape[0] != filled:
                fail(InvalidInput, f"{name}.shape[0]", given.shape[0], f"{filled}, as in the batch")
            own = buffer[:filled]
            # `check` has compared all but the width of a page table.
            if given.dim() == 2 and given.shape[1] != own.shape[1]:
                own[:, given.shape[1] :].zero_()
                own = own[:, : given.shape[1]]
            pairs.append((own, given))
            if filled < count and pad is not None:
                if pad:
                    buffer[filled:count].fill_(pad)
                else:
                    buffer[filled:count].zero_()
        if batch is not None and requests < bucket.requests:
            ends = self._pad_requests(bucket, tokens, requests)
            if batch.padded:
                # Only the device knows the number of tokens that belong to requests.
                pairs.append((ends, batch.cu_seqlens_q[-1:].expand_as(ends)))
        by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for own, given in pairs:
            ours, theirs = by_dtype.setdefault((own.dtype, given.dtype), ([], []))
            ours.append(own)
            theirs.append(given)
        for ours, theirs in by_dtype.values():
            _copy(ours, theirs)

    def clear(self, bucket: Bucket) -> None:
        """Make all rows padding rows, for warm-up and capture."""
        for r in (*self._rows.values(), *self._tables.values()):
            r.tensor.fill_(r.pad or 0)
        if self._tables:
            self._pad_requests(bucket, 0, 0)

    def _null(self, bucket: Bucket) -> bool:
        """Are padding rows requests of one token that reads the null page?"""
        return bucket.kind == "decode" and self._padding == "null"

    def _pad_requests(self, bucket: Bucket, tokens: int, requests: int) -> Tensor:
        """Set lengths and ends of the padding rows, which start at `requests`. Returns the ends."""
        ends = self._tables["cu_seqlens_q"].tensor[requests + 1 : bucket.requests + 1]
        self._tables["seq_lens"].tensor[requests : bucket.requests].fill_(int(self._null(bucket)))
        if self._null(bucket):
            return ends.copy_(self._ones[requests + 1 : bucket.requests + 1])
        return ends.fill_(tokens)


def _like(given: Tensor, rows: int, by_token: bool) -> _Rows:
    return _Rows(torch.zeros((rows, *given.shape[1:]), dtype=given.dtype, device=given.device), by_token)


def _at(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.nbytes} bytes at {t.data_ptr():#x}"
