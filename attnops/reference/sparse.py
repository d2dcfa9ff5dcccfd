"""Reference attention of each token over latents picked for it, and the quantising write of latents.

    s[i, k] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]),  j = indices[i, k];  output[i] = sum_k p[i, k] c[j]

The formula is that of `attnops.reference.mla` over a list of keys a token: DeepSeek Sparse Attention, DeepSeek-V3.2
(https://arxiv.org/abs/2512.02556), section 2.1. A key listed twice is two terms of the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.reference.attention import Rules, attend, dequantise
from attnops.reference.data import store
from attnops.reference.latent_format import pack, unpack

if TYPE_CHECKING:
    from attnops.ops.sparse import SparseMlaAttention, WriteLatentPacked


def sparse_mla_attention(call: SparseMlaAttention) -> None:
    """The reference of `attnops.ops.sparse_mla_attention`."""
    pages, indices = call.latent_pages, call.indices
    like = torch.float64 if torch.float64 in (call.q_nope.dtype, call.output.dtype) else torch.float32
    listed = (indices >= 0) & (indices < pages.shape[0] * pages.shape[1])
    if call.topk_length is not None:
        listed = listed & (torch.arange(indices.shape[1], device=indices.device)[None] < call.topk_length[:, None])
    latents = torch.where(listed[..., None], _gather(call, torch.where(listed, indices, 0).long(), like), 0.0)
    query = torch.cat([dequantise(call.q_nope, call.q_scale, like), dequantise(call.q_pe, call.q_scale, like)], -1)
    keys = latents[:, :, None]
    out, lse = attend(query[:, None], keys, keys[..., : call.q_nope.shape[2]], listed[:, None], None, call.sinks, Rules.of(call))
    call.output.copy_(out[:, 0])
    if call.lse is not None:
        call.lse.copy_(lse[..., 0])


def _gather(call: SparseMlaAttention, slots: Tensor, like: torch.dtype) -> Tensor:
    """`[T, topk, Dc + Dr]` in `like`: the latents in these slots."""
    latent_dim, rope_dim, pages = call.q_nope.shape[2], call.q_pe.shape[2], call.latent_pages
    if pages.numel() == 0:
        return call.q_nope.new_zeros((*slots.shape, latent_dim + rope_dim), dtype=like)
    rows = pages[slots // pages.shape[1], slots % pages.shape[1]]
    return unpack(rows, latent_dim, rope_dim, like) if pages.dtype == torch.uint8 else dequantise(rows, call.kv_scale, like)


def write_latent_packed(call: WriteLatentPacked) -> None:
    """The reference of `attnops.ops.write_latent_packed`."""
    store(call.latent_pages, pack(call.latent, call.k_pe), call.slots)
