"""Attention over pages of float8 latents with float8 queries: what a layer does of it, from its projections on.

Rotation, quantisation and the joining of parts are one op between the product with W_UK and the write, so that nothing rotated is ever
rounded to the layer's own dtype, and kernels that take float8 on both sides (FlashMLA, TensorRT-LLM) get a query in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.errors import InvalidInput, fail
from attnops.nn import _check as check
from attnops.nn.absorb import absorbed_weights
from attnops.nn.latent import attend_pages, by_head, check_weights, tell_form
from attnops.ops import rope_quantize_latent, write_latent
from attnops.ops.latent_form import LatentDims, kernel_for
from attnops.select import key_for


def attend_float8(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_b: nn.Module,
    cos_sin: Tensor,
    positions: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    q_scale: float,
    kv_scale: float,
    interleaved: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: rotate and quantise the new tokens, write them into their pages, attend in the absorbed form. No gradient.

    Args:
        q_nope, q_pe: `[T, H, nope]`, `[T, H, Dr]`, latent, k_pe: `[T, Dc]`, `[T, Dr]`, of one float dtype, not rotated yet.
        kv_b: the projection of a latent to H * (nope + v) numbers.
        cos_sin, positions, interleaved, q_scale, kv_scale: as in `rope_quantize_latent`; the scales are host floats.
        latent_pages: `[P, page, Dc + Dr]` float8_e4m3fn, written. batch: as the cache made it; its plan, if it has one, is for
            float8 queries.
        scale: factor on the scores; see `mla_attention`. kernel: force a kernel of `mla_attention` by name.

    Raises:
        InvalidInput: an argument breaks the contract. NoGradient: an input requires grad in grad mode. UnknownKernel, NoKernel: `kernel`
        cannot run.
    """
    check.last("q_nope", check.tensor("q_nope", q_nope, "[T, H, nope]", 3), dims.nope)
    if check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3).dtype != torch.float8_e4m3fn:
        fail(InvalidInput, "latent_pages.dtype", latent_pages.dtype, "float8_e4m3fn")
    absorbing, expanding = (kernel_for(op, kernel) for op in ("mla_attention", "varlen_attention"))
    policies = key_for("mla_attention", absorbing), key_for("varlen_attention", expanding)
    tell_form(dims, q_nope, latent_pages, batch.max_seqlen_q, policies, before=None, query_dtype=latent_pages.dtype)
    w_uk, w_uv = absorbed_weights(kv_b, dims.nope, dims.v, latent)
    check_weights(dims, q_nope.shape[1], w_uk, w_uv)
    query, q_pe, row, key = rope_quantize_latent(
        by_head(q_nope, w_uk), q_pe, latent, k_pe, cos_sin, positions, q_scale=q_scale, kv_scale=kv_scale, interleaved=interleaved
    )
    write_latent(row, key, latent_pages, batch.slots)
    out = attend_pages(
        query, q_pe, latent_pages, batch, scale=scale, q_scale=scale_tensor(q_scale, latent), kv_scale=scale_tensor(kv_scale, latent),
        dtype=q_nope.dtype, kernel=absorbing,
    )  # fmt: skip
    return by_head(out, w_uv.transpose(1, 2))


def scale_tensor(value: float, like: Tensor) -> Tensor:
    """float32 `[1]` on the device of `like`, as the attention ops take a scale. Layers of a compiled model that share it make it once."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)
