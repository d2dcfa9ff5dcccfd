"""`flex`: torch.nn.attention.flex_attention, which compiles a kernel for the very mask and score function of the call.

Soft cap, windows, masks, key ranges and sinks all become part of the generated kernel. On CUDA it is compiled at first use of
each shape class; on CPU it runs uncompiled (torch's own unfused form), which is right but no faster than `reference`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.kernel import Kernel, Need, dtypes, register, without
from attnops.problem import Problem, Refusal
from attnops.reference.attention import Rules, compact, no_lse
from attnops.reference.packed import lengths_of, rows_of


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
    return_lse: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`."""
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    full = torch.full((batch,), keys, device=query.device, dtype=torch.int64)
    end = full if kv_end is None else kv_end.long()
    start = torch.zeros_like(full) if kv_start is None else kv_start.long()
    rules = Rules(scale, causal, window_left, window_right, softcap)
    if mask is not None:
        mask = mask.expand(batch, query.shape[2], queries, keys)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= start[b]) & (j < end[b]) & _near(i + end[b] - queries, j, rules)

    ranged = kv_start is not None or kv_end is not None
    value = value.masked_fill(_outside(keys, start, end), 0.0) if ranged else value
    key = key.masked_fill(_outside(keys, start, end), 0.0) if ranged else key
    heads_first = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    output, lse = _flex(*heads_first, _score(rules, mask, visible), rules)
    output, lse = _with_sinks(output, lse, sinks)
    lse = compact(lse.transpose(1, 2).float()) if return_lse else no_lse(query)
    return compact(output.transpose(1, 2).to(query.dtype)), lse


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
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`: one long sequence in which a query sees the keys of its own request only."""
    rules = Rules(scale, causal, window_left, window_right, softcap)
    batch = cu_seqlens_q.shape[0] - 1
    row_q, row_k = rows_of(cu_seqlens_q, query.shape[0]), rows_of(cu_seqlens_k, key.shape[0])
    starts_k = cu_seqlens_k[:-1].long()
    shift = lengths_of(cu_seqlens_k) - lengths_of(cu_seqlens_q) - cu_seqlens_q[:-1].long()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = row_q[i]
        safe = torch.clamp(row, max=batch - 1)
        return (row == row_k[j]) & (row < batch) & _near(i + shift[safe], j - starts_k[safe], rules)

    value = value.masked_fill((row_k >= batch)[:, None, None], 0.0)  # 0 * NaN is NaN, and nobody's keys may hold anything
    if batch == 0:
        key, value = key[:0], value[:0]
    heads_first = (query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None])
    output, lse = _flex(*heads_first, _score(rules, None, visible), rules)
    output, lse = _with_sinks(output, lse, sinks)
    padding = (row_q >= batch)[None, None]
    output = output.masked_fill(padding[..., None], 0.0)
    lse = lse.masked_fill(padding, float("-inf"))
    packed_lse = compact(lse[0].transpose(0, 1).float()) if return_lse else no_lse(query)
    return compact(output[0].transpose(0, 1).to(query.dtype)), packed_lse


Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _near(position: Tensor, j: Tensor, rules: Rules) -> Tensor:
    """Causality and window for a query at `position` and key `j`."""
    see = j == j
    if rules.causal:
        see = see & (j <= position)
    if rules.left >= 0:
        see = see & (j >= position - rules.left)
    if rules.right >= 0:
        see = see & (j <= position + rules.right)
    return see


def _score(rules: Rules, mask: Tensor | None, visible: Mod) -> ScoreMod:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if rules.softcap > 0:
            s = rules.softcap * torch.tanh(s / rules.softcap)
        see = visible(b, h, i, j)
        if mask is not None:
            if mask.dtype == torch.bool:
                see = see & mask[b, h, i, j]
            else:
                s = s + mask[b, h, i, j]
        return torch.where(see, s, -float("inf"))

    return score


def _outside(keys: int, start: Tensor, end: Tensor) -> Tensor:
    j = torch.arange(keys, device=start.device)[None]
    return ((j < start[:, None]) | (j >= end[:, None]))[..., None, None]


def _flex(query: Tensor, key: Tensor, value: Tensor, score: ScoreMod, rules: Rules) -> tuple[Tensor, Tensor]:
    """output `[B, H, S, Dv]` and lse `[B, H, S]`, 0 and -inf for a query that sees nothing."""
    if query.numel() == 0 or key.numel() == 0:
        return query.new_zeros((*query.shape[:3], value.shape[3])), query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output, aux = _call(query.device.type)(
            query, key, value, score_mod=score, scale=rules.scale, enable_gqa=query.shape[1] != key.shape[1], return_aux=_aux()
        )
    lse = aux.lse
    seen = torch.isfinite(lse)
    return torch.where(seen[..., None], output, torch.zeros_like(output)), torch.where(seen, lse, -float("inf"))


@functools.cache
def _call(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    call: Callable[..., Any] = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return call


@functools.cache
def _aux() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sink's logit joins the denominator: output shrinks by exp(lse - lse'), lse' = log(exp(lse) + exp(sink))."""
    if sinks is None:
        return output, lse
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None].expand_as(lse))
    return output * torch.exp(lse - joined)[..., None].to(output.dtype), joined


def _cost_us(p: Problem) -> float:
    # On CPU it runs uncompiled and trails the reference; on CUDA it wins over materialised logits and loses to SDPA.
    if p.target.device == "cpu":
        return 1e6
    return 60.0 + max(p.tokens.hint, 1) * max(p.context.hint, 1) * p.q_heads * p.head_dim / 1e7


def _power_of_two_group(p: Problem) -> Refusal | None:
    ok = p.group_size & (p.group_size - 1) == 0
    return None if ok or p.target.device != "cuda" else Refusal("group_size", p.group_size, "a power of two (CUDA)")


COMMON: tuple[Need, ...] = (dtypes(torch.float16, torch.bfloat16, torch.float32), *without("kv_scales"), _power_of_two_group)
ABOUT = "torch flex_attention, a kernel compiled for the call's mask"
register(Kernel("flex", "attention", attention, needs=COMMON, cost_us=_cost_us, about=ABOUT))
register(Kernel("flex", "varlen_attention", varlen_attention, needs=(*COMMON, *without("mask")), cost_us=_cost_us, about=ABOUT))
