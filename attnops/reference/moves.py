"""Reference movement of rows: a copy between slots of all layers, ragged queries to a rectangle and back. Plain torch ops."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference import packed
from attnops.reference.attention import compact
from attnops.reference.data import store
from attnops.reference.packed import rows_of


def copy_kv(k_pages: Tensor, v_pages: Tensor | None, source: Tensor, target: Tensor, *, policy: str = "") -> None:
    """KV copy reference; see `attnops.ops.copy_kv`. What is read is a tensor of its own before anything is written."""
    total = k_pages.shape[1] * k_pages.shape[2]
    slots = torch.where((source < 0) | (source >= total), -1, target.long())
    at = source.long().clamp(0, max(total - 1, 0))
    for pages in (k_pages, v_pages):
        if pages is None or source.shape[0] == 0 or pages.numel() == 0:
            continue
        by_slot = _bits(pages).movedim(0, 2)
        page = by_slot.shape[1]
        store(by_slot, by_slot[at // page, at % page], slots)


def pad_queries(query: Tensor, cu_seqlens_q: Tensor, *, max_seqlen_q: int, policy: str = "") -> Tensor:
    """`[B, max_seqlen_q, H, D]`; see `attnops.ops.pad_queries`."""
    return compact(packed.pad(_bits(query), cu_seqlens_q, max_seqlen_q, cut=True)).view(query.dtype)


def unpad_queries(padded: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int, policy: str = "") -> Tensor:
    """`[num_tokens, H, D]`; see `attnops.ops.unpad_queries`."""
    rows, bits = rows_of(cu_seqlens_q, num_tokens), _bits(padded)
    batch, width = bits.shape[0], bits.shape[1]
    if batch == 0 or width == 0:
        return bits.new_zeros((num_tokens, *bits.shape[2:])).view(padded.dtype)
    row = torch.where(rows < batch, rows, 0)
    column = torch.arange(num_tokens, device=bits.device) - cu_seqlens_q.long()[row]
    real = (rows < batch) & (column < width)
    out = bits[row, torch.where(real, column, 0)]
    return compact(torch.where(real[:, None, None], out, torch.zeros((), dtype=out.dtype, device=out.device))).view(padded.dtype)


def _bits(x: Tensor) -> Tensor:
    """Few torch ops know float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x
