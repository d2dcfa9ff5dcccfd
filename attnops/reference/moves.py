"""Reference movement of rows: a copy between slots of all layers, ragged queries to a rectangle and back. Plain torch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.reference.data import store

if TYPE_CHECKING:
    from attnops.ops.moves import CopyKV


def copy_kv(call: CopyKV) -> None:
    """The reference of `attnops.ops.copy_kv`. It reads all rows into a tensor of their own before it writes the first."""
    source, total = call.source, call.k_pages.shape[1] * call.k_pages.shape[2]
    slots = torch.where((source < 0) | (source >= total), -1, call.target.long())
    at = source.long().clamp(0, max(total - 1, 0))
    for pages in (call.k_pages, call.v_pages):
        if pages is None or source.shape[0] == 0 or pages.numel() == 0:
            continue
        by_slot = _bits(pages).movedim(0, 2)
        page = by_slot.shape[1]
        store(by_slot, by_slot[at // page, at % page], slots)


def _bits(x: Tensor) -> Tensor:
    """Few torch ops know float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x
