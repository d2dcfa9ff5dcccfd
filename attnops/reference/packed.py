"""Reference packed and paged attention: requests are padded to a rectangle, attended densely, and packed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from attnops.call import changed
from attnops.errors import InvalidInput
from attnops.reference.attention import (
    Rules,
    attend,
    compact,
    dequantise,
    gradients,
    in_range,
    no_lse,
    result_dtype,
    visible,
    wide_query,
)
from attnops.reference.holes import without_holes

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention
    from attnops.ops.paged import PagedAttention
    from attnops.ops.varlen import VarlenAttention, VarlenAttentionBackward


def rows_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[T]` int64: the request of each token; tokens past the last request get B."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    if cu_seqlens.shape[0] == 1:
        return at * 0  # Triton does not compile a search in an empty tensor
    # Ends of one less than themselves are a tensor of its own: Inductor of torch 2.11 looks a view's offset over.
    return torch.searchsorted(cu_seqlens[1:].long() - 1, at)


def pad(x: Tensor, cu_seqlens: Tensor, width: int) -> Tensor:
    """`[T, ...]` -> `[B, width, ...]`, zero past the end of each request, where `x` may hold NaN."""
    start = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - start
    j = torch.arange(width, device=x.device)[None]
    inside = j < lengths[:, None]
    _fits(lengths, width)
    if x.shape[0] == 0:
        return x.new_zeros((lengths.shape[0], width, *x.shape[1:]))
    index = torch.where(inside, start[:, None] + j, 0)
    padded = x[index]
    return torch.where(inside.reshape(*inside.shape, *[1] * (x.dim() - 1)), padded, torch.zeros((), dtype=x.dtype, device=x.device))


def _fits(lengths: Tensor, width: int) -> None:
    # Rows past the width would be lost. Only the host's own numbers are looked at: a device would have to be waited for.
    host = lengths.device.type == "cpu" and type(lengths) is Tensor and not torch.compiler.is_compiling() and lengths.numel() > 0
    if host and not _len_torch_dispatch_stack() and (longest := int(lengths.max())) > width:
        raise InvalidInput("max_seqlen", width, f">= {longest}, the longest request by cu_seqlens")


def unpad(x: Tensor, cu_seqlens: Tensor, tokens: int, fill: float = 0.0) -> Tensor:
    """`[B, width, ...]` -> `[T, ...]`; tokens past the last request get `fill`."""
    rows = rows_of(cu_seqlens, tokens)
    batch, width = x.shape[0], x.shape[1]
    if batch == 0 or width == 0:
        return x.new_full((tokens, *x.shape[2:]), fill)
    real = rows < batch
    row = torch.where(real, rows, 0)
    column = torch.arange(tokens, device=x.device) - cu_seqlens.long()[row]
    out = x[row, column.clamp(0, width - 1)]
    return torch.where(real.reshape(-1, *[1] * (x.dim() - 2)), out, torch.full((), fill, dtype=x.dtype, device=x.device))


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """`[B]` int64 lengths of `[B + 1]` cumulative lengths."""
    return cu_seqlens[1:].long() - cu_seqlens[:-1].long()


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.varlen_attention`."""
    query, queries, keys = call.query, call.cu_seqlens_q, call.cu_seqlens_k
    rules, like = Rules.of(call), result_dtype(query, call.q_scale)
    out, lse = attend(
        wide_query(pad(_indexable(query, like), queries, call.max_seqlen_q), call.q_scale),
        dequantise(pad(_indexable(call.key, like), keys, call.max_seqlen_k), call.k_scale, like),
        dequantise(pad(_indexable(call.value, like), keys, call.max_seqlen_k), call.v_scale, like),
        _visible(call),
        padded_mask(call.mask, queries, call.max_seqlen_q, call.max_seqlen_k),
        call.sinks,
        rules,
    )
    packed = compact(unpad(out, queries, query.shape[0]).to(like))
    if not call.return_lse:
        return packed, no_lse(query)
    return packed, compact(unpad(lse.transpose(1, 2), queries, query.shape[0], float("-inf")).float())


