"""`Part`: a chunk of the packed tokens of a prompt, and the tensors of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.cache.batch import PagedBatch
from attnops.cache.step import Tokens
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.paged_cache import Behind
from attnops.ops import slot_mapping


class Part(NamedTuple):
    """A chunk of the packed tokens. begin, end: of its tokens. counts, before: by request, its
    tokens here and those before them.

    ends: the requests that end here. last: the place of the last token of each in the chunk.
    farthest: has it one token more, which is not stored, see `chunk_of`?
    """

    begin: int
    end: int
    counts: list[int]
    before: list[int]
    ends: list[int]
    last: list[int]
    farthest: bool = False

    @property
    def size(self) -> int:
        """Its tokens."""
        return self.end - self.begin + self.farthest

    @property
    def fresh(self) -> bool:
        """Are its tokens the first of their requests?"""
        return not any(n and b for n, b in zip(self.counts, self.before, strict=True))


def parts_of(
    counts: Sequence[int], before: Sequence[int], most: int, of_length: bool = False
) -> list[Part]:
    """Chunks of at most `most` tokens: whole requests, or equal parts of one that is longer.
    of_length: each of several chunks tells its layers the longest position of all."""
    farthest = of_length and sum(counts) > most
    most -= farthest
    found: list[Part] = []
    begin = 0
    for row, n in enumerate(counts):
        pieces = -(-n // most)
        for i in range(pieces):
            first, stop = n * i // pieces, n * (i + 1) // pieces
            size, end = stop - first, begin + stop - first
            joins = (
                found
                and pieces == 1
                and end - found[-1].begin <= most
                and not _is_part(found[-1], counts)
            )
            if not joins:
                found.append(Part(begin, begin, [0] * len(counts), list(before), [], [], farthest))
            part = found[-1]
            part.counts[row], part.before[row] = size, before[row] + first
            if stop == n:
                part.ends.append(row)
                part.last.append(end - part.begin - 1)
            found[-1], begin = part._replace(end=end), end
    return found


def _is_part(part: Part, counts: Sequence[int]) -> bool:
    return any(0 < here < n for here, n in zip(part.counts, counts, strict=True))


def why_unpacked(counts: Sequence[int], padded: bool, compiled: bool) -> str:
    """Why these tokens of each row are not packed; "" where they are. padded: without positions.
    compiled: by layers whose code takes any number of tokens, but one."""
    if min(counts) < 1:
        return "a row has no token"
    if compiled and sum(counts) == 1:
        return "it is one token"
    return "padding, and no positions" if padded else ""


def unpadded(ids: Tensor, positions: Tensor, counts: Sequence[int]) -> Tensor:
    """int64 `[2, T]`, the tokens of all rows without padding, one row after the other, and their
    positions.

    ids: `[B, S]`. positions: as large, or for all rows. counts: the last tokens of each row that
    are no padding.
    """
    rows, columns = ids.shape
    both = torch.stack([ids, positions.expand(rows, columns)]).view(2, -1)
    if sum(counts) == both.shape[1]:
        return both
    kept = [
        torch.arange((row + 1) * columns - n, (row + 1) * columns) for row, n in enumerate(counts)
    ]
    return both[:, torch.cat(kept).to(ids.device)]


def chunk_of(part: Part, tokens: Tensor) -> Tensor:
    """int64 `[2, T]`, the tokens of a chunk, and their positions. tokens: of `unpadded`.

    Rotations may follow from the longest position of a call (longrope): it is that of a token
    behind those of the requests, as padding is.
    """
    whole = part.end - part.begin == tokens.shape[1]
    chunk = tokens if whole else tokens[:, part.begin : part.end]
    return torch.cat([chunk, tokens.amax(1, keepdim=True)], 1) if part.farthest else chunk


def packed(pages: ModelPages, counts: Tensor, before: Tensor, total: int) -> PagedBatch:
    """The batch of `total` tokens: those of all requests, one after the other, and of one request
    more that is not stored. Over pages, that one reads the null page.

    counts, before: int64 `[B]`, the new tokens of each request, and those in its pages.
    """
    at, ends = torch.arange(total, device=counts.device), counts.cumsum(0)
    owner = torch.searchsorted(ends, at, right=True)
    real, row = owner < counts.shape[0], owner.clamp(max=counts.shape[0] - 1)
    own = torch.where(real, before[row] + at - (ends - counts)[row], -1)
    starts = pad(ends, (1, 0)).to(torch.int32)
    batch = pages.describe(
        Tokens(own, row, starts, total), counts.shape[0], (before + counts).to(torch.int32)
    )

    def with_rest(each: PagedBatch) -> PagedBatch:
        room = each.page_table.shape[1] * pages.page_size
        rest = (total - starts[-1:]).clamp(max=room)
        return replace(
            each,
            page_table=pad(each.page_table, (0, 0, 0, 1)),
            seq_lens=torch.cat([each.seq_lens, rest]),
            cu_seqlens_q=pad(starts, (0, 1), value=total),
            others=tuple(map(with_rest, each.others)),
        )

    return with_rest(batch)


def windows_behind(
    pages: ModelPages, counts: Tensor, before: Tensor, total: int
) -> tuple[Behind | None, ...]:
    """Of each page table with a window what the tokens of a chunk are behind. Arguments as in
    `packed`."""
    return tuple(
        _window_behind(pages, table, counts, before, total) if window else None
        for table, window in enumerate(pages.windows)
    )


def _window_behind(
    pages: ModelPages, table: int, counts: Tensor, before: Tensor, total: int
) -> Behind:
    most, page_table, device = pages.windows[table] - 1, pages.tables[table], counts.device
    rows, ends = counts.shape[0], counts.cumsum(0)
    copied = torch.where(counts > 0, before.clamp(max=most), 0)
    shift = copied.cumsum(0)
    token = torch.arange(total, device=device)
    # Padding comes last, and is behind nothing.
    request = torch.searchsorted(ends, token, right=True).clamp(max=rows - 1)
    stops = torch.cat([ends + shift, total + shift[-1:]])
    key = torch.arange(rows * most + total, device=device)
    owner = torch.searchsorted(stops[:-1], key, right=True)
    row = owner.clamp(max=rows - 1)
    at = key - (stops[:-1] - counts)[row]  # from the first new token on
    is_old = (owner < rows) & (at < 0)
    room = page_table.shape[1] * pages.page_size
    position = torch.where(is_old, (before[row] + at) % room, -1)
    slots = slot_mapping(position, row, page_table, page_size=pages.page_size)
    starts = pad(stops, (1, 0)).to(torch.int32)
    return Behind(slots.clamp(min=0), token + shift[request], starts, most)


def too_early(after: int) -> str:
    """Why a size is not captured before so many chunks of it ran."""
    few = "no prompt" if after == 1 else f"fewer than {after} prompts"
    return f"{few} of its size ran over these pages before"
