"""Reference attention. One core serves dense, packed and paged calls: they differ in where keys are stored, not in the formula.

    s[i, j] = scale * q[i] . k[j];  s = softcap * tanh(s / softcap) if softcap;  s *= temperature[i];  s += mask
    m = max_j s[i, j] (and the sink),  total = sum_j exp(s[i, j] - m) + exp(sink - m)
    p = exp(s - m) / total,  lse = m + log(total): never exp(s - lse), whose error grows with the logits
    output[i] = sum_j p[i, j] v[j];  a query that sees no key gives 0, and lse = -inf (or the sink)

Query i of a request has position i + offset; it sees key j when start <= j < end, j <= position (causal),
position - left <= j <= position + right (window, -1 unbounded), and floor(j / chunk) == floor(position / chunk) (chunk, 0 off).
Softmax with sinks: https://arxiv.org/abs/2309.17453 as gpt-oss uses it (a learned logit in the denominator). Soft-capping: Gemma 2,
https://arxiv.org/abs/2408.00118, section 2. Chunks: Llama 4's local attention, as FlashAttention-3 has it (hopper/mask.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnops.call import changed

if TYPE_CHECKING:
    from attnops.ops.dense import Attention, AttentionBackward
    from attnops.ops.varlen import VarlenAttentionBackward


class Rules(NamedTuple):
    """The scale of a call's logits, and the rules of which key a query sees. Those at their defaults are off."""

    scale: float
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    chunk: int = 0

    @classmethod
    def of(cls, call: Any) -> Rules:
        """The rules of a call, of any op. A rule that the record has no argument for is off."""
        window = getattr(call, "window_left", -1), getattr(call, "window_right", -1)
        softcap, chunk = getattr(call, "softcap", 0.0), getattr(call, "attention_chunk", 0)
        return cls(call.scale, getattr(call, "causal", False), *window, softcap, chunk)


def wide(x: Tensor) -> Tensor:
    """float32, or float64 kept."""
    return x if x.dtype == torch.float64 else x.float()


def compact(x: Tensor) -> Tensor:
    """Contiguous with the very strides of a new tensor; `contiguous()` alone leaves odd ones where a size is 0 or 1."""
    if type(x) is Tensor:
        wanted = 1
        for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
            if stride != wanted:
                break
            wanted *= max(size, 1)
        else:
            return x  # the three calls below take longer than this loop
    return x.contiguous().flatten().view(x.shape)


def dequantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x` `[..., Hkv, D]` times its scale `[1]` or `[Hkv]`, in the accumulation dtype of `dtype`."""
    out = x.double() if dtype == torch.float64 else x.float()
    return out if scale is None else out * scale.to(out.dtype).reshape(-1, 1)


def visible(queries: int, keys: int, offset: Tensor, start: Tensor | None, end: Tensor | None, rules: Rules) -> Tensor | None:
    """bool `[B or 1, S, K]` of which key each query sees, or None when all see all. offset, start, end: `[B or 1]`."""
    if not (rules.causal or rules.left >= 0 or rules.right >= 0 or rules.chunk or start is not None or end is not None):
        return None
    j = torch.arange(keys, device=offset.device)
    position = torch.arange(queries, device=offset.device)[None, :, None] + offset[:, None, None]
    return near(within(j[None], start, end)[:, None].expand(-1, queries, -1), position, j, rules)


def within(j: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
    """bool `[B or 1, K]`: start <= j < end, of each request. j: `[1, K]`; start, end: `[B or 1]`."""
    see = torch.ones_like(j, dtype=torch.bool)
    if start is not None:
        see = see & (j >= start[:, None])
    return see if end is None else see & (j < end[:, None])


def near(see: Tensor, position: Tensor, j: Tensor, rules: Rules) -> Tensor:
    """`see`, and what causality, window and chunk let a query at `position` see of key j."""
    if rules.causal:
        see = see & (j <= position)
    if rules.left >= 0:
        see = see & (j >= position - rules.left)
    if rules.right >= 0:
        see = see & (j <= position + rules.right)
    if rules.chunk:
        # The chunk of a query before the first key holds no key.
        first = torch.div(position, rules.chunk, rounding_mode="floor") * rules.chunk
        see = see & (j >= first) & (j < first + rules.chunk)
    return see


def scores(query: Tensor, key: Tensor, see: Tensor | None, mask: Tensor | None, rules: Rules, temperature: Tensor | None = None) -> Tensor:
    """float `[B, Hq, S, K]` logits, -inf where unseen. query `[B, S, Hq, D]`, key `[B, K, Hkv, D]` already wide.

    temperature: `[B, S]`, a factor of each query's capped logits.
    """
    b, s, hq, d = query.shape
    hkv = key.shape[2]
    logits = torch.einsum("bshgd,bkhd->bhgsk", query.reshape(b, s, hkv, hq // hkv, d), key).reshape(b, hq, s, key.shape[1])
    logits = logits * rules.scale
    if rules.softcap > 0:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    if temperature is not None:
        logits = logits * temperature[:, None, :, None].to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask.to(logits.dtype)
    return logits if see is None else logits.masked_fill(~see[:, None], float("-inf"))


def attend(
    query: Tensor, key: Tensor, value: Tensor, see: Tensor | None, mask: Tensor | None, sinks: Tensor | None, rules: Rules,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output `[B, S, Hq, Dv]`, lse `[B, Hq, S]`), both in the accumulation dtype; inputs already wide."""
    logits = scores(query, key, see, mask, rules, temperature)
    p, top, total = softmax(logits, sinks)
    lse = top + torch.log(total)
    b, hq, s, k = p.shape
    hkv = value.shape[2]
    out = torch.einsum("bhgsk,bkhd->bshgd", p.reshape(b, hkv, hq // hkv, s, k), value)
    return out.reshape(b, s, hq, value.shape[3]), lse


def softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights like `logits`, largest logit, sum of exp(logit - largest)), the last two `[B, Hq, S]`; the sum of no key is 0."""
    shape = logits.shape[:-1]
    top = logits.amax(-1) if logits.shape[-1] else logits.new_full(shape, float("-inf"))
    if sinks is not None:
        top = torch.maximum(top, sinks.to(top.dtype)[None, :, None].expand(shape))
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(logits - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.to(top.dtype)[None, :, None] - top)
    return weights / torch.where(total == 0, 1.0, total)[..., None], top, total


def attention(call: Attention) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.attention`."""
    query, like = call.query, result_dtype(call.query, call.q_scale)
    see = dense_visible(query, call.key, call.kv_start, call.kv_end, Rules.of(call))
    key = dequantise(call.key, call.k_scale, like)
    value = in_range(dequantise(call.value, call.v_scale, like), call.kv_start, call.kv_end)
    out, lse = attend(wide_query(query, call.q_scale), key, value, see, call.mask, call.sinks, Rules.of(call))
    return compact(out.to(like)), compact(lse.transpose(1, 2).float()) if call.return_lse else no_lse(query)


def result_dtype(query: Tensor, q_scale: Tensor | None) -> torch.dtype:
    """The query's dtype; bfloat16 for a quantised one."""
    if q_scale is None:
        return query.dtype
    # Only who asks for the exact result passes a wider scale than the op takes.
    return torch.float64 if q_scale.dtype == torch.float64 else torch.bfloat16


