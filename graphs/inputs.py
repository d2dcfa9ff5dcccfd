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
        return {n: v for n, v in values.items() if n not in (self.batch, *self.tokens, *self.requests)}


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
        self.roles, self.buckets, self.width = roles, buckets, width
        most_tokens, most_requests = buckets.most
        with ordinary():
            self._rows: dict[str, Tensor] = {}
            for names, most in ((roles.tokens, most_tokens), (roles.requests, most_requests)):
                for name in names:
                    given = rows_of(name, values)
                    self._rows[name] = torch.zeros((most, *given.shape[1:]), dtype=given.dtype, device=given.device)
            self._batch = None if roles.batch is None else self._empty_batch(values[roles.batch], most_tokens, most_requests)

    def _empty_batch(self, given: PagedBatch, tokens: int, requests: int) -> PagedBatch:
        device, self.width = given.page_table.device, max(self.width, given.page_table.shape[1])
        self._ones = torch.arange(requests + 1, dtype=torch.int32, device=device)
        return PagedBatch(
            page_table=torch.zeros((requests, self.width), dtype=torch.int32, device=device),
            seq_lens=torch.zeros(requests, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            max_seqlen_q=0, holes=given.holes, workspace=given.workspace,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        b = self._batch
        tables = () if b is None else (b.page_table, b.seq_lens, b.cu_seqlens_q, b.slots, b.positions)
        return sum(t.nbytes for t in (*self._rows.values(), *tables))

    def of(self, bucket: Bucket) -> Values:
        """The bucket's rows of every buffer, the batch among them."""
        tokens, requests = bucket.tokens, bucket.requests
        found: Values = {n: b[: tokens if n in self.roles.tokens else requests] for n, b in self._rows.items()}
        if (whole := self._batch) is not None and self.roles.batch is not None:
            found[self.roles.batch] = replace(
                whole, page_table=whole.page_table[:requests], seq_lens=whole.seq_lens[:requests],
                cu_seqlens_q=whole.cu_seqlens_q[: requests + 1], slots=whole.slots[:tokens], positions=whole.positions[:tokens],
                max_seqlen_q=bucket.queries, padded=not self._null(bucket),
            )  # fmt: skip
        return found

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise StaleGraph where a tensor differs in dtype, device or row shape from the captured one."""
        for name, own in self._rows.items():
            given = rows_of(name, values)
            if given.dtype is not own.dtype or given.device != own.device or given.shape[1:] != own.shape[1:]:
                fail(StaleGraph, name, _described(given), _described(own))
        if (ours := self._batch) is not None and self.roles.batch is not None:
            batch: PagedBatch = values[self.roles.batch]
            table, scratch = batch.page_table, batch.workspace
            if table.size(1) > self.width:
                fail(StaleGraph, f"{self.roles.batch}.page_table", f"{table.size(1)} columns", f"at most {self.width}")
            if table.device != ours.page_table.device:
                fail(StaleGraph, f"{self.roles.batch}.page_table", table.device, ours.page_table.device)
            if batch.holes and not ours.holes:
                fail(StaleGraph, f"{self.roles.batch}.holes", True, False)
            if scratch is not ours.workspace and (got := _at(scratch)) != (want := _at(ours.workspace)):
                fail(StaleGraph, f"{self.roles.batch}.workspace", got, want)

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
            pairs += self._load(bucket, self._batch, values[self.roles.batch], tokens, requests)
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
        if (batch := self._batch) is not None:
            for table in (batch.page_table, batch.seq_lens, batch.cu_seqlens_q, batch.positions):
                table.zero_()
            batch.slots.fill_(-1)
            self._pad_requests(bucket, batch, 0, 0)

    def _null(self, bucket: Bucket) -> bool:
        """Are padding rows requests of one token that reads the null page?"""
        return bucket.kind == "decode" and self.buckets.padding == "null"

    def _load(self, bucket: Bucket, ours: PagedBatch, batch: PagedBatch, tokens: int, requests: int) -> list[tuple[Tensor, Tensor]]:
        """Write the batch's padding rows. Returns the buffers of its other rows, each with the tensor to copy."""
        if self._null(bucket) and (batch.padded or tokens != requests):
            fail(InvalidInput, "batch", "tokens of no request", "one token a request and padded=False, which padding='null' requires")
        width = batch.page_table.shape[1]
        pairs = [
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
            self._pad_requests(bucket, ours, tokens, requests)
            if batch.padded:
                # Only the device knows the number of tokens that belong to requests.
                last = batch.cu_seqlens_q[-1:].expand(bucket.requests - requests)
                pairs.append((ours.cu_seqlens_q[requests + 1 : bucket.requests + 1], last))
        return pairs

    def _pad_requests(self, bucket: Bucket, ours: PagedBatch, tokens: int, requests: int) -> None:
        """Set lengths and ends of the padding rows, which start at `requests`."""
        ends = ours.cu_seqlens_q[requests + 1 : bucket.requests + 1]
        ours.seq_lens[requests : bucket.requests].fill_(int(self._null(bucket)))
        if self._null(bucket):
            ends.copy_(self._ones[requests + 1 : bucket.requests + 1])
        else:
            ends.fill_(tokens)


def _described(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} [*, {', '.join(map(str, t.shape[1:]))}] on {t.device}".replace("[*, ]", "[*]")


def _at(t: Tensor | None) -> str:
    return "None" if t is None else f"{t.nbytes} bytes at {t.data_ptr():#x}"
