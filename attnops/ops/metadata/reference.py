"""References of the metadata ops: where tokens and pages are. All are plain, capturable torch
ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import compact, named, rows_of

if TYPE_CHECKING:
    from attnops.ops.metadata.record import (
        CuSeqlens,
        DecodeRows,
        KVIndices,
        NamedPages,
        RequestStarts,
        SlotMapping,
        TokenRows,
    )


def cu_seqlens(call: CuSeqlens) -> Tensor:
    """`[B + 1]` int32."""
    total = torch.cumsum(call.lengths, 0, dtype=torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32, device=total.device), total])


def request_starts(call: RequestStarts) -> Tensor:
    """`[N + 1]` int32. It waits for the device."""
    places = call.begins.flatten()[1:].nonzero()[:, 0] + 1
    ends = 2 if places.shape[0] + 2 == call.begins.shape[1] else 1
    return torch.cat(
        [places.new_zeros(1), places, places.new_full((ends,), call.begins.numel())]
    ).to(torch.int32)


def token_rows(call: TokenRows) -> Tensor:
    """`[T]` int32."""
    rows = rows_of(call.cu_seqlens, call.num_tokens)
    return torch.where(rows < call.cu_seqlens.shape[0] - 1, rows, -1).to(torch.int32)


def slot_mapping(call: SlotMapping) -> Tensor:
    """`[T]` int64."""
    page_table, page_size, at, rows = (
        call.page_table,
        call.page_size,
        call.positions.long(),
        call.rows,
    )
    if page_table.numel() == 0:
        return torch.full(at.shape, -1, dtype=torch.int64, device=at.device)
    column = torch.div(at, page_size, rounding_mode="floor")
    real = (at >= 0) & (rows >= 0) & (column < page_table.shape[1])
    page = page_table[torch.where(real, rows.long(), 0), torch.where(real, column, 0)].long()
    return compact(torch.where(real & (page >= 0), page * page_size + at % page_size, -1))


def kv_indices(call: KVIndices) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * M]`, last_page_len `[B]`), all int32."""
    return indices_of(call.page_table, call.seq_lens, call.page_size)


def indices_of(
    page_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, of these tensors."""
    batch, width = page_table.shape
    lens = seq_lens.long()
    counts = torch.div(lens + page_size - 1, page_size, rounding_mode="floor")
    indptr = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device=lens.device), torch.cumsum(counts, 0)]
    )
    last = compact(torch.where(lens > 0, (lens - 1) % page_size + 1, 0))
    if page_table.numel() == 0:
        return (
            indptr.to(torch.int32),
            page_table.new_zeros(batch * width, dtype=torch.int32),
            last.to(torch.int32),
        )
    at = torch.arange(batch * width, device=lens.device)
    row = torch.searchsorted(indptr[1:] - 1, at)  # as in rows_of
    real = row < batch
    safe = torch.where(real, row, 0)
    column = torch.where(real, at - indptr[safe], 0).clamp(0, width - 1)
    indices = torch.where(real, page_table[safe, column], 0).to(torch.int32)
    return indptr.to(torch.int32), indices, last.to(torch.int32)


def decode_rows(call: DecodeRows) -> Tensor:
    """`[rows_schedule_words(T, q_heads, float8) + T * (1 + M)]` int32: zeros, `by_token`'s lengths
    and rows, end to end."""
    batch, width = call.page_table.shape
    schedule = rows_schedule_words(call.num_tokens, call.q_heads, call.float8)
    if batch == 0:
        return call.seq_lens.new_zeros(schedule + call.num_tokens * (1 + width))
    table, lengths = by_token(call)
    return torch.cat(
        [*([lengths.new_zeros(schedule)] if call.q_heads else []), lengths, table.flatten()]
    )


PART_WORDS, PART_HEADS, MOST_SMS = 8, 64, 144
"""FlashMLA's schedule: the words of one part, how many heads a block of a part takes, and the
multiprocessors of a whole SM90 die."""


def rows_schedule_parts(q_heads: int, float8: bool) -> int:
    """Parts that a schedule in `decode_rows`'s plan has room for: one a multiprocessor and block of
    heads, whatever GPU of SM90 it is.

    float8 has one more, which stays empty, so that a plan's length tells the dtype it was made for.
    """
    return max(MOST_SMS // -(-q_heads // PART_HEADS), 1) + float8 if q_heads else 0


def rows_schedule_words(tokens: int, q_heads: int, float8: bool) -> int:
    """The words of that schedule: its parts, then the first split of each token and their
    number."""
    return PART_WORDS * rows_schedule_parts(q_heads, float8) + tokens + 1 if q_heads else 0


def by_token(call: DecodeRows) -> tuple[Tensor, Tensor]:
    """(page table `[T, M]`, keys seen `[T]`), both int32, of each token: its request's row; 0 keys
    for padding. B is at least 1.

    Token i of n of a request with L keys sees the first L - n + i + 1, or L when not causal.
    Negative page ids, which the table may hold past a request's end, become page 0: kernels
    prefetch them.
    """
    starts, tokens, batch = call.cu_seqlens_q, call.num_tokens, call.seq_lens.shape[0]
    # Symbolic sizes are a compiler's, which fuses the comparison with its users and never stores
    # it.
    few = not (isinstance(tokens, int) and isinstance(batch, int)) or tokens * batch <= FEW_PAIRS
    at = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    rows = (starts[1:] <= at[:, None]).sum(1) if few else rows_of(starts, tokens)
    real = rows < batch
    rows = rows.clamp(max=batch - 1)
    lengths = call.seq_lens[rows]
    if call.causal:
        lengths = (lengths - (starts[rows + 1] - 1 - at)).clamp(min=0)
    return call.page_table[rows].clamp(min=0), torch.where(real, lengths, 0)


FEW_PAIRS = 1 << 20
"""Of tokens and requests: up to here, where nothing is fused, comparing them all takes less than a
search's launches."""


UNKNOWN = 2**31 - 1
"""Pages of a pool whose size is not given: only negative ids are holes of it."""


def named_pages(call: NamedPages) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.ops.named_pages`."""
    return named(call, call.num_pages, call.page_size, call.squeeze, call.window_left)
