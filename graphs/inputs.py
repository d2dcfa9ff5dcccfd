"""The input buffers of graphs: one set at static addresses, whose first rows every bucket reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..cache.batch import HostLengths, PagedBatch, SharedPrefix
from ..cache.paged import ordinary
from ..core.errors import InvalidInput, StaleGraph, fail
from ..core.private_torch import copy_all
from .buckets import Bucket
from .options import Options, Values, path, rows_of
from .stale import Guard, described


class _Rows(NamedTuple):
    """A buffer with a row for every token or request, or one for the step, and `more`.

    pad: fills padding rows; None: lengths, see `_pad_requests`. name: for messages.
    """

    tensor: Tensor
    per: Literal["token", "request", "step"]
    pad: int | None = 0
    more: int = 0
    name: str = ""


_Buffers = dict[str, _Rows]


def _fields(of: str, rows: _Buffers) -> _Buffers:
    """The buffers of a batch's fields, with their names for messages. of: the batch, or its
    part."""
    return {field: r._replace(name=f"{of}.{field}") for field, r in rows.items()}


class Inputs:
    """Buffers like the tensors of a first call and as long as the largest bucket.

    A batch has one set of them for each of its page tables. The buffers of a shared prefix are made
    for the first batch that has one.

    widths: the most columns of each page table.
    """

    def __init__(self, options: Options, values: Values, watched: Mapping[str, Tensor]) -> None:
        """watched: further tensors that keep their addresses."""
        self._name = options.batch or ""
        self._batch: PagedBatch | None = None
        self._pads_with_requests = options.buckets.padding == "null"
        self._tables: list[_Buffers] = []
        self._shared: _Buffers = {}
        tokens, requests = options.buckets.most
        with ordinary():
            self._rows = {n: _like(n, values, tokens, "token") for n in options.tokens}
            self._rows |= {n: _like(n, values, requests, "request") for n in options.requests}
            if options.batch is not None:
                given: PagedBatch = values[options.batch]
                cached = () if options.cache is None else options.cache.tables
                self._make_tables(given, tokens, requests, cached)
        self.widths = [rows["page_table"].tensor.shape[1] for rows in self._tables]
        fixed = options.fixed(values)
        self._guard = Guard(fixed, watched, len(values) - len(fixed))

    def _make_tables(
        self, given: PagedBatch, tokens: int, requests: int, cached: Sequence[Tensor]
    ) -> None:
        """cached: the page tables of the cache, if it is known."""
        device = given.page_table.device
        self._ones = torch.arange(requests + 1, dtype=torch.int32, device=device)
        made = []
        for at, table in enumerate((given, *given.others)):
            shared = table.shared
            parts = () if shared is None else (shared.page_table, shared.rest_table)
            width = max(t.shape[1] for t in (table.page_table, *cached[at : at + 1], *parts))
            zeros = self._ones.new_zeros
            long = torch.zeros(tokens, dtype=torch.int64, device=device)
            rows = {
                "page_table": _Rows(zeros(requests, width), "request"),
                "seq_lens": _Rows(zeros(requests), "request", None),
                "cu_seqlens_q": _Rows(zeros(requests + 1), "request", None, 1),
                "slots": _Rows(long - 1, "token", -1),
                "positions": _Rows(long, "token"),
            }
            tensors: Values = {n: r.tensor for n, r in rows.items()}
            tensors["workspace"] = table.workspace
            self._tables.append(_fields(path(self._name, at), rows))
            made.append(PagedBatch(**tensors, max_seqlen_q=0, holes=table.holes))
        first, *others = made
        self._batch = replace(first, others=tuple(others))

    def make_shared(self) -> None:
        """Make the buffers of a shared prefix, see `SharedPrefix`, if there are none."""
        if self._shared:
            return
        requests = len(self._ones) - 1
        width, zeros = self.widths[0], self._ones.new_zeros
        with ordinary():
            rows = {
                "page_table": _Rows(zeros(1, width), "step"),
                "seq_lens": _Rows(zeros(1), "step"),
                "cu_seqlens_q": _Rows(zeros(2), "step", 0, 1),
                "rest_table": _Rows(zeros(requests, width), "request"),
                "rest_lens": _Rows(zeros(requests), "request", None),
            }
        self._shared = _fields(f"{self._name}.shared", rows)

    def _buffers(self) -> Iterator[_Rows]:
        every = self._rows, *self._tables, self._shared
        return chain.from_iterable(rows.values() for rows in every)

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(r.tensor.nbytes for r in self._buffers())

    def of(self, bucket: Bucket) -> Values:
        """The bucket's rows of every buffer, the batch among them."""

        def views(buffers: _Buffers) -> Values:
            count = {"token": bucket.tokens, "request": bucket.requests, "step": 1}
            return {n: r.tensor[: count[r.per] + r.more] for n, r in buffers.items()}

        found = views(self._rows)
        if self._batch is not None:
            changed: Values = {"max_seqlen_q": bucket.queries, "padded": not self._null(bucket)}
            tables = zip((self._batch, *self._batch.others), self._tables, strict=True)
            first, *others = (replace(b, **views(rows), **changed) for b, rows in tables)
            shared = SharedPrefix(**views(self._shared)) if bucket.shared else None
            found[self._name] = replace(first, others=tuple(others), shared=shared)
        return found

    def check(self, values: Values) -> None:
        """Raise StaleGraph for a call that differs in more than the values of tensors by row."""
        self._guard.check(values)
        for row, r in self._rows.items():
            given, kept = rows_of(row, values), r.tensor
            same = given.dtype is kept.dtype and given.device == kept.device
            if not same or given.shape[1:] != kept.shape[1:]:
                fail(StaleGraph, row, described(given, rows=True), described(kept, rows=True))
        ours, name = self._batch, self._name
        if ours is None:
            return
        batch: PagedBatch = values[name]
        if len(batch.others) != len(ours.others):
            got = f"{len(batch.others)} further tables"
            fail(StaleGraph, f"{name}.others", got, f"{len(ours.others)}")
        # Every step runs this loop before its replay, so that it calls no Python function.
        for at, own in enumerate((ours, *ours.others)):
            found = batch.others[at - 1] if at else batch
            table, scratch, width = found.page_table, found.workspace, self.widths[at]
            if table.size(1) > width:
                got = f"{table.size(1)} columns"
                fail(StaleGraph, f"{path(name, at)}.page_table", got, f"at most {width}")
            if table.device != own.page_table.device:
                want = own.page_table.device
                fail(StaleGraph, f"{path(name, at)}.page_table", table.device, want)
            if found.holes and not own.holes:
                fail(StaleGraph, f"{path(name, at)}.holes", True, False)
            if scratch is not own.workspace and _at(scratch) != _at(own.workspace):
                fail(StaleGraph, f"{path(name, at)}.workspace", _at(scratch), _at(own.workspace))
        if batch.shared is not None:
            self._check_shared(batch.shared, ours.page_table.device)

    def _check_shared(self, shared: SharedPrefix, device: torch.device) -> None:
        """Raise StaleGraph for tables of a shared prefix that are wider than those of the batch, or
        elsewhere."""
        width = self.widths[0]
        for field in ("page_table", "rest_table"):
            table: Tensor = getattr(shared, field)
            name = f"{self._name}.shared.{field}"
            if table.size(1) > width:
                fail(StaleGraph, name, f"{table.size(1)} columns", f"at most {width}")
            if table.device != device:
                fail(StaleGraph, name, table.device, device)

    def load(self, bucket: Bucket, values: Values, tokens: int, requests: int) -> None:
        """Copy a call's tensors into the bucket's rows and clear its padding rows.

        Raises InvalidInput.
        """
        batch: PagedBatch | None = values.get(self._name)
        if null := self._null(bucket):
            self._check_null(batch, tokens, requests)
        pairs: list[tuple[Tensor, Tensor]] = []
        rows = [(r, values[n]) for n, r in self._rows.items()]
        tables = () if batch is None else (batch, *batch.others)
        for table, own_rows in zip(tables, self._tables, strict=True):
            rows += [(r, getattr(table, n)) for n, r in own_rows.items()]
        if batch is not None and batch.shared is not None:
            rows += [(r, getattr(batch.shared, n)) for n, r in self._shared.items()]
        sizes = {
            "token": (tokens, bucket.tokens),
            "request": (requests, bucket.requests),
            "step": (1, 1),
        }
        # Every step runs this loop before its replay, so that it calls no Python function.
        for (buffer, per, pad, more, name), given in rows:
            filled, count = sizes[per]
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
        if requests < bucket.requests:
            for table, own_rows in zip(tables, self._tables, strict=True):
                ends = self._pad_requests(own_rows, bucket, tokens, requests, null)
                if table.padded:
                    # Only the device knows the number of tokens that belong to requests.
                    pairs.append((ends, table.cu_seqlens_q[-1:].expand_as(ends)))
        _copy_all(pairs)
        if bucket.shared:
            self._pad_shared(bucket, requests, null)

    def host_lengths(self, bucket: Bucket, batch: PagedBatch) -> HostLengths | None:
        """Those of a call's batch, and of the padding rows that `load` adds to it."""
        host = batch.host
        if host is None:
            return None
        more = [int(self._null(bucket))] * (bucket.requests - batch.page_table.shape[0])
        return HostLengths([*host.seq_lens, *more], [*host.new_tokens, *more])

    def clear(self, bucket: Bucket) -> None:
        """Make all rows padding rows, for warm-up and capture."""
        null = self._null(bucket)
        for r in self._buffers():
            r.tensor.fill_(r.pad or 0)
        for rows in self._tables:
            self._pad_requests(rows, bucket, 0, 0, null)
        if bucket.shared:
            self._pad_shared(bucket, 0, null)

    def _null(self, bucket: Bucket) -> bool:
        """Are padding rows requests of one token that reads the null page?"""
        return bucket.kind == "decode" and self._pads_with_requests

    def _check_null(self, batch: PagedBatch | None, tokens: int, requests: int) -> None:
        """Raise InvalidInput for a batch with tokens of no request."""
        tables = () if batch is None else (batch, *batch.others)
        if tables and (tokens != requests or any(table.padded for table in tables)):
            want = "one token a request and padded=False, which padding='null' requires"
            fail(InvalidInput, self._name, "tokens of no request", want)

    def _pad_requests(
        self, rows: _Buffers, bucket: Bucket, tokens: int, requests: int, null: bool
    ) -> Tensor:
        """Set lengths and ends of the padding rows of a page table, which start at `requests`.

        Returns the ends.
        """
        ends = rows["cu_seqlens_q"].tensor[requests + 1 : bucket.requests + 1]
        rows["seq_lens"].tensor[requests : bucket.requests].fill_(int(null))
        if null:
            return ends.copy_(self._ones[requests + 1 : bucket.requests + 1])
        return ends.fill_(tokens)

    def _pad_shared(self, bucket: Bucket, requests: int, null: bool) -> None:
        """Set the lengths behind the shared prefix of padding rows.

        Tokens of no request do not attend to the prefix either. Those of padding requests do: a
        kernel may rely on every token having a request.
        """
        self._shared["rest_lens"].tensor[requests : bucket.requests].fill_(int(null))
        if null:
            self._shared["cu_seqlens_q"].tensor[1:].fill_(bucket.tokens)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, at once for each two dtypes."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for own, given in pairs:
        ours, theirs = by_dtype.setdefault((own.dtype, given.dtype), ([], []))
        ours.append(own)
        theirs.append(given)
    for ours, theirs in by_dtype.values():
        copy_all(ours, theirs)


def _like(name: str, values: Values, rows: int, per: Literal["token", "request"]) -> _Rows:
    """A buffer of so many rows like the argument of this name. Raises InvalidInput."""
    given = rows_of(name, values)
    shape = rows, *given.shape[1:]
    buffer = torch.zeros(shape, dtype=given.dtype, device=given.device)
    return _Rows(buffer, per, name=name)


def _at(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.nbytes} bytes at {t.data_ptr():#x}"
