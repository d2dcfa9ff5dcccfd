"""`sdpa`: torch.nn.functional.scaled_dot_product_attention, for dense, packed and paged calls.

Masks other than plain causal are written out, and packed or paged requests are padded to a
rectangle first, so this is the kernel of a laptop and of shapes that no other kernel takes. SDPA's
own `is_causal` is top-left aligned; it is used for square calls only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnops.core.kernel import Inline, Kernel, register
from attnops.core.problem import Problem, surely
from attnops.core.tensors import (
    Rules,
    compact,
    dense_visible,
    gather_pages,
    in_range,
    lengths_of,
    no_lse,
    pad,
    padded_mask,
    unpad,
    visible,
    without_holes,
)
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen
    from attnops.ops.pages import record as paged

MANY = 4
"""Query heads a key head from which it pays on a CPU to have them as rows: the result is copied
back into their order."""


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    see: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """`[B, S, H, D]` in and out; see: `[B, S, K]`, mask: `[B, H, S, K]`."""
    # Sizes that are numbers need no function to be known.
    empty = query.numel() * key.numel() == 0
    if empty is not False and surely(empty):
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    if see is not None or mask is not None:
        mask = _join(see, mask, query.dtype)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    cpu = query.device.type == "cpu"
    one = query.shape[1] == 1
    if cpu and (one is True or surely(one)):
        return _one_token(q, k, v, mask, scale)
    if mask is not None and mask.dtype not in (torch.bool, query.dtype) and not cpu:
        # On CUDA a mask wider than the query is read as if it were of the query's dtype; all is
        # widened instead.
        q, k, v = (x.to(mask.dtype) for x in (q, k, v))
    grouped = int(q.shape[1]) != int(k.shape[1])
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
    if mask is None or cpu:
        return compact(out)
    # SDPA's backends differ in the result of a query that sees no key; those of the CPU give 0 by
    # themselves.
    blind = _sees_nothing(mask).transpose(1, 2)[..., None]
    return compact(out.to(query.dtype)).masked_fill(blind, 0.0)


def _sees_nothing(mask: Tensor) -> Tensor:
    """`[..., S]`: does the query see no key?"""
    return ~mask.any(-1) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1)


def _one_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """A query of one token on a CPU: `[B, H, 1, D]` in, `[B, 1, H, D]` out, contiguous."""
    b, hq, _, d = q.shape
    group = int(hq) // int(k.shape[1])
    if group < MANY:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=group != 1
        )
    else:
        # A group's heads are rows of one head's query, and its keys are read once for all of them.
        if mask is not None and mask.shape[1] != 1:
            mask = mask.reshape(mask.shape[0], k.shape[1], group, mask.shape[3])
        out = scaled_dot_product_attention(
            q.reshape(b, k.shape[1], group, d), k, v, attn_mask=mask, scale=scale
        )
    return out.reshape(b, 1, hq, v.shape[3])


def _join(see: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One mask of `see` `[B, S, K]` and the caller's mask `[B, H, S, K]`."""
    if mask is not None and mask.dtype not in (torch.bool, dtype):
        # SDPA takes the query's dtype or float32; a position bias of a long context does not
        # survive the query's rounding.
        mask = mask.to(torch.promote_types(dtype, torch.float32))
    if see is None:
        return mask
    if mask is None or mask.dtype == torch.bool:
        return see[:, None] if mask is None else mask & see[:, None]
    return mask.masked_fill(~see[:, None], float("-inf"))


def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    query, key, value, causal = call.query, call.key, call.value, call.causal
    start, end = call.kv_start, call.kv_end
    if (
        start is None
        and end is None
        and call.window_left < 0
        and call.attention_chunk <= 0
        and (causal or call.window_right < 0)
    ):
        if causal and surely(query.shape[1] == 1):
            causal = False  # one query at the last key sees them all
        if call.mask is None and (not causal or surely(query.shape[1] == key.shape[1])):
            return _sdpa(query, key, value, call.scale, causal=causal), no_lse(query)
    see = dense_visible(query, key, start, end, Rules.of(call)._replace(causal=causal))
    key, value = in_range(key, start, end), in_range(value, start, end)
    return _sdpa(query, key, value, call.scale, see, call.mask), no_lse(query)


