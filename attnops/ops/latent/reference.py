"""References of attention over pages of latents (MLA), absorbed, and of the write of latents into
pages.

    s[i, j] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]);  output[i] = sum_j p[i, j] c[j]

The query's part without position has been through W_UK already and the output goes through W_UV
afterwards, so that nothing is unfolded here: the latent c serves every head as key and as value.
DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import dequantise, gather_pages, quantise, store, without_holes
from attnops.ops.attention.reference import attend_pages

if TYPE_CHECKING:
    from attnops.ops.latent.record import MlaAttention, WriteLatent
    from attnops.ops.sparse.record import SparseMlaAttention


def mla_attention(call: MlaAttention) -> None:
    """The reference of `attnops.ops.mla_attention`."""
    call = without_holes(call, call.latent_pages)
    query = absorbed(call)
    latents = dequantise(
        gather_pages(call.latent_pages[:, :, None], call.page_table), call.kv_scale, query.dtype
    )
    attend_pages(call, query, latents, latents[..., : call.q_nope.shape[2]])


def absorbed(call: MlaAttention | SparseMlaAttention) -> Tensor:
    """`[T, H, Dc + Dr]`, the whole query, in the accumulation dtype. The output's dtype sets it: a
    quantised query's cannot."""
    like = (
        torch.float64 if torch.float64 in (call.q_nope.dtype, call.output.dtype) else torch.float32
    )
    return torch.cat(
        [dequantise(call.q_nope, call.q_scale, like), dequantise(call.q_pe, call.q_scale, like)], -1
    )


def write_latent(call: WriteLatent) -> None:
    """The reference of `attnops.ops.write_latent`."""
    latent, k_pe, pages = call.latent, call.k_pe, call.latent_pages
    if (
        latent.dtype == pages.dtype and pages.dtype.itemsize == 1
    ):  # quantised already: the very bits
        rows = torch.cat([latent.view(torch.uint8), k_pe.view(torch.uint8)], -1).view(pages.dtype)
    else:
        rows = quantise(torch.cat([latent, k_pe], -1), call.kv_scale, pages.dtype)
    store(pages, rows, call.slots)
