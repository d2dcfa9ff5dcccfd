"""The input buffers of graphs: one set at static addresses, whose first rows every bucket reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.batch import HostLengths, PagedBatch
from ..cache.paged import ordinary
from ..core.errors import InvalidInput, StaleGraph, fail
from ..core.private_torch import copy_all
from .buckets import Bucket
from .options import Options, Values, rows_of
from .stale import Guard, described


class _Rows(NamedTuple):
    """A buffer with a row for every token or request, and `more`.

    pad: fills padding rows; None: lengths, see `_pad_requests`.
    """

    tensor: Tensor
    by_token: bool
    pad: int | None = 0
    more: int = 0


class Inputs:
    """Buffers like the tensors of a first call and as long as the largest bucket.

    width: the most columns of a page table.
    """

    def __init__(self, options: Options, values: Values, watched: Mapping[str, Tensor]) -> None:
        """watched: further tensors that keep their addresses."""
        self._name, self.width = options.batch or "", 0
        self._batch: PagedBatch | None = None
        self._pads_with_requests = options.buckets.padding == "null"
        self._tables: dict[str, _Rows] = {}
        tokens, requests = options.buckets.most
        with ordinary():
            self._rows = {n: _like(rows_of(n, values), tokens, True) for n in options.tokens}
            self._rows |= {n: _like(rows_of(n, values), requests, False) for n in options.requests}
            if options.batch is not None:
                given: PagedBatch = values[options.batch]
                widths = [given.page_table.shape[1]]
                widths += [] if options.cache is None else [options.cache.page_table.shape[1]]
                self._make_tables(given, tokens, requests, max(widths))
        fixed = options.fixed(values)
        self._guard = Guard(fixed, watched, len(values) - len(fixed))

    def _make_tables(self, given: PagedBatch, tokens: int, requests: int, width: int) -> None:
        self.width, device = width, given.page_table.device
        self._ones = torch.arange(requests + 1, dtype=torch.int32, device=device)
        long = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._tables = {
            "page_table": _Rows(self._ones.new_zeros(requests, width), False),
            "seq_lens": _Rows(self._ones.new_zeros(requests), False, None),
            "cu_seqlens_q": _Rows(self._ones.new_zeros(requests + 1), False, None, 1),
            "slots": _Rows(long - 1, True, -1),
            "positions": _Rows(long, True),
        }
        tables: Values = {n: r.tensor for n, r in self._tables.items()}
        self._batch = PagedBatch(
            **tables, max_seqlen_q=0, holes=given.holes, workspace=given.workspace
        )

    def _buffers(self) -> Iterator[_Rows]:
        return chain(self._rows.values(), self._tables.values())

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(r.tensor.nbytes for r in self._buffers())

    def of(self, bucket: Bucket) -> Values:
        """The bucket's rows of every buffer, the batch among them."""

        def views(buffers: dict[str, _Rows]) -> Values:
            count = {True: bucket.tokens, False: bucket.requests}
            return {n: r.tensor[: count[r.by_token] + r.more] for n, r in buffers.items()}

        found = views(self._rows)
        if self._batch is not None:
            changed: Values = {"max_seqlen_q": bucket.queries, "padded": not self._null(bucket)}
            found[self._name] = replace(self._batch, **views(self._tables), **changed)
        return found

    def check(self, values: Values) -> None:
        """Raise StaleGraph for a call that differs in more than the values of tensors by row."""
        self._guard.check(values)
        for row, r in self._rows.items():
            given, own = rows_of(row, values), r.tensor
            same = given.dtype is own.dtype and given.device == own.device
            if not same or given.shape[1:] != own.shape[1:]:
                fail(StaleGraph, row, described(given, rows=True), described(own, rows=True))
        ours, name = self._batch, self._name
        if ours is None:
            return
        batch: PagedBatch = values[name]
        table, scratch = batch.page_table, batch.workspace
        if table.size(1) > self.width:
            got = f"{table.size(1)} columns"
            fail(StaleGraph, f"{name}.page_table", got, f"at most {self.width}")
        if table.device != ours.page_table.device:
            fail(StaleGraph, f"{name}.page_table", table.device, ours.page_table.device)
        if batch.holes and not ours.holes:
            fail(StaleGraph, f"{name}.holes", True, False)
        if scratch is not ours.workspace and (got := _at(scratch)) != (want := _at(ours.workspace)):
            fail(StaleGraph, f"{name}.workspace", got, want)

    def load(self, bucket: Bucket, values: Values, tokens: int, requests: int) -> None:
        """Copy a call's tensors into the bucket's rows and clear its padding rows.

        Raises InvalidInput.
        """
        batch: PagedBatch | None = values.get(self._name)
        if null := self._null(bucket):
            self._check_null(batch, tokens, requests)
        pairs: list[tuple[Tensor, Tensor]] = []
        rows = [(n, r, values[n]) for n, r in self._rows.items()]
        rows += [(n, r, getattr(batch, n)) for n, r in self._tables.items()]
        sizes = {True: (tokens, bucket.tokens), False: (requests, bucket.requests)}
        # Every step runs this loop before its replay, so that it calls no Python function.
        for name, (buffer, by_token, pad, more), given in rows:
            filled, count = sizes[by_token]
            filled, count = filled + more, count + more
            if given.shape[0] != filled:
                got, want = given.shape[0], f"{filled}, as in the batch"
                fail(InvalidInput, f"{name}.shape[0]", got, want)
            own = buffer[:filled]
            # `check` has compared all but the width of a page table.
            if given.dim() == 2 and given.shape[1] != own.shape[1]:
                own[:, given.shape[1] :].zero_()
                own = own[:, : given.shape[1]]
            pairs.append((own, given))
            if filled < count and pad is not None:
                buffer[filled:count].fill_(pad)
        if batch is not None and requests < bucket.requests:
            ends = self._pad_requests(bucket, tokens, requests, null)
            if batch.padded:
                # Only the device knows the number of tokens that belong to requests.
                pairs.append((ends, batch.cu_seqlens_q[-1:].expand_as(ends)))
        _copy_all(pairs)

    def host_lengths(self, bucket: Bucket, batch: PagedBatch) -> HostLengths | None:
        """Those of a call's batch, and of the padding rows that `load` adds to it."""
        if batch.host is None:
            return None
        more = [int(self._null(bucket))] * (bucket.requests - batch.page_table.shape[0])
        return HostLengths(*([*each, *more] for each in batch.host))

    def clear(self, bucket: Bucket) -> None:
        """Make all rows padding rows, for warm-up and capture."""
        for r in self._buffers():
            r.tensor.fill_(r.pad or 0)
        if self._tables:
            self._pad_requests(bucket, 0, 0, self._null(bucket))

    def _null(self, bucket: Bucket) -> bool:
        """Are padding rows requests of one token that reads the null page?"""
        return bucket.kind == "decode" and self._pads_with_requests

    def _check_null(self, batch: PagedBatch | None, tokens: int, requests: int) -> None:
        """Raise InvalidInput for a batch with tokens of no request."""
        if batch is not None and (batch.padded or tokens != requests):
            want = "one token a request and padded=False, which padding='null' requires"
            fail(InvalidInput, "batch", "tokens of no request", want)

    def _pad_requests(self, bucket: Bucket, tokens: int, requests: int, null: bool) -> Tensor:
        """Set lengths and ends of the padding rows, which start at `requests`.

        Returns the ends.
        """
        ends = self._tables["cu_seqlens_q"].tensor[requests + 1 : bucket.requests + 1]
        self._tables["seq_lens"].tensor[requests : bucket.requests].fill_(int(null))
        if null:
            return ends.copy_(self._ones[requests + 1 : bucket.requests + 1])
        return ends.fill_(tokens)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, at once for each two dtypes."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for own, given in pairs:
        ours, theirs = by_dtype.setdefault((own.dtype, given.dtype), ([], []))
        ours.append(own)
        theirs.append(given)
    for ours, theirs in by_dtype.values():
        copy_all(ours, theirs)


def _like(given: Tensor, rows: int, by_token: bool) -> _Rows:
    shape = rows, *given.shape[1:]
    return _Rows(torch.zeros(shape, dtype=given.dtype, device=given.device), by_token)


def _at(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.nbytes} bytes at {t.data_ptr():#x}"
