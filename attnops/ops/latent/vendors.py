"""Attention over latents of vendors, as `attnops.ops.attention.vendors` says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from attnops.core.record import asked
from attnops.ops.attention.vendors import OTHER, Compiler, Run, Vendor
from attnops.ops.pages.vendors import wrapped


def plain(c: Any) -> bool:
    """Do the vendors' calls support all that it asks for, over latents of the query's dtype without
    scales?"""
    return not OTHER & asked(c) and c.q_scale is None and c.latent_pages.dtype == c.q_nope.dtype


def flashmla(c: Any, compiler: Compiler | None = None, *, float8: bool = False) -> Run | None:
    """FlashMLA's decode, as sgl-kernel has it."""
    if not (not OTHER & asked(c) and c.q_scale is not None if float8 else plain(c)):
        return None
    from attnops.kernels.sgl.sources import source

    ops, heads = source().ops, c.q_nope.shape[1]
    query = torch.cat([x.view(torch.uint8) for x in (c.q_nope, c.q_pe)], -1).view(c.q_nope.dtype)
    given = (
        query[:, None],
        c.latent_pages[:, :, None],
        512,
        c.seq_lens,
        c.page_table,
        c.scale,
        False,
    )
    if float8:
        metadata = ops.get_mla_decoding_metadata_dense_fp8(c.seq_lens, heads, 1)
        return partial(ops.fwd_kvcache_mla_fp8, *given, *metadata, c.q_scale, c.kv_scale)
    return partial(
        ops.dense_decode_fwd,
        *given,
        *ops.get_mla_decoding_metadata(c.seq_lens, heads, 1, heads, False, None),
    )


def flashinfer(c: Any, compiler: Compiler | None = None, *, backend: str) -> Run | None:
    """FlashInfer's wrapper for pages of latents."""
    if not plain(c):
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    pages = c.latent_pages
    wrapper, indptr, indices, _ = wrapped(
        partial(BatchMLAPagedAttentionWrapper, backend=backend), c, pages
    )
    wrapper.plan(
        qo_indptr=c.cu_seqlens_q,
        kv_indptr=indptr,
        kv_indices=indices,
        kv_len_arr=c.seq_lens,
        num_heads=c.q_nope.shape[1],
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=pages.shape[1],
        causal=False,
        sm_scale=c.scale,
        q_data_type=pages.dtype,
        kv_data_type=pages.dtype,
    )
    query, cache = (c.q_nope, c.q_pe), (pages[..., :512], pages[..., 512:])
    return partial(wrapper.run, query=query, kv_cache=cache, out=torch.empty_like(c.output))


VENDORS: dict[str, Mapping[str, Vendor]] = {
    "mla_attention": {
        "direct.flashmla_fp8": partial(flashmla, float8=True),
        "direct.flashmla": flashmla,
        "direct.flashinfer_fa2": partial(flashinfer, backend="fa2"),
        "direct.flashinfer_fa3": partial(flashinfer, backend="fa3"),
    }
}
