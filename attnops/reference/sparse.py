"""Reference attention of each token over latents picked for it, and the write of latents in packed form.

    s[i, k] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]),  j = indices[i, k];  output[i] = sum_k p[i, k] c[j]

The formula is that of `attnops.reference.mla` over a list of keys a token: DeepSeek Sparse Attention, DeepSeek-V3.2
(https://arxiv.org/abs/2512.02556), section 2.1. A key listed twice is two terms of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference.attention import Rules, attend, dequantise
from attnops.reference.data import store
from attnops.reference.latent_format import pack, unpack


def sparse_mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    scale: float,
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Reference of sparse latent attention; see `attnops.ops.sparse_mla_attention`."""
    like = torch.float64 if torch.float64 in (q_nope.dtype, output.dtype) else torch.float32
    listed = (indices >= 0) & (indices < latent_pages.shape[0] * latent_pages.shape[1])
    if topk_length is not None:
        listed = listed & (torch.arange(indices.shape[1], device=indices.device)[None] < topk_length[:, None])
    slots = torch.where(listed, indices, 0).long()
    latents = torch.where(listed[..., None], _gather(q_nope, q_pe, latent_pages, slots, kv_scale, like), 0.0)
    query = torch.cat([dequantise(q_nope, q_scale, like), dequantise(q_pe, q_scale, like)], -1)
    keys = latents[:, :, None]
    rules = Rules(scale, False, -1, -1, 0.0)
    out, z = attend(query[:, None], keys, keys[..., : q_nope.shape[2]], listed[:, None], None, sinks, rules)
    output.copy_(out[:, 0])
    if lse is not None:
        lse.copy_(z[..., 0])


def _gather(q_nope: Tensor, q_pe: Tensor, pages: Tensor, slots: Tensor, kv_scale: Tensor | None, like: torch.dtype) -> Tensor:
    """`[T, topk, Dc + Dr]` in `like`: the latents in these slots."""
    latent_dim, rope_dim, page = q_nope.shape[2], q_pe.shape[2], pages.shape[1]
    if pages.numel() == 0:
        return q_nope.new_zeros((*slots.shape, latent_dim + rope_dim), dtype=like)
    rows = pages[slots // page, slots % page]
    return unpack(rows, latent_dim, rope_dim, like) if pages.dtype == torch.uint8 else dequantise(rows, kv_scale, like)


def write_latent_packed(latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, policy: str = "") -> None:
    """Reference of the packed write; see `attnops.ops.write_latent_packed`."""
    store(latent_pages, pack(latent, k_pe), slots)
