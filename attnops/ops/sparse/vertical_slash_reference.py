"""Reference of vertical-slash attention: which blocks and columns of keys a block of queries
attends to, and that attention.

MInference, https://arxiv.org/abs/2407.02490, section 3.2 and appendix C.4.2: a head attends to some
whole columns of keys (the verticals) and some whole diagonals (the slashes), the latter rounded out
to blocks of 64 queries by 64 keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import Rules, compact, lengths_of, pad, wide, write_results
from attnops.ops.attention.reference import over_requests

if TYPE_CHECKING:
    from attnops.ops.sparse.vertical_slash import VerticalSlashAttention, VerticalSlashIndexes

BLOCK = 64
"""Queries a row of the index serves, and keys of one of its blocks."""


def vertical_slash_indexes(call: VerticalSlashIndexes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of `attnops.ops.vertical_slash_indexes`. Walks the slashes one by one, for all
    rows at once."""
    q_lens, k_lens, vertical, slash = call.q_lens, call.k_lens, call.vertical, call.slash
    batch, heads, slashes = slash.shape
    rows, verticals, device = -(-call.max_seqlen_q // BLOCK), vertical.shape[2], slash.device
    first = torch.arange(rows, device=device) * BLOCK
    # The key at the position of the first query past a row, `[B, 1, R]`; rows without queries have
    # none.
    past = ((k_lens - q_lens).long()[:, None] + first + BLOCK)[:, None]
    real = (first < q_lens[:, None])[:, None]
    end, last, count = torch.zeros((3, batch, heads, rows), dtype=torch.int64, device=device)
    begun = torch.zeros_like(end, dtype=torch.bool)
    offset = torch.zeros((batch, heads, rows, slashes + 1), dtype=torch.int64, device=device)
    column = vertical.long()[:, :, None].expand(batch, heads, rows, verticals)
    covered = torch.zeros_like(column, dtype=torch.bool)
    limit = slashes if call.slash_counts is None else call.slash_counts.long()[None, :, None]
    for nth in range(slashes):
        at = slash[:, :, nth].long()[..., None]
        reach = (past - at).clamp(min=BLOCK)
        seen = real & (at < past) & (nth < limit)
        apart = seen & (~begun | (reach > end + BLOCK))
        joined = seen & ~apart & (reach > end)
        start = torch.where(apart, reach - BLOCK, end)
        new = apart | joined
        end = torch.where(new, start + BLOCK, end)
        last = torch.where(apart, start, last)
        begun = begun | new
        covered = covered | (
            new[..., None] & (column >= start[..., None]) & (column < end[..., None])
        )
        kept = new & (start < k_lens.long()[:, None, None])
        # The last place, which is cut off in the end, takes those that are not kept.
        offset.scatter_(3, torch.where(kept, count, slashes)[..., None], start[..., None])
        count = count + kept
    inside = torch.arange(slashes, device=device) < count[..., None]
    offset = torch.where(inside, offset[..., :slashes], 0)
    own = real[..., None] & ~covered & (column < last[..., None])
    if call.vertical_counts is not None:
        own = own & (
            torch.arange(verticals, device=device)
            < call.vertical_counts.long()[None, :, None, None]
        )
    own_count = own.sum(3)
    # They ascend already, so sorting the others behind them keeps their order.
    ordered = torch.where(own, column, torch.iinfo(torch.int32).max).sort(3).values
    ordered = torch.where(torch.arange(verticals, device=device) < own_count[..., None], ordered, 0)
    block_count, block_offset, column_count, column_index = (
        compact(x.int()) for x in (count, offset, own_count, ordered)
    )
    return block_count, block_offset, column_count, column_index


def vertical_slash_attention(call: VerticalSlashAttention) -> None:
    """The reference of `attnops.ops.vertical_slash_attention`."""
    keys, longest = call.cu_seqlens_k, call.max_seqlen_k
    chosen = _listed(call.block_offset, call.block_count, BLOCK, longest) | _listed(
        call.column_index, call.column_count, 1, longest
    )
    mask = chosen.repeat_interleave(BLOCK, 2)[:, :, : call.max_seqlen_q]
    key, value = (wide(pad(x, keys, longest)) for x in (call.key, call.value))
    found = over_requests(
        call, wide(call.query), key, value, lengths_of(keys), mask, Rules(call.scale, causal=True)
    )
    write_results(call, *found)


def _listed(starts: Tensor, count: Tensor, width: int, keys: int) -> Tensor:
    """bool `[B, H, R, K]`: the keys from each of the first `count` entries on, `width` of them."""
    number = starts.shape[3]
    real = torch.arange(number, device=starts.device) < count[..., None]
    found = torch.zeros((*starts.shape[:3], keys + 1), dtype=torch.bool, device=starts.device)
    for step in range(width):
        at = starts.long() + step
        found.scatter_(3, torch.where(real & (at < keys), at, keys), True)
    return found[..., :keys]
