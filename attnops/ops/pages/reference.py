"""References of attention over pages, whose formula is that of `attnops.ops.attention.reference`,
and of writes into pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnops.core.tensors import (
    dequantise,
    gather_pages,
    result_dtype,
    store,
    wide_query,
    without_holes,
    write_kv as write_kv,
)
from attnops.ops.attention.reference import attend_pages

if TYPE_CHECKING:
    from attnops.ops.pages.plan import PlanMlaAttention, PlanPagedAttention
    from attnops.ops.pages.record import CopyKV, PagedAttention


def paged_attention(call: PagedAttention) -> None:
    """The reference of `attnops.paged_attention`."""
    call = without_holes(call, call.k_pages)
    like = result_dtype(call.query, call.q_scale)
    pages = (call.k_pages, call.k_scale), (call.v_pages, call.v_scale)
    key, value = (dequantise(gather_pages(x, call.page_table), scale, like) for x, scale in pages)
    attend_pages(call, wide_query(call.query, call.q_scale), key, value, call.temperature)


def copy_kv(call: CopyKV) -> None:
    """The reference of `attnops.ops.copy_kv`. It reads all rows into a tensor of their own before
    it writes the first."""
    source, total = call.source, call.k_pages.shape[1] * call.k_pages.shape[2]
    slots = torch.where((source < 0) | (source >= total), -1, call.target.long())
    at = source.long().clamp(0, max(total - 1, 0))
    for pages in (call.k_pages, call.v_pages):
        if pages is None or source.shape[0] == 0 or pages.numel() == 0:
            continue
        # Few torch ops know float8.
        bits = (
            pages.view(torch.uint8)
            if pages.dtype.itemsize == 1 and pages.is_floating_point()
            else pages
        )
        by_slot = bits.movedim(0, 2)
        page = by_slot.shape[1]
        store(by_slot, by_slot[at // page, at % page], slots)


def no_plan(call: PlanPagedAttention | PlanMlaAttention) -> None:
    """Zeros, which are no plan: kernels that plan refuse it, the others do not read it."""
    call.plan.zero_()
