"""Reference attention over latents (MLA) in absorbed form, and the write of latents into pages.

    s[i, j] = scale * (q_nope[i] . c[j] + q_pe[i] . k_pe[j]);  output[i] = sum_j p[i, j] c[j]

The query's part without position has been through W_UK already and the output goes through W_UV afterwards, so that nothing is
unfolded here: the latent c serves every head as key and as value. DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and
appendix C. Soft cap, mask, sinks and lse are those of `attnops.reference.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference.attention import Rules, attend, dequantise, visible
from attnops.reference.data import quantise, store
from attnops.reference.holes import how, named_pages
from attnops.reference.packed import gather_pages, lengths_of, pad, padded_mask, unpad


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Reference of latent attention; see `attnops.ops.mla_attention`."""
    if holes:
        pages, size = latent_pages.shape[:2]
        more = how(mask=mask, window_left=window_left)
        page_table, seq_lens = named_pages(page_table, seq_lens, cu_seqlens_q, num_pages=pages, page_size=size, **more)
    # A quantised query says nothing of how finely to add up; the output does.
    like = torch.float64 if torch.float64 in (q_nope.dtype, output.dtype) else torch.float32
    ends = seq_lens.long()
    keys = page_table.shape[1] * latent_pages.shape[1]
    rules = Rules(scale, causal, window_left, -1, softcap)
    see = visible(max_seqlen_q, keys, ends - lengths_of(cu_seqlens_q), None, ends, rules)
    inside = (torch.arange(keys, device=q_nope.device)[None] < ends[:, None])[..., None, None]
    latents = torch.where(inside, dequantise(gather_pages(latent_pages[:, :, None], page_table), kv_scale, like), 0.0)
    query = torch.cat([dequantise(q_nope, q_scale, like), dequantise(q_pe, q_scale, like)], -1)
    out, z = attend(
        pad(query, cu_seqlens_q, max_seqlen_q),
        latents,
        latents[..., : q_nope.shape[2]],
        see,
        padded_mask(mask, cu_seqlens_q, max_seqlen_q, keys),
        sinks,
        rules,
    )
    tokens = q_nope.shape[0]
    output.copy_(unpad(out, cu_seqlens_q, tokens))
    if lse is not None:
        lse.copy_(unpad(z.transpose(1, 2), cu_seqlens_q, tokens, float("-inf")))


def write_latent(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, kv_scale: Tensor | None = None, *, policy: str = ""
) -> None:
    """Reference of the latents' write; see `attnops.ops.write_latent`."""
    store(latent_pages, rows_of(latent, k_pe, kv_scale, latent_pages.dtype), slots)


def rows_of(latent: Tensor, k_pe: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[T, Dc + Dr]` of `dtype`: both parts end to end as pages store them, the very bits of what is quantised already."""
    if latent.dtype == dtype and dtype.itemsize == 1:
        return torch.cat([latent.view(torch.uint8), k_pe.view(torch.uint8)], -1).view(dtype)
    return quantise(torch.cat([latent, k_pe], -1), kv_scale, dtype)
