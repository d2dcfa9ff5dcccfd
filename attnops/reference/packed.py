"""Reference packed and paged attention: requests are padded to a rectangle, attended densely, and packed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from attnops.call import changed
from attnops.errors import InvalidInput
from attnops.reference.attention import Rules, attend, compact, dequantise, gradients, in_range, no_lse, result_dtype, visible, wide_query
from attnops.reference.holes import without_holes

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention
    from attnops.ops.paged import PagedAttention
    from attnops.ops.varlen import VarlenAttention, VarlenAttentionBackward
    from attnops.ops.vertical_slash import VerticalSlashAttention


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


def padded_mask(mask: Tensor | None, cu_seqlens_q: Tensor, width: int, keys: int) -> Tensor | None:
    """`[T, K]` -> `[B, 1, width, keys]`."""
    return None if mask is None else pad(mask[:, :keys], cu_seqlens_q, width)[:, None]


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


def gather_pages(pages: Tensor, page_table: Tensor) -> Tensor:
    """`[P, page, H, D]` through `[B, M]` -> `[B, M * page, H, D]`. Negative entries, past the end, read page 0."""
    if pages.shape[0] == 0:
        return pages.new_zeros((page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:]))
    picked = pages[page_table.long().clamp(min=0)]
    return picked.reshape(page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])


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


def write_results(call: Any, output: Tensor, lse: Tensor) -> None:
    """Write `[T, Hq, Dv]` and `[T, Hq]` where the call wants them."""
    call.output.copy_(output)
    if call.lse is not None:
        call.lse.copy_(lse)
