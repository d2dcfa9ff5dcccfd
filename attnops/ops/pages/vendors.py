"""Attention over pages of torch and of vendors, as `attnops.ops.attention.vendors` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.core.record import asked
from attnops.ops.attention.record import Attention
from attnops.ops.attention.vendors import OTHER, Compiler, Run, Vendor, bound, of_one_length, sdpa
from attnops.ops.metadata.record import kv_indices


def dense(c: Any) -> Attention | None:
    """As a call of `attention` over a contiguous copy of the pages, where the requests fill
    these."""
    table = c.page_table.long()
    if (
        c.sinks is not None
        or c.k_pages.dtype != c.query.dtype
        or not bool((c.seq_lens == table.shape[1] * c.k_pages.shape[1]).all())
    ):
        return None
    pages = [
        x[table].flatten(1, 2).transpose(1, 2).contiguous().transpose(1, 2)
        for x in (c.k_pages, c.v_pages)
    ]
    return of_one_length(c, [c.query.unflatten(0, (table.shape[0], -1)), *pages])


def known(c: Any) -> bool:
    """Do the vendors' calls support all that it asks for?"""
    return not OTHER & asked(c) and c.k_pages.dtype == c.query.dtype


def fa3(c: Any, compiler: Compiler | None = None) -> Run | None:
    """FlashAttention-3, as sgl-kernel has it."""
    if not known(c):
        return None
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return partial(
        flash_attn_with_kvcache,
        c.query,
        c.k_pages,
        c.v_pages,
        cache_seqlens=c.seq_lens,
        page_table=c.page_table,
        cu_seqlens_q=c.cu_seqlens_q,
        max_seqlen_q=c.max_seqlen_q,
        softmax_scale=c.scale,
        causal=c.causal,
        out=torch.empty_like(c.output),
    )


def wrapped(
    make: Callable[[Tensor], Any], c: Any, pages: Tensor
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(FlashInfer's wrapper with a workspace; the ends, ids and last lengths of the requests'
    pages)."""
    indptr, indices, last = kv_indices(c.page_table, c.seq_lens, page_size=pages.shape[1])
    return (
        make(torch.zeros(128 << 20, dtype=torch.uint8, device=pages.device)),
        indptr,
        indices[: int(indptr[-1])],
        last,
    )


def flashinfer(
    c: Any, compiler: Compiler | None = None, *, kind: str, **options: Any
) -> Run | None:
    """FlashInfer's wrapper for pages of keys and values. kind: "Decode" or "Prefill". options: of
    its constructor."""
    decode = kind == "Decode"
    if not known(c) or decode != (c.max_seqlen_q == 1):
        return None
    import flashinfer

    made = partial(
        getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper"), kv_layout="NHD", **options
    )
    wrapper, *rows = wrapped(made, c, c.k_pages)
    queries, more = ((), {}) if decode else ((c.cu_seqlens_q,), {"causal": c.causal})
    _, page, kv_heads, dim = c.k_pages.shape
    sizes = c.query.shape[1], kv_heads, dim, page
    wrapper.plan(
        *queries,
        *rows,
        *sizes,
        sm_scale=c.scale,
        q_data_type=c.query.dtype,
        kv_data_type=c.query.dtype,
        **more,
    )
    return partial(wrapper.run, c.query, (c.k_pages, c.v_pages), out=torch.empty_like(c.output))


VENDORS: dict[str, Mapping[str, Vendor]] = {
    "paged_attention": {
        "torch.sdpa": bound(sdpa, dense),
        "direct.fa3": fa3,
        "direct.flashinfer_tensor_cores": partial(flashinfer, kind="Decode", use_tensor_cores=True),
        "direct.flashinfer_fa2": partial(flashinfer, kind="Prefill", backend="fa2"),
        "direct.flashinfer_fa3": partial(flashinfer, kind="Prefill", backend="fa3"),
    }
}
