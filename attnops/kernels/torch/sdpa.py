"""`sdpa`: torch.nn.functional.scaled_dot_product_attention, for dense, packed and paged calls.

Masks other than plain causal are written out, and packed or paged requests are padded to a rectangle first, so this is the
kernel of a laptop and of shapes nobody else takes. SDPA's own `is_causal` is top-left aligned; it is used for square calls only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnops.kernel import Inline, Kernel, Need, dtypes, register, without
from attnops.measured import Roofline
from attnops.problem import Problem, surely
from attnops.reference.attention import Rules, compact, dense_visible, no_lse, visible
from attnops.reference.packed import gather_pages, lengths_of, pad, padded_mask, unpad


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """`[B, S, H, D]` in and out."""
    if surely(query.numel() == 0) or surely(key.numel() == 0):
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    cpu = query.device.type == "cpu"
    if mask is not None and mask.dtype not in (torch.bool, query.dtype) and not cpu:
        # On CUDA a mask wider than the query is read as if it were of the query's dtype; all is widened instead.
        q, k, v = (x.to(mask.dtype) for x in (q, k, v))
    one = cpu and surely(query.shape[1] == 1)
    out = _turned(q, k, v, mask, scale, causal, one).to(query.dtype)
    return out if one else compact(out)


def _turned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, one: bool) -> Tensor:
    """`[B, H, S, D]` in, `[B, S, H, D]` out, contiguous if `one`: a query of one token on a CPU."""
    group = int(q.shape[1]) // int(k.shape[1])
    if not one:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group != 1)
        return out.transpose(1, 2)
    b, hq, _, d = q.shape
    if group < MANY:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=group != 1)
    else:
        # A group's heads are rows of one head's query, and its keys are read once for all of them.
        if mask is not None and mask.shape[1] != 1:
            mask = mask.reshape(mask.shape[0], k.shape[1], group, mask.shape[3])
        out = scaled_dot_product_attention(q.reshape(b, k.shape[1], group, d), k, v, attn_mask=mask, scale=scale)
    return out.reshape(b, 1, hq, v.shape[3])


MANY = 4
"""Query heads a key head from which it pays on a CPU to have them as rows: the result is copied back into their order."""


def _join(see: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One mask of `see` `[B, S, K]` and the caller's mask `[B, H, S, K]`."""
    if mask is not None and mask.dtype not in (torch.bool, dtype):
        # SDPA takes the query's dtype or float32; a position bias of a long context does not survive the query's rounding.
        mask = mask.to(torch.promote_types(dtype, torch.float32))
    if see is None:
        return mask
    if mask is None:
        return see[:, None]
    if mask.dtype == torch.bool:
        return mask & see[:, None]
    return mask.masked_fill(~see[:, None], float("-inf"))


