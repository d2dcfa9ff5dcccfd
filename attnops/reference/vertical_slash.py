"""Reference of vertical-slash attention: which blocks and columns of keys a block of queries attends to, and that attention.

MInference, https://arxiv.org/abs/2407.02490, section 3.2 and appendix C.4.2: a head attends to some whole columns of keys (the
verticals) and some whole diagonals (the slashes), the latter rounded out to blocks of 64 queries by 64 keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference.attention import Rules, attend, compact, wide
from attnops.reference.packed import lengths_of, pad, unpad

BLOCK = 64
"""Queries a row of the index serves, and keys of one of its blocks."""


def vertical_slash_indexes(
    q_lens: Tensor,
    k_lens: Tensor,
    vertical: Tensor,
    slash: Tensor,
    vertical_counts: Tensor | None = None,
    slash_counts: Tensor | None = None,
    *,
    max_seqlen_q: int,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference of the index; see `attnops.ops.vertical_slash_indexes`. Walks the slashes one by one, for all rows at once."""
    batch, heads, slashes = slash.shape
    rows, verticals, device = -(-max_seqlen_q // BLOCK), vertical.shape[2], slash.device
    first = torch.arange(rows, device=device) * BLOCK
    # The key that the first query past a row stands at, `[B, 1, R]`; no key at all for rows without queries.
    past = ((k_lens - q_lens).long()[:, None] + first + BLOCK)[:, None]
    real = (first < q_lens[:, None])[:, None]
    end = torch.zeros((batch, heads, rows), dtype=torch.int64, device=device)
    begun = torch.zeros_like(end, dtype=torch.bool)
    last = torch.zeros_like(end)
    count = torch.zeros_like(end)
    offset = torch.zeros((batch, heads, rows, slashes + 1), dtype=torch.int64, device=device)
    column = vertical.long()[:, :, None].expand(batch, heads, rows, verticals)
    covered = torch.zeros_like(column, dtype=torch.bool)
    limit = slashes if slash_counts is None else slash_counts.long()[None, :, None]
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
        covered = covered | (new[..., None] & (column >= start[..., None]) & (column < end[..., None]))
        kept = new & (start < k_lens.long()[:, None, None])
        # What is not kept goes to the place that is cut off in the end.
        offset.scatter_(3, torch.where(kept, count, slashes)[..., None], start[..., None])
        count = count + kept
    inside = torch.arange(slashes, device=device) < count[..., None]
    offset = torch.where(inside, offset[..., :slashes], 0)
    own = real[..., None] & ~covered & (column < last[..., None])
    if vertical_counts is not None:
        own = own & (torch.arange(verticals, device=device) < vertical_counts.long()[None, :, None, None])
    own_count = own.sum(3)
    # They ascend already, so sorting the others behind them keeps their order.
    ordered = torch.where(own, column, torch.iinfo(torch.int32).max).sort(3).values
    ordered = torch.where(torch.arange(verticals, device=device) < own_count[..., None], ordered, 0)
    block_count, block_offset, column_count, column_index = (compact(x.int()) for x in (count, offset, own_count, ordered))
    return block_count, block_offset, column_count, column_index


def vertical_slash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Reference of the attention; see `attnops.ops.vertical_slash_attention`."""
    ends = lengths_of(cu_seqlens_k)
    here = torch.arange(max_seqlen_k, device=query.device)
    position = torch.arange(max_seqlen_q, device=query.device) + (ends - lengths_of(cu_seqlens_q))[:, None]
    see = (here <= position[..., None]) & (here < ends[:, None, None])
    chosen = _listed(block_offset, block_count, BLOCK, max_seqlen_k) | _listed(column_index, column_count, 1, max_seqlen_k)
    mask = chosen.repeat_interleave(BLOCK, 2)[:, :, :max_seqlen_q]
    out, z = attend(
        wide(pad(query, cu_seqlens_q, max_seqlen_q)),
        wide(pad(key, cu_seqlens_k, max_seqlen_k)),
        wide(pad(value, cu_seqlens_k, max_seqlen_k)),
        see,
        mask,
        None,
        Rules(scale, True, -1, -1, 0.0),
    )
    tokens = query.shape[0]
    output.copy_(unpad(out, cu_seqlens_q, tokens))
    if lse is not None:
        lse.copy_(unpad(z.transpose(1, 2), cu_seqlens_q, tokens, float("-inf")))


def _listed(starts: Tensor, count: Tensor, width: int, keys: int) -> Tensor:
    """bool `[B, H, R, K]`: the keys from each of the first `count` entries on, `width` of them."""
    number = starts.shape[3]
    real = torch.arange(number, device=starts.device) < count[..., None]
    found = torch.zeros((*starts.shape[:3], keys + 1), dtype=torch.bool, device=starts.device)
    for step in range(width):
        at = starts.long() + step
        found.scatter_(3, torch.where(real & (at < keys), at, keys), True)
    return found[..., :keys]