def wide_query(query: Tensor, q_scale: Tensor | None) -> Tensor:
    """`[..., Hq, D]` in the accumulation dtype, times its scale `[1]` or `[Hkv]`, of which each serves a group of heads."""
    if q_scale is None:
        return wide(query)
    return dequantise(query, q_scale.repeat_interleave(query.shape[-2] // q_scale.shape[0]), result_dtype(query, q_scale))


def no_lse(query: Tensor) -> Tensor:
    """The `[0]` float32 tensor returned where a call asks for no lse."""
    return query.new_empty(0, dtype=torch.float32)


def dense_visible(query: Tensor, key: Tensor, kv_start: Tensor | None, kv_end: Tensor | None, rules: Rules) -> Tensor | None:
    """`visible` for a dense call: the last query has the position of the last visible key."""
    queries, keys = query.shape[1], key.shape[1]
    end = torch.full((1,), keys, device=query.device) if kv_end is None else kv_end
    return visible(queries, keys, end - queries, kv_start, kv_end, rules)


def in_range(rows: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
    """`rows` `[B, K, Hkv, D]`, 0 outside of each request's keys `[start, end)`: they may hold NaN there, and 0 * NaN is NaN."""
    if start is None and end is None:
        return rows
    inside = within(torch.arange(rows.shape[1], device=rows.device)[None], start, end)
    return torch.where(inside[..., None, None], rows, 0.0)


def attention_backward(call: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference of the gradients of query, key, value, mask and sinks (the last two `[0]` where there is none)."""
    see = dense_visible(call.query, call.key, call.kv_start, call.kv_end, Rules.of(call))
    start, end = call.kv_start, call.kv_end
    inside = changed(call, key=in_range(call.key, start, end), value=in_range(call.value, start, end))
    query, key, value, logits, sinks = gradients(inside, see)
    mask = call.query.new_empty(0) if call.mask is None or not call.mask_grad else reduce_to(logits, call.mask)
    return query, key, value, mask, sinks


def gradients(call: AttentionBackward | VarlenAttentionBackward, see: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, the masked logits `[B, Hq, S, K]` and the sinks, of a call whose tensors are dense.

    With p as in the forward, worked out anew, and delta_i = sum_d dO_i O_i - dlse_i:
    dV = p^T dO, ds = p * (dO V^T - delta), dsink = -sum p_sink delta.
    FlashAttention, https://arxiv.org/abs/2205.14135, appendix B; the soft cap adds the factor 1 - (s / softcap)^2.
    """
    rules, sinks = Rules.of(call), call.sinks
    q, k, v, g = wide(call.query), wide(call.key), wide(call.value), wide(call.grad_output)
    bare = scores(q, k, None, None, rules)
    logits = scores(q, k, see, call.mask, rules) if see is not None or call.mask is not None else bare
    p, top, total = softmax(logits, sinks)
    b, hq, s, n = p.shape
    hkv = k.shape[2]

    def group(x: Tensor) -> Tensor:
        return x.reshape(b, hkv, hq // hkv, s, n)

    gg = g.reshape(b, s, hkv, hq // hkv, g.shape[-1])
    delta = (g * wide(call.output)).sum(-1).transpose(1, 2)
    if q.dtype == torch.float64 or call.output.dtype != q.dtype:  # a rounded output would round delta
        delta = (g * torch.einsum("bhgsk,bkhd->bshgd", group(p), v).reshape(g.shape)).sum(-1).transpose(1, 2)
    if call.grad_lse is not None:
        delta = delta - call.grad_lse.transpose(1, 2).to(delta.dtype)
    grad_v = torch.einsum("bhgsk,bshgd->bkhd", group(p), gg)
    grad_p = torch.einsum("bshgd,bkhd->bhgsk", gg, v).reshape(p.shape)
    grad_logits = p * (grad_p - delta[..., None])
    grad_s = grad_logits if rules.softcap == 0 else grad_logits * (1 - (bare / rules.softcap) ** 2)
    grad_s = grad_s * rules.scale
    grad_q = torch.einsum("bhgsk,bkhd->bshgd", group(grad_s), k).reshape(q.shape)
    grad_k = torch.einsum("bhgsk,bshgd->bkhd", group(grad_s), q.reshape(b, s, hkv, hq // hkv, q.shape[-1]))
    grad_sinks = call.query.new_empty(0)
    if sinks is not None:
        p_sink = torch.exp(sinks.to(top.dtype)[None, :, None] - top) / total
        grad_sinks = -(p_sink * delta).sum((0, 2)).to(sinks.dtype)
    pairs = ((grad_q, call.query), (grad_k, call.key), (grad_v, call.value))
    grad_q, grad_k, grad_v = (compact(grad.to(x.dtype)) for grad, x in pairs)
    return grad_q, grad_k, grad_v, grad_logits, grad_sinks


def reduce_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum `grad` over the dims that `like` broadcast over."""
    dims = tuple(i for i, n in enumerate(like.shape) if n == 1 and grad.shape[i] != 1)
    out = grad.sum(dims, keepdim=True) if dims else grad
    return compact(out.to(like.dtype))