def _silence(output: Tensor, mask: Tensor | None) -> Tensor:
    """A query that sees no key gives 0; SDPA's backends differ there. output `[B, S, H, D]`, mask `[B, H, S, K]`."""
    if mask is None or output.device.type == "cpu":  # whose two backends give 0 by themselves
        return output
    blind = ~mask.any(-1) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1)
    return output.masked_fill(blind.transpose(1, 2)[..., None], 0.0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    return_lse: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`."""
    windowed = window_left >= 0 or (window_right >= 0 and not causal) or attention_chunk > 0
    ranged = kv_start is not None or kv_end is not None
    if causal and not windowed and not ranged and surely(query.shape[1] == 1):
        causal = False  # one query at the last key sees them all
    if mask is None and not windowed and not ranged and (not causal or surely(query.shape[1] == key.shape[1])):
        return _sdpa(query, key, value, None, scale, causal), no_lse(query)
    see = dense_visible(query, key, kv_start, kv_end, Rules(scale, causal, window_left, window_right, softcap, attention_chunk))
    joined = _join(see, mask, query.dtype)
    if kv_start is not None or kv_end is not None:
        value = _drop_unseen(value, kv_start, kv_end)
        key = _drop_unseen(key, kv_start, kv_end)
    return _silence(_sdpa(query, key, value, joined, scale, False), joined), no_lse(query)


def _drop_unseen(x: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
    j = torch.arange(x.shape[1], device=x.device)[None]
    outside = torch.zeros_like(j, dtype=torch.bool)
    if start is not None:
        outside = outside | (j < start[:, None])
    if end is not None:
        outside = outside | (j >= end[:, None])
    return x.masked_fill(outside[..., None, None], 0.0)


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
    attention_chunk: int = 0,
    return_lse: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`."""
    ends = lengths_of(cu_seqlens_k)
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    see = visible(max_seqlen_q, max_seqlen_k, ends - lengths_of(cu_seqlens_q), None, ends, rules)
    joined = _join(see, padded_mask(mask, cu_seqlens_q, max_seqlen_q, max_seqlen_k), query.dtype)
    padded = (pad(query, cu_seqlens_q, max_seqlen_q), pad(key, cu_seqlens_k, max_seqlen_k), pad(value, cu_seqlens_k, max_seqlen_k))
    out = _silence(_sdpa(*padded, joined, scale, False), joined)
    return compact(unpad(out, cu_seqlens_q, query.shape[0])), no_lse(query)


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
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`."""
    ends = seq_lens.long()
    keys = page_table.shape[1] * k_pages.shape[1]
    # One token of each request: nothing is padded, and the token sees what is there.
    alone = not padded and surely(max_seqlen_q == 1) and surely(query.shape[0] == page_table.shape[0])
    before = ends - 1 if alone else ends - lengths_of(cu_seqlens_q)
    rules = Rules(scale, causal and not alone, window_left, window_right, softcap, attention_chunk)
    see = visible(max_seqlen_q, keys, before, None, ends, rules)
    key = _drop_unseen(gather_pages(k_pages, page_table), None, ends)
    value = _drop_unseen(gather_pages(v_pages, page_table), None, ends)
    if alone:
        joined = _join(see, None if mask is None else mask[:, None, None, :keys], query.dtype)
        output.copy_(_silence(_sdpa(query[:, None], key, value, joined, scale, False), joined)[:, 0])
        return
    joined = _join(see, padded_mask(mask, cu_seqlens_q, max_seqlen_q, keys), query.dtype)
    out = _silence(_sdpa(pad(query, cu_seqlens_q, max_seqlen_q), key, value, joined, scale, False), joined)
    output.copy_(unpad(out, cu_seqlens_q, query.shape[0]))


PLAIN = Roofline(11.4, 0.91, 0.68, 0.0007, 1700)
MASKED = Roofline(50.0, 0.12, 0.3, 0.0091, 8200)
PADDED = Roofline(115.0, 0.12, 0.3, 0.0091, 8200)


def _cost_us(p: Problem) -> float:
    """Packed and paged calls are padded into a dense one; a mask that has to be written costs a pass over the logits."""
    if p.op != "attention":
        return PADDED(p)
    unequal = p.causal and not p.sizes_equal and p.queries.hi != 1
    return (MASKED if p.mask != "none" or p.windowed or p.attention_chunk or p.kv_range or unequal else PLAIN)(p)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMMON: tuple[Need, ...] = (dtypes(*FLOATS), *without("softcap", "sinks", "kv_scales", "lse"))


def _on_cpu(p: Problem) -> bool:
    return p.target.device == "cpu"


def _one_token_on_cpu(p: Problem) -> bool:
    return p.target.device == "cpu" and p.queries.hi == 1 and not p.padded


ABOUT = "torch scaled_dot_product_attention"
for _op, _run, _where, _more in (
    ("attention", attention, _on_cpu, ""),
    ("varlen_attention", varlen_attention, None, ", requests padded"),
    ("paged_attention", paged_attention, _one_token_on_cpu, ", pages gathered"),
):
    register(Kernel("sdpa", _op, _run, needs=COMMON, cost_us=_cost_us, inline=Inline(_where) if _where else None, about=ABOUT + _more))
