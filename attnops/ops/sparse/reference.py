"""References of attention over latents that are listed for each token, and of the write of packed
latents.

Over a list of keys a token, j = indices[i, k]. DeepSeek Sparse Attention, DeepSeek-V3.2
(https://arxiv.org/abs/2512.02556), section 2.1. A key listed twice is two terms of the sum. The
logits are those of `attnops.ops.latent.reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnops.core.tensors import Rules, dequantise, store, write_results
from attnops.ops.attention.reference import attend
from attnops.ops.latent.reference import absorbed
from attnops.ops.sparse.packed_format import pack, unpack

if TYPE_CHECKING:
    from attnops.ops.sparse.record import SparseMlaAttention, WriteLatentPacked


def sparse_mla_attention(call: SparseMlaAttention) -> None:
    """The reference of `attnops.ops.sparse_mla_attention`."""
    query, pages, indices = absorbed(call), call.latent_pages, call.indices
    listed = (indices >= 0) & (indices < pages.shape[0] * pages.shape[1])
    if call.topk_length is not None:
        listed = listed & (
            torch.arange(indices.shape[1], device=indices.device)[None] < call.topk_length[:, None]
        )
    slots = torch.where(listed, indices, 0).long()
    if pages.numel() == 0:
        latents = query.new_zeros((*slots.shape, query.shape[2]))
    else:
        rows = pages[slots // pages.shape[1], slots % pages.shape[1]]
        parts = call.q_nope.shape[2], call.q_pe.shape[2]
        latents = (
            unpack(rows, *parts, query.dtype)
            if pages.dtype == torch.uint8
            else dequantise(rows, call.kv_scale, query.dtype)
        )
    keys = torch.where(listed[..., None], latents, 0.0)[:, :, None]
    out, lse = attend(
        query[:, None],
        keys,
        keys[..., : call.q_nope.shape[2]],
        listed[:, None],
        None,
        call.sinks,
        Rules.of(call),
    )
    write_results(call, out[:, 0], lse[..., 0])


def write_latent_packed(call: WriteLatentPacked) -> None:
    """The reference of `attnops.ops.write_latent_packed`."""
    store(call.latent_pages, pack(call.latent, call.k_pe), call.slots)
