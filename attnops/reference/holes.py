"""Page tables with holes: entries within a request's length that are no page of the pool. Defines the result of attention over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attnops.call import changed
from attnops.reference.attention import Rules

if TYPE_CHECKING:
    from attnops.ops.metadata import NamedPages
    from attnops.ops.mla import MlaAttention
    from attnops.ops.paged import PagedAttention

UNKNOWN = 2**31 - 1
"""Pages of a pool whose size is not given: only negative ids are holes of it."""


def named_pages(call: NamedPages) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.ops.named_pages`."""
    return _named(call, call.num_pages, call.page_size, call.squeeze, call.window_left)


PagesT = TypeVar("PagesT", "PagedAttention", "MlaAttention")


def without_holes(call: PagesT, pages: Tensor) -> PagesT:
    """The call with the table and the lengths that `named_pages` gives, unless it promises that there are no holes."""
    if not call.holes:
        return call
    table, lengths = _named(call, pages.shape[0], pages.shape[1], **how(Rules.of(call), call.mask))
    return changed(call, page_table=table, seq_lens=lengths, holes=False)


def _named(
    call: NamedPages | PagedAttention | MlaAttention, num_pages: int, page_size: int, squeeze: bool, window_left: int
) -> tuple[Tensor, Tensor]:
    page_table, seq_lens, cu_seqlens_q = call.page_table, call.seq_lens, call.cu_seqlens_q
    if page_table.numel() == 0:
        return page_table.clone(memory_format=torch.contiguous_format), seq_lens.clone(memory_format=torch.contiguous_format)
    column = torch.arange(page_table.shape[1], dtype=torch.int32, device=page_table.device)
    lens, new = seq_lens[:, None], (cu_seqlens_q[1:] - cu_seqlens_q[:-1])[:, None]
    first = column * page_size
    used, is_page = first < lens, (page_table >= 0) & (page_table < num_pages)
    kept, hole = used & is_page, used & ~is_page
    own = torch.where(kept.any(1, keepdim=True), page_table.gather(1, kept.int().argmax(1, keepdim=True)), 0)
    if squeeze:
        # Pages before the new tokens move with them; a single new token sees all keys, in any order.
        harm = hole & (first + page_size > lens - new) & (new > 1)
        moved = page_table.gather(1, torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices)
        table = torch.where(column < kept.sum(1, keepdim=True), moved, own)
        lengths = seq_lens - torch.where(hole, (lens - first).clamp(max=page_size), 0).sum(1)
    else:
        harm = hole & (first + page_size > lens - new - window_left) if window_left >= 0 else hole
        table, lengths = torch.where(kept, page_table, own), seq_lens
    lengths = torch.where(harm.any(1), 0, lengths)
    # A length past the table is not for this function to judge.
    beyond = seq_lens > page_table.shape[1] * page_size
    return table.to(torch.int32).contiguous(), torch.where(beyond, seq_lens, lengths).to(torch.int32)


def how(rules: Rules, mask: Tensor | None) -> dict[str, Any]:
    """`squeeze` and `window_left` of a call with these rules: keys may move only where their order alone counts."""
    ruled = rules.left >= 0 or (rules.right >= 0 and not rules.causal) or rules.chunk > 0 or mask is not None
    return {"squeeze": not ruled, "window_left": rules.left}