def heads_first(call: dense.Attention) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """A function of query, key and value `[B, H, S, D]` for calls like `call`, or None where those
    three do not say all.

    Its result is `[B, S, H, Dv]`. A caller whose tensors are heads first saves the views there and
    back, which take the host as long as the choice of a kernel.
    """
    batch, queries, heads, _ = call.query.shape
    keys, scale, grouped, causal = (
        call.key.shape[1],
        call.scale,
        heads != call.key.shape[2],
        call.causal and queries != 1,
    )
    given = (call.mask, call.kv_start, call.kv_end)
    if (
        given != (None, None, None)
        or call.window_left >= 0
        or call.window_right >= 0
        or call.attention_chunk
    ):
        return None
    if not batch * queries * keys or (causal and queries != keys):
        return None
    if call.query.is_cpu and queries == 1:
        return lambda q, k, v: _one_token(q, k, v, None, scale)
    return lambda q, k, v: (
        scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        .transpose(1, 2)
        .contiguous()
    )


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    cu_q, cu_k, queries, keys = (
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
    )
    ends = lengths_of(cu_k)
    see = visible(queries, keys, ends - lengths_of(cu_q), None, ends, Rules.of(call))
    mask = padded_mask(call.mask, cu_q, queries, keys)
    out = _sdpa(
        pad(call.query, cu_q, queries),
        pad(call.key, cu_k, keys),
        pad(call.value, cu_k, keys),
        call.scale,
        see,
        mask,
    )
    return compact(unpad(out, cu_q, call.query.shape[0])), no_lse(call.query)


def paged_attention(call: paged.PagedAttention) -> None:
    if call.holes:
        # On a GPU the op chooses a kernel of one launch.
        if call.query.is_cpu:
            call = without_holes(call, call.k_pages)
        elif (by_op := call.spec["holes"].without) is not None:
            call = by_op(call)
    query, table, mask, cu_seqlens, queries = (
        call.query,
        call.page_table,
        call.mask,
        call.cu_seqlens_q,
        call.max_seqlen_q,
    )
    ends, rules = call.seq_lens.long(), Rules.of(call)
    keys = table.shape[1] * call.k_pages.shape[1]
    # One token of each request: no row is padding, and the token sees every key.
    alone = not call.padded and surely(queries == 1) and surely(query.shape[0] == table.shape[0])
    if alone:
        rules, before = rules._replace(causal=False), ends - 1
    else:
        before = ends - lengths_of(cu_seqlens)
    see = visible(queries, keys, before, None, ends, rules)
    key = in_range(gather_pages(call.k_pages, table), None, ends)
    value = in_range(gather_pages(call.v_pages, table), None, ends)
    if alone:
        mask = None if mask is None else mask[:, None, None, :keys]
        out = _sdpa(query[:, None], key, value, call.scale, see, mask)[:, 0]
    else:
        out = _sdpa(
            pad(query, cu_seqlens, queries),
            key,
            value,
            call.scale,
            see,
            padded_mask(mask, cu_seqlens, queries, keys),
        )
        out = unpad(out, cu_seqlens, query.shape[0])
    call.output.copy_(out)


PLAIN = Roofline(11.4, 0.91, 0.68, 0.0007, 1700)
MASKED = Roofline(50.0, 0.12, 0.3, 0.0091, 8200)
PADDED = Roofline(115.0, 0.12, 0.3, 0.0091, 8200)


def _cost_us(p: Problem) -> float:
    """Packed and paged calls are padded into a dense one; a mask that has to be written costs a
    pass over the logits."""
    if p.op != "attention":
        return PADDED(p)
    rules, unequal = p.rules, p.rules.causal and not p.step.sizes_equal and p.sizes.queries.hi != 1
    return (
        MASKED
        if rules.mask != "none"
        or rules.windowed
        or rules.attention_chunk
        or rules.kv_range
        or unequal
        else PLAIN
    )(p)


RULES = frozenset({"mask", "causal", "window_left", "window_right", "attention_chunk"})
ONE_EACH = Inline(
    lambda p: p.target.device == "cpu" and p.sizes.queries.hi == 1 and not p.step.padded
)
for _run, _takes, _inline, _how in (
    (attention, RULES | {"kv_start", "kv_end"}, Inline(lambda p: p.target.device == "cpu"), ""),
    (varlen_attention, RULES, None, ", requests padded"),
    (paged_attention, RULES | {"holes"}, ONE_EACH, ", pages gathered"),
):
    register(
        Kernel(
            "sdpa",
            _run.__name__,
            _run,
            takes=_takes,
            dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
            cost_us=_cost_us,
            inline=_inline,
            about=f"torch scaled_dot_product_attention{_how}",
        )
    )
