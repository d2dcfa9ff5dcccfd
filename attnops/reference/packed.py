"""Reference attention over packed queries: of packed, paged and latent keys. Requests are padded to a rectangle, attended densely, and
packed again.

Latents (MLA), absorbed, of all keys and of those picked for a token, and the writes of latents into pages:

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

from attnops.call import changed
from attnops.reference.attention import attend, gradients
from attnops.reference.latent_format import pack, unpack
from attnops.reference.rows import (
    Rules,
    compact,
    dequantise,
    gather_pages,
    in_range,
    lengths_of,
    no_lse,
    pad,
    padded_mask,
    quantise,
    result_dtype,
    store,
    unpad,
    visible,
    wide_query,
    without_holes,
    write_results,
)

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention, WriteLatent
    from attnops.ops.paged import PagedAttention
    from attnops.ops.sparse import SparseMlaAttention, WriteLatentPacked
    from attnops.ops.varlen import VarlenAttention, VarlenAttentionBackward
    from attnops.ops.vertical_slash import VerticalSlashAttention


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.varlen_attention`."""
    keys, longest, like = call.cu_seqlens_k, call.max_seqlen_k, result_dtype(call.query, call.q_scale)
    key, value = (pad(dequantise(x, scale, like), keys, longest) for x, scale in ((call.key, call.k_scale), (call.value, call.v_scale)))
    mask = padded_mask(call.mask, call.cu_seqlens_q, call.max_seqlen_q, longest)
    out, lse = over_requests(call, wide_query(call.query, call.q_scale), key, value, lengths_of(keys), mask, Rules.of(call))
    return compact(out.to(like)), compact(lse.float()) if call.return_lse else no_lse(call.query)


def over_requests(
    call: VarlenAttention | PagedAttention | MlaAttention | VerticalSlashAttention, query: Tensor, key: Tensor, value: Tensor,
    ends: Tensor, mask: Tensor | None, rules: Rules, temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output `[T, Hq, Dv]`, lse `[T, Hq]`) of a packed query over keys and values `[B, K, Hkv, ...]` that end at `ends`; inputs wide."""
    starts, width = call.cu_seqlens_q, call.max_seqlen_q
    see = visible(width, key.shape[1], ends - lengths_of(starts), None, ends, rules)
    temperature = None if temperature is None else pad(temperature, starts, width)
    out, lse = attend(pad(query, starts, width), key, value, see, mask, getattr(call, "sinks", None), rules, temperature)
    return unpad(out, starts, query.shape[0]), unpad(lse.transpose(1, 2), starts, query.shape[0], float("-inf"))


def varlen_attention_backward(call: VarlenAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of the gradients of query, key, value and sinks (`[0]` where there are none)."""
    query, key, value, _, sinks = gradients(*padded(call))
    where = ((query, call.cu_seqlens_q, call.query), (key, call.cu_seqlens_k, call.key), (value, call.cu_seqlens_k, call.value))
    query, key, value = (compact(unpad(grad, cu, x.shape[0])) for grad, cu, x in where)
    return query, key, value, sinks


def padded(call: VarlenAttentionBackward) -> tuple[VarlenAttentionBackward, Tensor | None]:
    """(the call with a row `[B, width, ...]` for each request, which key each query sees)."""
    queries, keys, longest = call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q
    by_query = {n: getattr(call, n) for n in ("grad_output", "grad_lse", "query", "output", "lse")}
    dense = {n: pad(x, queries, longest) for n, x in by_query.items() if x is not None}
    dense |= {n: pad(getattr(call, n), keys, call.max_seqlen_k) for n in ("key", "value")}
    ends = lengths_of(keys)
    see = visible(longest, call.max_seqlen_k, ends - lengths_of(queries), None, ends, Rules.of(call))
    return changed(call, mask=padded_mask(call.mask, queries, longest, call.max_seqlen_k), **dense), see


def paged_attention(call: PagedAttention) -> None:
    """The reference of `attnops.paged_attention`."""
    call = without_holes(call, call.k_pages)
    like = result_dtype(call.query, call.q_scale)
    pages = (call.k_pages, call.k_scale), (call.v_pages, call.v_scale)
    key, value = (dequantise(gather_pages(x, call.page_table), scale, like) for x, scale in pages)
    attend_pages(call, wide_query(call.query, call.q_scale), key, value, call.temperature)


def attend_pages(call: PagedAttention | MlaAttention, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | None = None) -> None:
    """Write output and lse of a call, given its query `[T, ...]` and its gathered pages `[B, K, H, D]`, in the accumulation dtype."""
    ends = call.seq_lens.long()
    mask = padded_mask(call.mask, call.cu_seqlens_q, call.max_seqlen_q, key.shape[1])
    key, value = in_range(key, None, ends), in_range(value, None, ends)
    write_results(call, *over_requests(call, query, key, value, ends, mask, Rules.of(call), temperature))


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
