"""Reference attention over latents (MLA), absorbed, of all keys and of those picked for a token; and the writes of latents into pages.

    s[i, j] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]);  output[i] = sum_j p[i, j] c[j]

The query's part without position has been through W_UK already and the output goes through W_UV afterwards, so that nothing is
unfolded here: the latent c serves every head as key and as value. DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and
appendix C. Soft cap, mask, sinks and lse are those of `attnops.reference.attention`.

Sparse: over a list of keys a token, j = indices[i, k]. DeepSeek Sparse Attention, DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556),
section 2.1. A key listed twice is two terms of the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.reference.attention import Rules, attend, dequantise
from attnops.reference.data import quantise, store
from attnops.reference.holes import without_holes
from attnops.reference.latent_format import pack, unpack
from attnops.reference.packed import attend_pages, gather_pages, write_results

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention, WriteLatent
    from attnops.ops.sparse import SparseMlaAttention, WriteLatentPacked


def mla_attention(call: MlaAttention) -> None:
    """The reference of `attnops.ops.mla_attention`."""
    call = without_holes(call, call.latent_pages)
    query = absorbed(call)
    latents = dequantise(gather_pages(call.latent_pages[:, :, None], call.page_table), call.kv_scale, query.dtype)
    attend_pages(call, query, latents, latents[..., : call.q_nope.shape[2]])


def absorbed(call: MlaAttention | SparseMlaAttention) -> Tensor:
    """`[T, H, Dc + Dr]`, the whole query, in the accumulation dtype. The output's dtype sets it: a quantised query's cannot."""
    like = torch.float64 if torch.float64 in (call.q_nope.dtype, call.output.dtype) else torch.float32
    return torch.cat([dequantise(call.q_nope, call.q_scale, like), dequantise(call.q_pe, call.q_scale, like)], -1)


def sparse_mla_attention(call: SparseMlaAttention) -> None:
    """The reference of `attnops.ops.sparse_mla_attention`."""
    query, pages, indices = absorbed(call), call.latent_pages, call.indices
    listed = (indices >= 0) & (indices < pages.shape[0] * pages.shape[1])
    if call.topk_length is not None:
        listed = listed & (torch.arange(indices.shape[1], device=indices.device)[None] < call.topk_length[:, None])
    slots = torch.where(listed, indices, 0).long()
    if pages.numel() == 0:
        latents = query.new_zeros((*slots.shape, query.shape[2]))
    else:
        rows = pages[slots // pages.shape[1], slots % pages.shape[1]]
        parts = call.q_nope.shape[2], call.q_pe.shape[2]
        latents = unpack(rows, *parts, query.dtype) if pages.dtype == torch.uint8 else dequantise(rows, call.kv_scale, query.dtype)
    keys = torch.where(listed[..., None], latents, 0.0)[:, :, None]
    out, lse = attend(query[:, None], keys, keys[..., : call.q_nope.shape[2]], listed[:, None], None, call.sinks, Rules.of(call))
    write_results(call, out[:, 0], lse[..., 0])


def write_latent(call: WriteLatent) -> None:
    """The reference of `attnops.ops.write_latent`."""
    latent, k_pe, pages = call.latent, call.k_pe, call.latent_pages
    if latent.dtype == pages.dtype and pages.dtype.itemsize == 1:  # quantised already: the very bits
        rows = torch.cat([latent.view(torch.uint8), k_pe.view(torch.uint8)], -1).view(pages.dtype)
    else:
        rows = quantise(torch.cat([latent, k_pe], -1), call.kv_scale, pages.dtype)
    store(pages, rows, call.slots)


def write_latent_packed(call: WriteLatentPacked) -> None:
    """The reference of `attnops.ops.write_latent_packed`."""
    store(call.latent_pages, pack(call.latent, call.k_pe), call.slots)
