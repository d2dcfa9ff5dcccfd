"""Reference movement of rows: a copy between slots of all layers, ragged queries to a rectangle and back. Plain torch ops."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference.data import store


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


def _bits(x: Tensor) -> Tensor:
    """Few torch ops know float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x