def _visible(call: VarlenAttention | VarlenAttentionBackward) -> Tensor | None:
    ends = lengths_of(call.cu_seqlens_k)
    offset = ends - lengths_of(call.cu_seqlens_q)
    return visible(call.max_seqlen_q, call.max_seqlen_k, offset, None, ends, Rules.of(call))


def _indexable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantised numbers in `dtype`, which holds them exactly: float8 has no `where`."""
    return x.to(dtype) if x.dtype.itemsize == 1 else x


def padded_mask(mask: Tensor | None, cu_seqlens_q: Tensor, width: int, keys: int) -> Tensor | None:
    """`[T, K]` -> `[B, 1, width, keys]`."""
    return None if mask is None else pad(mask[:, :keys], cu_seqlens_q, width)[:, None]


def varlen_attention_backward(call: VarlenAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of the gradients of query, key, value and sinks (`[0]` where there are none)."""
    queries, keys = call.cu_seqlens_q, call.cu_seqlens_k
    by_query = {n: getattr(call, n) for n in ("grad_output", "grad_lse", "query", "output", "lse")}
    dense = {n: pad(x, queries, call.max_seqlen_q) for n, x in by_query.items() if x is not None}
    dense |= {n: pad(getattr(call, n), keys, call.max_seqlen_k) for n in ("key", "value")}
    mask = padded_mask(call.mask, queries, call.max_seqlen_q, call.max_seqlen_k)
    query, key, value, _, sinks = gradients(changed(call, mask=mask, **dense), _visible(call))
    where = ((query, queries, call.query), (key, keys, call.key), (value, keys, call.value))
    query, key, value = (compact(unpad(grad, cu, x.shape[0])) for grad, cu, x in where)
    return query, key, value, sinks


def gather_pages(pages: Tensor, page_table: Tensor) -> Tensor:
    """`[P, page, H, D]` through `[B, M]` -> `[B, M * page, H, D]`. Negative entries, past the end, read page 0."""
    if pages.shape[0] == 0:
        return pages.new_zeros((page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:]))
    picked = pages[page_table.long().clamp(min=0)]
    return picked.reshape(page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])


def paged_attention(call: PagedAttention) -> None:
    """The reference of `attnops.paged_attention`."""
    call = without_holes(call, call.k_pages)
    query, like = call.query, result_dtype(call.query, call.q_scale)

    def rows(pages: Tensor, scale: Tensor | None) -> Tensor:
        return dequantise(gather_pages(pages, call.page_table), scale, like)

    attend_pages(
        call,
        wide_query(pad(_indexable(query, like), call.cu_seqlens_q, call.max_seqlen_q), call.q_scale),
        rows(call.k_pages, call.k_scale),
        rows(call.v_pages, call.v_scale),
        None if call.temperature is None else pad(call.temperature, call.cu_seqlens_q, call.max_seqlen_q),
    )


def attend_pages(call: PagedAttention | MlaAttention, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | None = None) -> None:
    """Write output and lse of a call, given its padded query and its gathered pages, `[B, S or K, H, D]`, in the accumulation dtype."""
    ends, keys, tokens = call.seq_lens.long(), key.shape[1], call.output.shape[0]
    see = visible(call.max_seqlen_q, keys, ends - lengths_of(call.cu_seqlens_q), None, ends, Rules.of(call))
    mask = padded_mask(call.mask, call.cu_seqlens_q, call.max_seqlen_q, keys)
    key, value = in_range(key, None, ends), in_range(value, None, ends)
    out, lse = attend(query, key, value, see, mask, call.sinks, Rules.of(call), temperature)
    call.output.copy_(unpad(out, call.cu_seqlens_q, tokens))
    if call.lse is not None:
        call.lse.copy_(unpad(lse.transpose(1, 2), call.cu_seqlens_q, tokens, float("-inf")))
