"""Page tables with holes: entries within a request's length that are no page of the pool. Defines what attention over them is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNKNOWN = 2**31 - 1
"""Pages of a pool whose size is not given: only negative ids are holes of it."""


def named_pages(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_pages: int,
    page_size: int,
    squeeze: bool = True,
    window_left: int = -1,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """(page table `[B, M]`, lengths `[B]`) without holes; see `attnops.ops.named_pages`."""
    if page_table.numel() == 0:
        return page_table.clone(memory_format=torch.contiguous_format), seq_lens.clone(memory_format=torch.contiguous_format)
    column = torch.arange(page_table.shape[1], dtype=torch.int32, device=page_table.device)
    lens, new = seq_lens[:, None], (cu_seqlens_q[1:] - cu_seqlens_q[:-1])[:, None]
    first = column * page_size
    used, is_page = first < lens, (page_table >= 0) & (page_table < num_pages)
    kept, hole = used & is_page, used & ~is_page
    own = torch.where(kept.any(1, keepdim=True), page_table.gather(1, kept.int().argmax(1, keepdim=True)), 0)
    if squeeze:
        # What lies before the new tokens moves with them; a single one sees all keys wherever they are.
        harm = hole & (first + page_size > lens - new) & (new > 1)
        moved = page_table.gather(1, torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices)
        table = torch.where(column < kept.sum(1, keepdim=True), moved, own)
        lengths = seq_lens - torch.where(hole, (lens - first).clamp(max=page_size), 0).sum(1)
    else:
        harm = hole & (first + page_size > lens - new - window_left) if window_left >= 0 else hole
        table, lengths = torch.where(kept, page_table, own), seq_lens
    lengths = torch.where(harm.any(1), 0, lengths)
    # What a length past the table means is for others to say.
    beyond = seq_lens > page_table.shape[1] * page_size
    return table.to(torch.int32).contiguous(), torch.where(beyond, seq_lens, lengths).to(torch.int32)


def how(
    *,
    mask: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """`squeeze` and `window_left` of a call with these arguments: keys may move where only their order counts."""
    ruled = window_left >= 0 or (window_right >= 0 and not causal) or attention_chunk > 0 or mask is not None
    return {"squeeze": not ruled, "window_left": window_left}
