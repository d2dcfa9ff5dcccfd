"""Reference attention over latents (MLA), absorbed, and the write of latents into pages.

    s[i, j] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]);  output[i] = sum_j p[i, j] c[j]

The query's part without position has been through W_UK already and the output goes through W_UV afterwards, so that nothing is
unfolded here: the latent c serves every head as key and as value. DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and
appendix C. Soft cap, mask, sinks and lse are those of `attnops.reference.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnops.reference.attention import dequantise
from attnops.reference.data import quantise, store
from attnops.reference.holes import without_holes
from attnops.reference.packed import attend_pages, gather_pages, pad

if TYPE_CHECKING:
    from attnops.ops.latent import WriteLatent
    from attnops.ops.mla import MlaAttention


def mla_attention(call: MlaAttention) -> None:
    """The reference of `attnops.ops.mla_attention`."""
    call = without_holes(call, call.latent_pages)
    # The output's dtype sets the accumulation dtype: a quantised query's cannot.
    like = torch.float64 if torch.float64 in (call.q_nope.dtype, call.output.dtype) else torch.float32
    latents = dequantise(gather_pages(call.latent_pages[:, :, None], call.page_table), call.kv_scale, like)
    query = torch.cat([dequantise(call.q_nope, call.q_scale, like), dequantise(call.q_pe, call.q_scale, like)], -1)
    attend_pages(call, pad(query, call.cu_seqlens_q, call.max_seqlen_q), latents, latents[..., : call.q_nope.shape[2]])


def write_latent(call: WriteLatent) -> None:
    """The reference of `attnops.ops.write_latent`."""
    latent, k_pe, pages = call.latent, call.k_pe, call.latent_pages
    if latent.dtype == pages.dtype and pages.dtype.itemsize == 1:  # quantised already: the very bits
        rows = torch.cat([latent.view(torch.uint8), k_pe.view(torch.uint8)], -1).view(pages.dtype)
    else:
        rows = quantise(torch.cat([latent, k_pe], -1), call.kv_scale, pages.dtype)
    store(pages, rows, call.slots)
