"""A step of a model as its layers see it: which tokens it stores and where, which of a window are
before it, and which keys the nodes of a tree see."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.cache.batch import PagedBatch
from attnops.cache.step import Tokens
from attnops.hf.cache.model_pages import ModelPages, Past
from attnops.ops import slot_mapping, tree_mask


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


def apart(
    pages: ModelPages, before: Tensor, real: Tensor | None, count: int, parents: Tensor | None
) -> PagedBatch:
    """As `described`, with each token as a request of its own, whose keys are those that a step of
    one token sees, in their order. So a deterministic policy gives it the bits of that step.

    parents: int32 `[B, N]`, as in `tree_mask`; None: each token follows the one before it. With
    parents the page tables name single tokens, see `single`.
    """
    rows, device = before.shape[0], before.device
    way = None if parents is None else _ways(parents)
    nodes = torch.arange(count, device=device)
    depths = nodes.expand(rows, count) if way is None else way[1]
    positions = before[:, None] + nodes
    if real is not None:
        positions = torch.where(real[:, None], positions, -1)
    owner = torch.arange(rows, device=device)[:, None].expand(rows, count).reshape(-1)
    each = torch.arange(rows * count + 1, dtype=torch.int32, device=device)
    lengths = (before[:, None] + depths + 1).reshape(-1).to(torch.int32)
    batch = pages.describe(Tokens(positions.reshape(-1), each[:-1], each, 1), owner, lengths)
    if way is None:
        return batch
    found = (_by_token(own, pages.page_size, *way) for own in (batch, *batch.others))
    first, *others = found
    return replace(first, others=tuple(others))


def _ways(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 `[B, N, N]`, the nodes on the way to each node, in order, and any behind it; int64
    `[B, N]`, its depth)."""
    rows, count = parents.shape
    nodes = torch.arange(count, device=parents.device)
    whole = torch.full((rows,), count, dtype=torch.int32, device=parents.device)
    seen = tree_mask(parents, whole, num_keys=count).view(rows, count, count)
    ways = torch.where(seen, nodes, count).sort(2).values
    return ways.clamp(max=count - 1), seen.sum(2) - 1


def _by_token(own: PagedBatch, page_size: int, ways: Tensor, depths: Tensor) -> PagedBatch:
    """The batch of one page table, which names single tokens: those of the text, and behind them
    the nodes on the way to each node."""
    places = torch.arange(page_size, dtype=torch.int32, device=ways.device)
    text = (own.page_table[:, :, None] * page_size + places).flatten(1)
    columns = text.shape[1]
    # Nodes before a window, and behind the table, go to a column that is left out.
    table = pad(text, (0, 1))
    first = own.seq_lens - 1 - depths.flatten()
    at = first[:, None] + torch.arange(ways.shape[2], device=ways.device)
    at = torch.where((at < 0) | (at > columns), columns, at)
    nodes = own.slots.view(depths.shape)[:, None].expand(ways.shape).gather(2, ways)
    table.scatter_(1, at, nodes.clamp(min=0).flatten(0, 1).to(torch.int32))
    return replace(own, page_table=table[:, :columns])


def single(pages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The pages of a layer as pages of one token each."""
    return tuple(each.flatten(0, 1).unsqueeze(1) for each in pages)


def windows_before(pages: ModelPages, before: Tensor, long: bool) -> tuple[Past | None, ...]:
    """Of each page table the tokens before a step, where that is too long for a window."""
    return tuple(
        _past(pages, before, table) if window and long else None
        for table, window in enumerate(pages.windows)
    )


def _past(pages: ModelPages, before: Tensor, table: int) -> Past:
    """The window's tokens of a page table that precede a step. before: as in `ModelPages.step`."""
    window, rows = pages.windows[table], pages.tables[table][: before.shape[0]]
    last = before[:, None] + torch.arange(1 - window, 0, device=before.device)
    owner = torch.arange(before.shape[0], device=before.device)[:, None].expand_as(last)
    at = last.clamp(min=0) % (rows.shape[1] * pages.page_size)
    slots = slot_mapping(at.reshape(-1), owner.reshape(-1), rows, page_size=pages.page_size)
    return slots, (window - 1 - before).clamp(min=0)


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
