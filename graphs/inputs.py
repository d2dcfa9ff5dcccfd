"""The input buffers of graphs: one set at static addresses, whose first rows every bucket reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..cache.batch import PagedBatch
from ..cache.paged import ordinary
from ..errors import InvalidInput, StaleGraph, fail
from .buckets import Bucket, Buckets, Kind

Values = dict[str, Any]

# One kernel for many small tensors. torch exports it under no other name.
_copy: Callable[[list[Tensor], list[Tensor]], None] = vars(torch)["_foreach_copy_"]


@dataclass(frozen=True)
class Roles:
    """The arguments of a model's forward, by name. All others are the same objects at every call.

    batch: the PagedBatch, or None.
    tokens: tensors with a row for every new token.
    requests: tensors with a row for every request.
    """

    batch: str | None
    tokens: tuple[str, ...]
    requests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rows = (*self.tokens, *self.requests)
        if not rows or len(set(rows)) != len(rows) or self.batch in rows:
            fail(InvalidInput, "tokens, requests", rows, "one or more different names, none equal to batch")

    def fixed(self, values: Mapping[str, Any]) -> Values:
        """The arguments that are the same at every call."""
        return {n: v for n, v in values.items() if n != self.batch and n not in self.tokens and n not in self.requests}


def sizes(roles: Roles, buckets: Buckets, values: Mapping[str, Any]) -> tuple[Kind, int, int, int]:
    """(kind, new tokens, requests, the most tokens of a request) of a call.

    Without a batch, the rows of the first tensor by request are the requests, with one token each if no tensor is by token.

    Raises:
        InvalidInput: the batch is not a PagedBatch, or has cached tokens.
    """
    if roles.batch is None:
        requests = int(rows_of(roles.requests[0], values).shape[0]) if roles.requests else 0
        tokens = int(rows_of(roles.tokens[0], values).shape[0]) if roles.tokens else requests
        return ("decode" if buckets.decode and roles.requests and tokens == requests else "mixed"), tokens, requests, tokens
    batch = values.get(roles.batch)
    if not isinstance(batch, PagedBatch):
        fail(InvalidInput, roles.batch, type(batch).__name__, "a PagedBatch, as PagedCache.batch makes it")
    if batch.prefix or batch.shared is not None:
        fail(InvalidInput, f"{roles.batch}.prefix, shared", "cached tokens", "None or (): the sizes of their tensors differ at every step")
    if batch.others:
        fail(InvalidInput, f"{roles.batch}.others", f"{len(batch.others)} more tables", "(): a cache without windows")
    tokens, requests = batch.slots.shape[0], batch.page_table.shape[0]
    return buckets.kind(tokens, requests, batch.max_seqlen_q), tokens, requests, batch.max_seqlen_q


def rows_of(name: str, values: Mapping[str, Any]) -> Tensor:
    """The tensor of this name. Raises InvalidInput."""
    found = values.get(name)
    if not isinstance(found, Tensor) or found.dim() == 0:
        fail(InvalidInput, name, type(found).__name__, "a tensor whose first dim counts tokens or requests")
    return found


class Inputs:
    """Buffers for the batch and the tensors by row, like those of a first call and as long as the largest bucket.

    width: the least number of columns of the page table. A call may bring fewer, and never more.
    """

    def __init__(self, roles: Roles, buckets: Buckets, values: Mapping[str, Any], width: int = 0) -> None:
        self.roles, self.buckets = roles, buckets
        tokens, requests = buckets.most
        self.width = width
        with ordinary():
            self._rows = {n: _like(rows_of(n, values), tokens) for n in roles.tokens}
            self._rows |= {n: _like(rows_of(n, values), requests) for n in roles.requests}
            self._kinds = [(n, t.dtype, t.device, t.dim(), t.shape[1:]) for n, t in self._rows.items()]
            self._batch: PagedBatch | None = None
            if roles.batch is not None:
                given: PagedBatch = values[roles.batch]
                columns = max(width, given.page_table.shape[1])
                device = given.page_table.device
                self.width, self._device = columns, device
                self._batch = PagedBatch(
                    page_table=torch.zeros((requests, columns), dtype=torch.int32, device=device),
                    seq_lens=torch.zeros(requests, dtype=torch.int32, device=device),
                    cu_seqlens_q=torch.zeros(requests + 1, dtype=torch.int32, device=device),
                    slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
                    positions=torch.zeros(tokens, dtype=torch.int64, device=device),
                    max_seqlen_q=0,
                    holes=given.holes,
                    workspace=given.workspace,
                )
                self._ones = torch.arange(requests + 1, dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(t.nbytes for t in (*self._rows.values(), *(_tables(self._batch).values() if self._batch else ())))

    def of(self, bucket: Bucket) -> Values:
        """The bucket's rows of every buffer, the batch among them."""
        tokens, requests = bucket.tokens, bucket.requests
        found: Values = {n: b[: tokens if n in self.roles.tokens else requests] for n, b in self._rows.items()}
        if self._batch is not None and self.roles.batch is not None:
            whole = self._batch
            found[self.roles.batch] = replace(
                whole, page_table=whole.page_table[:requests], seq_lens=whole.seq_lens[:requests],
                cu_seqlens_q=whole.cu_seqlens_q[: requests + 1], slots=whole.slots[:tokens], positions=whole.positions[:tokens],
                max_seqlen_q=bucket.queries,
                padded=not (bucket.kind == "decode" and self.buckets.padding == "null"),
            )  # fmt: skip
        return found

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise StaleGraph where a tensor differs in dtype, device or row shape from the captured one."""
        for name, dtype, device, dims, rest in self._kinds:
            given = rows_of(name, values)
            if given.dtype is not dtype or given.device != device or given.dim() != dims or (dims > 1 and given.shape[1:] != rest):
                fail(StaleGraph, name, _described(given), _described(self._rows[name]))
        if self._batch is not None and self.roles.batch is not None:
            batch: PagedBatch = values[self.roles.batch]
            table = batch.page_table
            if table.size(1) > self.width:
                fail(StaleGraph, f"{self.roles.batch}.page_table", f"{table.size(1)} columns", f"at most {self.width}")
            if table.device != self._device:
                fail(StaleGraph, f"{self.roles.batch}.page_table", table.device, self._device)
            if batch.holes and not self._batch.holes:
                fail(StaleGraph, f"{self.roles.batch}.holes", True, False)
            if batch.workspace is not self._batch.workspace and not _same(batch.workspace, self._batch.workspace):
                fail(StaleGraph, f"{self.roles.batch}.workspace", _at(batch.workspace), _at(self._batch.workspace))

    def load(self, bucket: Bucket, values: Mapping[str, Any]) -> None:
        """Copy a call's tensors into the bucket's rows and clear its padding rows. Raises InvalidInput."""
        _, tokens, requests, _ = sizes(self.roles, self.buckets, values)
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, buffer in self._rows.items():
            filled, count = (tokens, bucket.tokens) if name in self.roles.tokens else (requests, bucket.requests)
            given = rows_of(name, values)
            if given.shape[0] != filled:
                fail(InvalidInput, f"{name}.shape[0]", given.shape[0], f"{filled}, as in the batch")
            pairs.append((buffer[:filled], given))
            if filled < count:
                buffer[filled:count].zero_()
        if self._batch is not None and self.roles.batch is not None:
            batch: PagedBatch = values[self.roles.batch]
            self._load(bucket, batch, tokens, requests, pairs)
        by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for into, given in pairs:
            ours, theirs = by_dtype.setdefault((into.dtype, given.dtype), ([], []))
            ours.append(into)
            theirs.append(given)
        for ours, theirs in by_dtype.values():
            _copy(ours, theirs)

    def clear(self, bucket: Bucket) -> None:
        """Make all rows padding rows, for warm-up and capture."""
        for buffer in self._rows.values():
            buffer.zero_()
        if self._batch is not None:
            batch = self._batch
            for table in (batch.page_table, batch.seq_lens, batch.cu_seqlens_q, batch.positions):
                table.zero_()
            batch.slots.fill_(-1)
            self._pad_requests(bucket, 0, 0)

    def _load(self, bucket: Bucket, batch: PagedBatch, tokens: int, requests: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        ours = self._batch
        assert ours is not None
        null = bucket.kind == "decode" and self.buckets.padding == "null"
        if null and (batch.padded or tokens != requests):
            fail(InvalidInput, "batch", "tokens of no request", "one token a request and padded=False, which padding='null' requires")
        width = batch.page_table.shape[1]
        pairs += [
            (ours.page_table[:requests, :width], batch.page_table), (ours.seq_lens[:requests], batch.seq_lens),
            (ours.cu_seqlens_q[: requests + 1], batch.cu_seqlens_q), (ours.slots[:tokens], batch.slots),
            (ours.positions[:tokens], batch.positions),
        ]  # fmt: skip
        if width < ours.page_table.shape[1]:
            ours.page_table[:requests, width:].zero_()
        if tokens < bucket.tokens:
            ours.slots[tokens : bucket.tokens].fill_(-1)
            ours.positions[tokens : bucket.tokens].zero_()
        if requests < bucket.requests:
            ours.page_table[requests : bucket.requests].zero_()
            self._pad_requests(bucket, tokens, requests)
            if batch.padded:
                # Only the device knows the number of tokens that belong to requests.
                last = batch.cu_seqlens_q[-1:].expand(bucket.requests - requests)
                pairs.append((ours.cu_seqlens_q[requests + 1 : bucket.requests + 1], last))

    def _pad_requests(self, bucket: Bucket, tokens: int, requests: int) -> None:
        """Set lengths and ends of the padding rows, which start at `requests`."""
        ours = self._batch
        assert ours is not None
        ends = ours.cu_seqlens_q[requests + 1 : bucket.requests + 1]
        if bucket.kind == "decode" and self.buckets.padding == "null":
            ours.seq_lens[requests : bucket.requests].fill_(1)
            ends.copy_(self._ones[requests + 1 : bucket.requests + 1])
        else:
            ours.seq_lens[requests : bucket.requests].zero_()
            ends.fill_(tokens)


def _like(given: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *given.shape[1:]), dtype=given.dtype, device=given.device)


def _tables(batch: PagedBatch) -> dict[str, Tensor]:
    return {n: getattr(batch, n) for n in ("page_table", "seq_lens", "cu_seqlens_q", "slots", "positions")}


def _described(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} [*, {', '.join(map(str, t.shape[1:]))}] on {t.device}".replace("[*, ]", "[*]")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _at(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.nbytes} bytes at {t.data_ptr():#x}"
