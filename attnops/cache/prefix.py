"""What a step may say of the tokens its requests had before: in chunks of bounded size, and as pages that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch, PrefixChunk, SharedPrefix
from attnops.ops import cu_seqlens, slot_mapping, token_rows


def prefix_chunks(batch: PagedBatch, before: Sequence[int], most: int, page_size: int) -> tuple[PrefixChunk, ...]:
    """The tokens that the requests of `batch` had before, `before[b]` of them, in the fewest chunks of at most `most` tokens.

    Chunks hold the requests one after the other, each from its first token on, and are of one size but for the last: a long request
    may take several, and one may hold several short requests. No upload and no wait: positions follow from the batch's own tensors.
    """
    total = sum(before)
    if not total:
        return ()
    size = -(-total // -(-total // most))
    ends = cu_seqlens(batch.seq_lens - batch.cu_seqlens_q.diff())
    slots = _slots(batch.page_table, ends, total, page_size)
    found = []
    for start in range(0, total, size):
        stop = min(start + size, total)
        # A copy each, which begins where an allocator aligns it: compiled code copies inputs that do not.
        found.append(PrefixChunk(slots[start:stop].clone(), (ends - start).clamp(0, stop - start), _longest(before, start, stop)))
    return tuple(found)


def _slots(page_table: Tensor, ends: Tensor, total: int, page_size: int) -> Tensor:
    owner = token_rows(ends, total)
    positions = torch.arange(total, device=ends.device) - ends[owner]
    return slot_mapping(positions, owner, page_table, page_size=page_size)


def _longest(before: Sequence[int], start: int, stop: int) -> int:
    """The most tokens of one request among the tokens `start` to `stop` of all."""
    longest = at = 0
    for tokens in before:
        longest = max(longest, min(at + tokens, stop) - max(at, start))
        at += tokens
    return longest


def common_pages(pages: Sequence[Sequence[int]]) -> int:
    """How many pages these lists begin with in common. 0 for a single list, which shares with nobody."""
    first, *others = pages
    found = len(first) if others else 0
    for other in others:
        found = min(found, len(other))
        # Whole lists first, which takes no loop in Python: most are alike, or differ at once.
        if first[:found] != other[:found]:
            found = next(i for i in range(found) if first[i] != other[i])
    return found


def shared_prefix(batch: PagedBatch, pages: int, page_size: int) -> SharedPrefix:
    """The two parts of `batch`: its first `pages` pages, which are whole and the same in all requests, and the rest."""
    table, lengths = batch.page_table, batch.seq_lens
    inside = torch.arange(table.shape[1], device=table.device) < pages
    rest = torch.nn.functional.pad(table[:, pages:], (0, pages))
    total = batch.slots.shape[0]
    return SharedPrefix(
        page_table=torch.where(inside, table[:1], 0),
        seq_lens=torch.full_like(lengths[:1], pages * page_size),
        cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=table.device) * total,
        rest_table=rest,
        rest_lens=lengths - pages * page_size,
    )
