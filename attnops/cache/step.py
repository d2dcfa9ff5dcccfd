"""Descriptions of a step: where its tokens go, which pages they see, and which cached tokens
precede them. Tensor code without waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch, PrefixChunk, SharedPrefix
from attnops.ops import cu_seqlens, slot_mapping, token_rows


class Tokens(NamedTuple):
    """The T new tokens of B requests, packed one request after the other.

    positions: int64 `[T]`, that of each token in its request; negative for padding, which is not
    stored.
    rows: int64 `[T]`, the request of each token.
    cu_seqlens_q: int32 `[B + 1]`; request b brings tokens `cu[b]:cu[b + 1]`.
    longest: the most tokens of one request.
    """

    positions: Tensor
    rows: Tensor
    cu_seqlens_q: Tensor
    longest: int


def describe(
    tokens: Tokens,
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    window: int = 0,
    most: int = 0,
    workspace: Tensor | None = None,
) -> PagedBatch:
    """The step as the layers of one page table see it.

    With a window, page i of a request is in column `i % M`. The batch's own table begins at the
    first page that is still visible, and its lengths count from there: attention with a window
    depends on distances only.

    table: int32 `[B, M]`, the requests' rows of the page table.
    lengths: int32 `[B]`, tokens of each request, the new ones included.
    window: tokens a query sees, its own included; 0: all of them.
    most: new tokens of a request for which the table has room beside the window. Of a longer step
    only the last tokens get a slot.
    """
    at = tokens.positions
    if window:
        columns = table.shape[1]
        room = columns * page_size
        at = torch.where(at < 0, at, at % room)
        if tokens.longest > most:
            late = tokens.positions >= (lengths - room)[tokens.rows]
            at = torch.where(late, at, -1)
    slots = slot_mapping(
        at, tokens.rows, table, page_size=page_size
    )  # a negative position gives no slot
    if window:
        before = lengths - tokens.cu_seqlens_q.diff()
        first = (before - (window - 1)).clamp(min=0) // page_size
        visible = (first[:, None] + torch.arange(columns, device=first.device)) % columns
        table, lengths = table.gather(1, visible), lengths - first * page_size
    return PagedBatch(
        table,
        lengths,
        tokens.cu_seqlens_q,
        slots,
        tokens.positions,
        tokens.longest,
        padded=False,
        holes=False,
        workspace=workspace,
    )


def prefix_chunks(
    batch: PagedBatch, before: Sequence[int], most: int, page_size: int
) -> tuple[PrefixChunk, ...]:
    """The `before[b]` cached tokens of each request of `batch`, in the fewest chunks of at most
    `most` tokens.

    Chunks hold the requests one after the other, each from its first token on, and have one size
    but for the last: a long request may take several chunks, and a chunk may hold several short
    requests.
    """
    total = sum(before)
    if not total:
        return ()
    size = -(-total // -(-total // most))
    ends = cu_seqlens(batch.seq_lens - batch.cu_seqlens_q.diff())
    owner = token_rows(ends, total)
    slots = slot_mapping(
        torch.arange(total, device=ends.device) - ends[owner],
        owner,
        batch.page_table,
        page_size=page_size,
    )
    found = []
    for start in range(0, total, size):
        stop = min(start + size, total)
        longest = max(
            min(at + n, stop) - max(at, start)
            for at, n in zip(accumulate(before, initial=0), before, strict=False)
        )
        # Each slice is copied to an aligned address: compiled code copies inputs that are not.
        found.append(
            PrefixChunk(slots[start:stop].clone(), (ends - start).clamp(0, stop - start), longest)
        )
    return tuple(found)


def common_pages(pages: Sequence[list[int]]) -> int:
    """The number of pages that these lists have in common at their start. 0 for a single list."""
    # The prefix of the least and the greatest list is that of all.
    first, last = min(pages), max(pages)
    if first == last:  # mostly so, and no loop in Python
        return len(first) if len(pages) > 1 else 0
    differs = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differs, min(len(first), len(last)))


def shared_prefix(batch: PagedBatch, pages: int, page_size: int) -> SharedPrefix:
    """The two parts of `batch`: its first `pages` pages, which are whole and the same in all
    requests, and the rest."""
    table, lengths = batch.page_table, batch.seq_lens
    inside = torch.arange(table.shape[1], device=table.device) < pages
    return SharedPrefix(
        page_table=torch.where(inside, table[:1], 0),
        seq_lens=torch.full_like(lengths[:1], pages * page_size),
        cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=table.device) * batch.slots.shape[0],
        rest_table=torch.nn.functional.pad(table[:, pages:], (0, pages)),
        rest_lens=lengths - pages * page_size,
    )
