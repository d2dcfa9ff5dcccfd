"""Reference rotation and quantisation of the inputs of latent attention: queries after absorption,
new latents.

    pairs (a, b) of the rotated part, of a token at position p:  (a cos - b sin, b cos + a sin)
    stored = round(saturate(x / scale))

The numbers of a pair are neighbours (interleaved) or half a part apart, and keep their places:
RoFormer, https://arxiv.org/abs/2104.09864, 3.2.2. Nothing is rounded between rotation and
quantisation. Plain pointwise torch ops, which a compiler fuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import compact, rotate, wide

if TYPE_CHECKING:
    from attnops.ops.latent.record import RopeQuantizeLatent

STORED = torch.float8_e4m3fn


def rope_quantize_latent(call: RopeQuantizeLatent) -> tuple[Tensor, Tensor]:
    """(`[T, H, Dc + Dr]`, `[T, Dc + Dr]`) float8_e4m3fn; the reference of
    `attnops.ops.rope_quantize_latent`."""
    parts = scaled(call)
    top = torch.finfo(STORED).max
    stored = [part.clamp(-top, top).to(STORED) for part in parts]
    # Joined last, so that a compiler writes each part into its place and stores no other tensor.
    return compact(torch.cat(stored[:2], -1)), compact(torch.cat(stored[2:], -1))


def scaled(call: RopeQuantizeLatent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four parts before they are saturated and rounded, in float32, or float64 for float64."""
    q_nope, q_pe, latent, k_pe = (wide(x) for x in (call.q_nope, call.q_pe, call.latent, call.k_pe))
    table, positions = call.cos_sin, call.positions
    # index_select raises on a position outside, and a compiler makes of one below 0 a row from the
    # end: NaN is the same in both.
    known = (positions >= 0) & (positions < table.shape[0])
    rows = (
        torch.index_select(table, 0, torch.where(known, positions, 0))
        if table.shape[0]
        else table.new_zeros(1, call.q_pe.shape[2])
    )
    cos, sin = torch.where(known[:, None], rows, float("nan")).to(q_nope.dtype).chunk(2, -1)
    q_pe = rotate(q_pe, cos[:, None], sin[:, None], call.interleaved)
    k_pe = rotate(k_pe, cos, sin, call.interleaved)
    return q_nope / call.q_scale, q_pe / call.q_scale, latent / call.kv_scale, k_pe / call.kv_scale
