"""Reference attention. One core serves dense, packed, paged and latent calls: they differ in where
keys are stored, not in the formula. Packed requests are padded to a rectangle, attended densely,
and packed again.

    s[i, j] = scale * q[i] . k[j];  s = softcap * tanh(s / softcap) if softcap;  s *=
    temperature[i];  s += mask m = max_j s[i, j] (and the sink),  total = sum_j exp(s[i, j] - m) +
    exp(sink - m)
    p = exp(s - m) / total,  lse = m + log(total): never exp(s - lse), whose error grows with the
        logits
    output[i] = sum_j p[i, j] v[j];  a query that sees no key gives 0, and lse = -inf (or the sink)

Query i of a request has position i + offset; it sees key j when start <= j < end, j <= position
(causal), position - left <= j <= position + right (window, -1 unbounded), and floor(j / chunk) ==
floor(position / chunk) (chunk, 0 off). Softmax with sinks: https://arxiv.org/abs/2309.17453 as
gpt-oss uses it (a learned logit in the denominator). Soft-capping: Gemma 2,
https://arxiv.org/abs/2408.00118, section 2. Chunks: Llama 4's local attention, as FlashAttention-3
has it (hopper/mask.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.record import changed
from attnops.core.tensors import (
    Rules,
    compact,
    dense_visible,
    dequantise,
    in_range,
    lengths_of,
    no_lse,
    pad,
    padded_mask,
    result_dtype,
    unpad,
    visible,
    wide,
    wide_query,
    write_results,
)

if TYPE_CHECKING:
    from attnops.ops.attention.merge import MergeState, MergeStates
    from attnops.ops.attention.record import Attention, AttentionBackward
    from attnops.ops.attention.varlen import VarlenAttention, VarlenAttentionBackward
    from attnops.ops.latent.record import MlaAttention
    from attnops.ops.pages.record import PagedAttention
    from attnops.ops.sparse.vertical_slash import VerticalSlashAttention


def scores(
    query: Tensor,
    key: Tensor,
    see: Tensor | None,
    mask: Tensor | None,
    rules: Rules,
    temperature: Tensor | None = None,
) -> Tensor:
    """float `[B, Hq, S, K]` logits, -inf where unseen. query `[B, S, Hq, D]`, key `[B, K, Hkv, D]`
    already wide.

    temperature: `[B, S]`, a factor of each query's capped logits.
    """
    b, s, hq, d = query.shape
    hkv = key.shape[2]
    logits = torch.einsum("bshgd,bkhd->bhgsk", query.reshape(b, s, hkv, hq // hkv, d), key).reshape(
        b, hq, s, key.shape[1]
    )
    logits = logits * rules.scale
    if rules.softcap > 0:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    if temperature is not None:
        logits = logits * temperature[:, None, :, None].to(logits.dtype)
    if mask is not None:
        logits = (
            logits.masked_fill(~mask, float("-inf"))
            if mask.dtype == torch.bool
            else logits + mask.to(logits.dtype)
        )
    return logits if see is None else logits.masked_fill(~see[:, None], float("-inf"))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    see: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    rules: Rules,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output `[B, S, Hq, Dv]`, lse `[B, Hq, S]`), both in the accumulation dtype; inputs already
    wide."""
    logits = scores(query, key, see, mask, rules, temperature)
    p, top, total = softmax(logits, sinks)
    lse = top + torch.log(total)
    b, hq, s, k = p.shape
    hkv = value.shape[2]
    out = torch.einsum("bhgsk,bkhd->bshgd", p.reshape(b, hkv, hq // hkv, s, k), value)
    return out.reshape(b, s, hq, value.shape[3]), lse


def _finite(top: Tensor) -> Tensor:
    """The greatest logit, or 0 where all are -inf."""
    return torch.where(top == float("-inf"), 0.0, top)


def softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights like `logits`, largest logit, sum of exp(logit - largest)), the last two
    `[B, Hq, S]`; the sum of no key is 0."""
    shape = logits.shape[:-1]
    top = logits.amax(-1) if logits.shape[-1] else logits.new_full(shape, float("-inf"))
    if sinks is not None:
        top = torch.maximum(top, sinks.to(top.dtype)[None, :, None].expand(shape))
    top = _finite(top)
    weights = torch.exp(logits - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + sink_weight(sinks, top)
    return weights / torch.where(total == 0, 1.0, total)[..., None], top, total


def sink_weight(sinks: Tensor, top: Tensor) -> Tensor:
    """exp(sink - top), `[B, Hq, S]`. A sink of +inf, which is then the top, has all of the
    weight."""
    sink = sinks.to(top.dtype)[None, :, None].expand(top.shape)
    return torch.where(sink == top, 1.0, torch.exp(sink - top))


def attention(call: Attention) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.attention`."""
    query, like = call.query, result_dtype(call.query, call.q_scale)
    see = dense_visible(query, call.key, call.kv_start, call.kv_end, Rules.of(call))
    key = dequantise(call.key, call.k_scale, like)
    value = in_range(dequantise(call.value, call.v_scale, like), call.kv_start, call.kv_end)
    out, lse = attend(
        wide_query(query, call.q_scale), key, value, see, call.mask, call.sinks, Rules.of(call)
    )
    return compact(out.to(like)), compact(
        lse.transpose(1, 2).float()
    ) if call.return_lse else no_lse(query)


def attention_backward(call: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference of the gradients of query, key, value, mask and sinks (the last two `[0]` where
    there is none)."""
    see = dense_visible(call.query, call.key, call.kv_start, call.kv_end, Rules.of(call))
    start, end = call.kv_start, call.kv_end
    inside = changed(
        call, key=in_range(call.key, start, end), value=in_range(call.value, start, end)
    )
    query, key, value, logits, sinks = gradients(inside, see)
    mask = (
        call.query.new_empty(0)
        if call.mask is None or not call.mask_grad
        else reduce_to(logits, call.mask)
    )
    return query, key, value, mask, sinks


def gradients(
    call: AttentionBackward | VarlenAttentionBackward, see: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, the masked logits `[B, Hq, S, K]` and the sinks, of a call
    whose tensors are dense.

    With p as in the forward, worked out anew, and delta_i = sum_d dO_i O_i - dlse_i:
    dV = p^T dO, ds = p * (dO V^T - delta), dsink = -sum p_sink delta.
    FlashAttention, https://arxiv.org/abs/2205.14135, appendix B; the soft cap adds the factor 1 -
    (s / softcap)^2.
    """
    rules, sinks = Rules.of(call), call.sinks
    q, k, v, g = wide(call.query), wide(call.key), wide(call.value), wide(call.grad_output)
    bare = scores(q, k, None, None, rules)
    logits = (
        scores(q, k, see, call.mask, rules) if see is not None or call.mask is not None else bare
    )
    p, top, total = softmax(logits, sinks)
    b, hq, s, n = p.shape
    hkv = k.shape[2]

    def group(x: Tensor) -> Tensor:
        return x.reshape(b, hkv, hq // hkv, s, n)

    gg = g.reshape(b, s, hkv, hq // hkv, g.shape[-1])
    delta = (g * wide(call.output)).sum(-1).transpose(1, 2)
    if (
        q.dtype == torch.float64 or call.output.dtype != q.dtype
    ):  # a rounded output would round delta
        delta = (
            (g * torch.einsum("bhgsk,bkhd->bshgd", group(p), v).reshape(g.shape))
            .sum(-1)
            .transpose(1, 2)
        )
    if call.grad_lse is not None:
        delta = delta - call.grad_lse.transpose(1, 2).to(delta.dtype)
    grad_v = torch.einsum("bhgsk,bshgd->bkhd", group(p), gg)
    grad_p = torch.einsum("bshgd,bkhd->bhgsk", gg, v).reshape(p.shape)
    grad_logits = p * (grad_p - delta[..., None])
    grad_s = grad_logits if rules.softcap == 0 else grad_logits * (1 - (bare / rules.softcap) ** 2)
    grad_s = grad_s * rules.scale
    grad_q = torch.einsum("bhgsk,bkhd->bshgd", group(grad_s), k).reshape(q.shape)
    grad_k = torch.einsum(
        "bhgsk,bshgd->bkhd", group(grad_s), q.reshape(b, s, hkv, hq // hkv, q.shape[-1])
    )
    grad_sinks = call.query.new_empty(0)
    if sinks is not None:
        p_sink = sink_weight(sinks, top) / total
        grad_sinks = -(p_sink * delta).sum((0, 2)).to(sinks.dtype)
    pairs = ((grad_q, call.query), (grad_k, call.key), (grad_v, call.value))
    grad_q, grad_k, grad_v = (compact(grad.to(x.dtype)) for grad, x in pairs)
    return grad_q, grad_k, grad_v, grad_logits, grad_sinks


def reduce_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum `grad` over the dims that `like` broadcast over."""
    dims = tuple(i for i, n in enumerate(like.shape) if n == 1 and grad.shape[i] != 1)
    out = grad.sum(dims, keepdim=True) if dims else grad
    return compact(out.to(like.dtype))


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.varlen_attention`."""
    keys, longest, like = (
        call.cu_seqlens_k,
        call.max_seqlen_k,
        result_dtype(call.query, call.q_scale),
    )
    key, value = (
        pad(dequantise(x, scale, like), keys, longest)
        for x, scale in ((call.key, call.k_scale), (call.value, call.v_scale))
    )
    mask = padded_mask(call.mask, call.cu_seqlens_q, call.max_seqlen_q, longest)
    out, lse = over_requests(
        call,
        wide_query(call.query, call.q_scale),
        key,
        value,
        lengths_of(keys),
        mask,
        Rules.of(call),
    )
    return compact(out.to(like)), no_lse(call.query) if lse is None else compact(lse.float())


def over_requests(
    call: VarlenAttention | PagedAttention | MlaAttention | VerticalSlashAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    mask: Tensor | None,
    rules: Rules,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output `[T, Hq, Dv]`, lse `[T, Hq]` if the call asks for it) of a packed query over keys and
    values `[B, K, Hkv, ...]` that end at `ends`; inputs wide."""
    starts, width = call.cu_seqlens_q, call.max_seqlen_q
    see = visible(width, key.shape[1], ends - lengths_of(starts), None, ends, rules)
    temperature = None if temperature is None else pad(temperature, starts, width)
    out, lse = attend(
        pad(query, starts, width),
        key,
        value,
        see,
        mask,
        getattr(call, "sinks", None),
        rules,
        temperature,
    )
    asked = getattr(call, "return_lse", False) or getattr(call, "lse", None) is not None
    rows = unpad(lse.transpose(1, 2), starts, query.shape[0], float("-inf")) if asked else None
    return unpad(out, starts, query.shape[0]), rows


def varlen_attention_backward(
    call: VarlenAttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of the gradients of query, key, value and sinks (`[0]` where there are
    none)."""
    query, key, value, _, sinks = gradients(*padded(call))
    where = (
        (query, call.cu_seqlens_q, call.query),
        (key, call.cu_seqlens_k, call.key),
        (value, call.cu_seqlens_k, call.value),
    )
    query, key, value = (compact(unpad(grad, cu, x.shape[0])) for grad, cu, x in where)
    return query, key, value, sinks


def padded(call: VarlenAttentionBackward) -> tuple[VarlenAttentionBackward, Tensor | None]:
    """(the call with a row `[B, width, ...]` for each request, which key each query sees)."""
    queries, keys, longest = call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q
    by_query = {n: getattr(call, n) for n in ("grad_output", "grad_lse", "query", "output", "lse")}
    dense = {n: pad(x, queries, longest) for n, x in by_query.items() if x is not None}
    dense |= {n: pad(getattr(call, n), keys, call.max_seqlen_k) for n in ("key", "value")}
    ends = lengths_of(keys)
    see = visible(
        longest, call.max_seqlen_k, ends - lengths_of(queries), None, ends, Rules.of(call)
    )
    return changed(
        call, mask=padded_mask(call.mask, queries, longest, call.max_seqlen_k), **dense
    ), see


def empty_as_minus_inf(lse: Tensor) -> Tensor:
    """`lse` with -inf for +inf, which kernels of other packages write where no key is seen."""
    return torch.where(lse == float("inf"), float("-inf"), lse)


def _logits(lse: Tensor, output: Tensor) -> Tensor:
    """An lse in the accumulation dtype of its output."""
    return empty_as_minus_inf(lse.to(torch.promote_types(output.dtype, torch.float32)))


def merge_state(call: MergeState) -> tuple[Tensor, Tensor]:
    """merged = (exp(a - m) O_a + exp(b - m) O_b) / (exp(a - m) + exp(b - m)), lse = m + log(...), m
    = max(a, b)."""
    output_a, output_b = call.output_a, call.output_b
    a, b = (_logits(lse, output_a) for lse in (call.lse_a, call.lse_b))
    m = _finite(torch.maximum(a, b))
    wa, wb = torch.exp(a - m), torch.exp(b - m)
    total = wa + wb
    safe = torch.where(total > 0, total, 1.0)

    def part(output: Tensor, weight: Tensor) -> Tensor:
        # An empty side has weight 0 and may hold anything.
        return (
            torch.where((weight > 0)[..., None], output.to(weight.dtype), 0.0)
            * (weight / safe)[..., None]
        )

    merged = part(output_a, wa) + part(output_b, wb)
    return compact(merged.to(output_a.dtype)), compact((m + torch.log(total)).float())


def merge_states(call: MergeStates) -> tuple[Tensor, Tensor]:
    """As `merge_state`, over the parts in dim 1."""
    outputs = call.outputs
    z = _logits(call.lses, outputs)
    m = _finite(z.amax(1, keepdim=True))
    weights = torch.exp(z - m)
    total = weights.sum(1)
    # An empty part has weight 0 and may hold anything.
    parts = (
        torch.where((weights > 0)[..., None], outputs.to(weights.dtype), 0.0) * weights[..., None]
    )
    merged = parts.sum(1) / torch.where(total > 0, total, 1.0)[..., None]
    return compact(merged.to(outputs.dtype)), compact((m[:, 0] + torch.log(total)).float())


def merge_gradients(
    outputs: Tensor,
    lses: Tensor,
    merged: Tensor,
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the `outputs` `[T, N, H, D]` and `lses` `[T, N, H]` of the parts of `merged`
    `[T, H, D]`. None is zero.

    With p the share of a part, exp(lse_i) / sum exp(lse): grad output_i = p g, and grad lse_i = p
    (g . (output_i - merged) + grad_lse).
    """
    z = _logits(lses, outputs)
    wide, weights = z.dtype, torch.exp(z - _finite(z.amax(1, keepdim=True)))
    total = weights.sum(1, keepdim=True)
    shares = weights / torch.where(total > 0, total, 1.0)
    # An empty part has share 0 and may hold anything.
    found, more = (
        torch.zeros_like(outputs),
        torch.zeros_like(shares) if grad_lse is None else grad_lse.to(wide)[:, None],
    )
    if grad_output is not None:
        g = grad_output.to(wide)[:, None]
        held = torch.where((shares > 0)[..., None], outputs.to(wide), 0.0)
        found, more = (
            (shares[..., None] * g).to(outputs.dtype),
            more + (g * (held - merged.to(wide)[:, None])).sum(-1),
        )
    return found, (shares * more).to(lses.dtype)


def attend_pages(
    call: PagedAttention | MlaAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    temperature: Tensor | None = None,
) -> None:
    """Write output and lse of a call, given its query `[T, ...]` and its gathered pages
    `[B, K, H, D]`, in the accumulation dtype."""
    ends = call.seq_lens.long()
    mask = padded_mask(call.mask, call.cu_seqlens_q, call.max_seqlen_q, key.shape[1])
    key, value = in_range(key, None, ends), in_range(value, None, ends)
    write_results(
        call, *over_requests(call, query, key, value, ends, mask, Rules.of(call), temperature)
    )
