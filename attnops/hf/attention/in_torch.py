"""Attention in plain torch: what no kernel does, and what a tool that records the model shall
see."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop, pad

from attnops.core.tensors import Rules, dense_visible, dequantise, wide
from attnops.ops.attention import by_sdpa
from attnops.ops.attention.record import Attention
from attnops.ops.attention.reference import scores


def in_torchs_ops(call: Attention) -> Tensor:
    """`[B, S, Hq, Dv]` for a tool that records the model: the attention that was replaced."""
    if by_sdpa.says(call):
        return by_sdpa.attention(call)[0]
    return in_torch(call, 0.0)[0]


def in_torch(call: Attention, p: float, keys: int | None = None) -> tuple[Tensor, Tensor]:
    """(`[B, S, Hq, Dv]`, weights `[B, Hq, S, T]`) in plain torch: the formula of the reference,
    with dropout on the probabilities, not rescaled after it. The output is made of these weights,
    so that they have gradients.

    keys: T, where zeros shall follow the weights of the call's keys; None: as many as the call has.

    The random numbers are drawn for `[B, Hq, S, T]` in the query's dtype, as transformers' eager
    attention draws them, so the same seed drops the same weights.
    """
    query, key, value, sinks = call.query, call.key, call.value, call.sinks
    rules = Rules(call.scale, call.causal, call.window_left, -1, call.softcap)
    see = dense_visible(query, key, call.kv_start, call.kv_end, rules)
    logits = scores(wide(query), dequantise(key, None, query.dtype), see, call.mask, rules)
    # Not exp(logits - lse): every weight would have the rounding of a large lse.
    sink = None if sinks is None else sinks.to(logits.dtype)[None, :, None, None]
    top = logits.amax(-1, keepdim=True)
    top = (top if sink is None else torch.maximum(top, sink)).clamp(
        min=torch.finfo(logits.dtype).min
    )
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else torch.exp(sink - top))
    weights = weights / torch.where(total == 0.0, 1.0, total)
    weights = drop(weights.to(query.dtype), p, training=p > 0.0)
    b, h, s, t = weights.shape
    groups = value.shape[2]
    used = weights
    if keys is not None and keys > t:
        weights = pad(weights, (0, keys - t))
        used = weights[..., :t]
    output = torch.einsum("bhgst,bthd->bshgd", used.reshape(b, groups, h // groups, s, t), value)
    return output.reshape(b, s, h, value.shape[3]).contiguous(), weights
