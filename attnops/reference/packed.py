"""Reference packed and paged attention: requests are padded to a rectangle, attended densely, and packed again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from attnops.errors import InvalidInput
from attnops.reference.attention import (
    Rules,
    attend,
    attention_backward,
    compact,
    dequantise,
    no_lse,
    result_dtype,
    visible,
    wide_query,
)
from attnops.reference.holes import how, named_pages


def rows_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[T]` int64: the request of each token; tokens past the last request get B."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    if cu_seqlens.shape[0] == 1:
        return at * 0  # Triton compiles no search in nothing
    # Ends of one less than themselves are a tensor of its own: Inductor of torch 2.11 looks a view's offset over.
    return torch.searchsorted(cu_seqlens[1:].long() - 1, at)


def pad(x: Tensor, cu_seqlens: Tensor, width: int, cut: bool = False) -> Tensor:
    """`[T, ...]` -> `[B, width, ...]`, zero past the end of each request (what lies there may be NaN). cut: longer ones may be."""
    start = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - start
    j = torch.arange(width, device=x.device)[None]
    inside = j < lengths[:, None]
    if not cut:
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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """Packed reference; see `attnops.varlen_attention`."""
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    like = result_dtype(query, q_scale)
    ends = lengths_of(cu_seqlens_k)
    see = visible(max_seqlen_q, max_seqlen_k, ends - lengths_of(cu_seqlens_q), None, ends, rules)
    out, lse = attend(
        wide_query(pad(_indexable(query, like), cu_seqlens_q, max_seqlen_q), q_scale),
        dequantise(pad(_indexable(key, like), cu_seqlens_k, max_seqlen_k), k_scale, like),
        dequantise(pad(_indexable(value, like), cu_seqlens_k, max_seqlen_k), v_scale, like),
        see,
        padded_mask(mask, cu_seqlens_q, max_seqlen_q, max_seqlen_k),
        sinks,
        rules,
    )
    tokens = query.shape[0]
    packed = compact(unpad(out, cu_seqlens_q, tokens).to(like))
    if not return_lse:
        return packed, no_lse(query)
    return packed, compact(unpad(lse.transpose(1, 2), cu_seqlens_q, tokens, float("-inf")).float())


def _indexable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantised numbers in `dtype`, which holds them exactly: float8 has no `where`."""
    return x.to(dtype) if x.dtype.itemsize == 1 else x


def padded_mask(mask: Tensor | None, cu_seqlens_q: Tensor, width: int, keys: int) -> Tensor | None:
    """`[T, K]` -> `[B, 1, width, keys]`."""
    return None if mask is None else pad(mask[:, :keys], cu_seqlens_q, width)[:, None]


def varlen_attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (`[0]` when there are none). Formula: see `attention_backward`."""
    ends = lengths_of(cu_seqlens_k)
    offset = ends - lengths_of(cu_seqlens_q)
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    see = visible(max_seqlen_q, max_seqlen_k, offset, None, ends, rules)
    dense_mask = padded_mask(mask, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    if see is not None:
        hidden = ~see[:, None]
        if dense_mask is None:
            dense_mask = ~hidden
        elif dense_mask.dtype == torch.bool:
            dense_mask = dense_mask & ~hidden
        else:
            dense_mask = dense_mask.masked_fill(hidden, float("-inf"))
    grads = attention_backward(
        pad(grad_output, cu_seqlens_q, max_seqlen_q),
        None if grad_lse is None else pad(grad_lse, cu_seqlens_q, max_seqlen_q),
        pad(query, cu_seqlens_q, max_seqlen_q),
        pad(key, cu_seqlens_k, max_seqlen_k),
        pad(value, cu_seqlens_k, max_seqlen_k),
        pad(output, cu_seqlens_q, max_seqlen_q),
        pad(lse, cu_seqlens_q, max_seqlen_q),
        dense_mask,
        sinks,
        scale=scale,
        softcap=softcap,
    )
    return (
        compact(unpad(grads[0], cu_seqlens_q, query.shape[0])),
        compact(unpad(grads[1], cu_seqlens_k, key.shape[0])),
        compact(unpad(grads[2], cu_seqlens_k, value.shape[0])),
        grads[4],
    )


def gather_pages(pages: Tensor, page_table: Tensor) -> Tensor:
    """`[P, page, H, D]` through `[B, M]` -> `[B, M * page, H, D]`. Negative entries, past the end, read page 0."""
    if pages.shape[0] == 0:
        return pages.new_zeros((page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:]))
    picked = pages[page_table.long().clamp(min=0)]
    return picked.reshape(page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Paged reference; see `attnops.paged_attention`."""
    if holes:
        rules_of = how(mask=mask, causal=causal, window_left=window_left, window_right=window_right, attention_chunk=attention_chunk)
        pages, size = k_pages.shape[:2]
        page_table, seq_lens = named_pages(page_table, seq_lens, cu_seqlens_q, num_pages=pages, page_size=size, **rules_of)
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    like = result_dtype(query, q_scale)
    ends = seq_lens.long()
    keys = page_table.shape[1] * k_pages.shape[1]
    see = visible(max_seqlen_q, keys, ends - lengths_of(cu_seqlens_q), None, ends, rules)
    inside = (torch.arange(keys, device=query.device)[None] < ends[:, None])[..., None, None]
    zero = torch.zeros((), dtype=torch.float64 if like == torch.float64 else torch.float32, device=query.device)
    out, z = attend(
        wide_query(pad(_indexable(query, like), cu_seqlens_q, max_seqlen_q), q_scale),
        torch.where(inside, dequantise(gather_pages(k_pages, page_table), k_scale, like), zero),
        torch.where(inside, dequantise(gather_pages(v_pages, page_table), v_scale, like), zero),
        see,
        padded_mask(mask, cu_seqlens_q, max_seqlen_q, keys),
        sinks,
        rules,
        None if temperature is None else pad(temperature, cu_seqlens_q, max_seqlen_q),
    )
    tokens = query.shape[0]
    output.copy_(unpad(out, cu_seqlens_q, tokens))
    if lse is not None:
        lse.copy_(unpad(z.transpose(1, 2), cu_seqlens_q, tokens, float("-inf")))
