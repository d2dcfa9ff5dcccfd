"""A step of a model as its layers see it: which tokens it stores and where, which of a window are
before it, and which keys the nodes of a tree see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.step import Tokens
from attnops.hf.cache.model_pages import ModelPages, Past
from attnops.ops import tree_mask


def described(
    pages: ModelPages,
    before: Tensor,
    real: Tensor | None,
    count: int,
    heads: int,
    planned: bool = False,
) -> PagedBatch:
    """The batch of a step of `count` tokens of each row, see `ModelPages.step`. real: bool `[B]`,
    is the row stored? None: all are."""
    rows, device = before.shape[0], before.device
    positions = (before[:, None] + torch.arange(count, device=device)).reshape(-1)
    if real is not None:
        each = real if count == 1 else real[:, None].expand(rows, count).reshape(-1)
        positions = torch.where(each, positions, -1)
    owner = torch.arange(rows, device=device)[:, None].expand(rows, count).reshape(-1)
    cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
    return pages.step(Tokens(positions, owner, cu_seqlens_q, count), before, heads, planned)


def windows_before(pages: ModelPages, before: Tensor, long: bool) -> tuple[Past | None, ...]:
    """Of each page table the tokens before a step, where that is too long for a window."""
    return tuple(
        pages.past(before, table) if window and long else None
        for table, window in enumerate(pages.windows)
    )


Masks = dict[tuple[int, int], Tensor]
"""By the number of a page table and the tokens that a query of a layer sees, 0: all: bool
`[B * N, M * page_size]`, the keys that the nodes of a step see."""


class Tree(NamedTuple):
    """What the nodes of a step see in one layer: the mask, for its window `sees`, see `Masks`."""

    mask: Tensor
    sees: int


def tree_masks(pages: ModelPages, batch: PagedBatch, parents: Tensor) -> Masks:
    """The masks of the layers. parents: int32 `[B, N]`, as in `tree_mask`."""
    found: Masks = {}
    for number, table in enumerate(pages.table_of):
        own, window = batch.of(table), _seen_by(pages, number)
        if (table, window) not in found:
            keys = own.page_table.shape[1] * pages.page_size
            found[table, window] = tree_mask(parents, own.seq_lens, num_keys=keys, window=window)
    return found


def tree_of(pages: ModelPages, masks: Masks, number: int) -> Tree:
    """That of a layer with pages."""
    window = _seen_by(pages, number)
    return Tree(masks[pages.table_of[number], window], window)


def _seen_by(pages: ModelPages, number: int) -> int:
    """Tokens that a query of a layer with pages sees, its own included; 0: all. Its page table has
    no window where the pages hold the whole text."""
    left: int = pages.sizes.layers[number].rules.window[0]
    return left + 1
