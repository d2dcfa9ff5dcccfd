"""torch's own attention for a call. Each function returns None if it cannot answer the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnops.bench.setup import Setup
from attnops.inputs import Call

Run = Callable[[], Any]


def _heads_first(call: Call) -> tuple[Tensor, Tensor, Tensor] | None:
    """query, key, value `[B, H, S, D]`; pages of requests of one length are copied into a contiguous cache."""
    a = call.arguments
    if "q_nope" in a or "sinks" in a:
        return None
    if call.op == "attention":
        return a["query"].transpose(1, 2), a["key"].transpose(1, 2), a["value"].transpose(1, 2)
    batch = a["cu_seqlens_q"].shape[0] - 1
    query = a["query"].unflatten(0, (batch, -1)).transpose(1, 2)
    if call.op == "varlen_attention":
        return query, *(a[n].unflatten(0, (batch, -1)).transpose(1, 2) for n in ("key", "value"))
    table = a["page_table"].long()
    if a["k_pages"].dtype != query.dtype or not bool((a["seq_lens"] == table.shape[1] * a["k_pages"].shape[1]).all()):
        return None
    key, value = (a[n][table].flatten(1, 2).transpose(1, 2).contiguous() for n in ("k_pages", "v_pages"))
    return query, key, value


def _tokens_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def sdpa(setup: Setup, call: Call) -> Run | None:
    """`scaled_dot_product_attention`: whole causal prompts, and decode over a contiguous cache of as many bytes."""
    a, given = call.arguments, _heads_first(call)
    if given is None or "softcap" in a or "window_left" in a:
        return None
    query, key, value = given
    square = query.shape[2] == key.shape[2]
    if not square and query.shape[2] > 1:
        return None
    causal, scale = square and bool(a["causal"]) and query.shape[2] > 1, a["scale"]
    return lambda: _tokens_first(scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True))


def flex(setup: Setup, call: Call) -> Run | None:
    """`flex_attention`, compiled, with a block mask made beforehand. Not for decode, where it needs options for splits."""
    a, given = call.arguments, _heads_first(call)
    if given is None or a["query"].shape[-3] == 1 or call.op == "paged_attention":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = given
    before, left, cap = key.shape[2] - query.shape[2], a.get("window_left", -1), a.get("softcap", 0.0)

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = k <= q + before
        return visible & (q + before - k <= left) if left >= 0 else visible

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(seen, None, None, query.shape[2], key.shape[2], device=str(setup.device)) if a["causal"] else None
    run, score = setup.compiled(flex_attention, dynamic=False), capped if cap else None
    return lambda: _tokens_first(run(query, key, value, score_mod=score, block_mask=mask, scale=a["scale"], enable_gqa=True))


def varlen(setup: Setup, call: Call) -> Run | None:
    """`torch.nn.attention.varlen_attn`, if this torch has it with grouped heads: causal prompts on CUDA."""
    a = call.arguments
    if not setup.on_gpu or call.op not in ("attention", "varlen_attention") or {"softcap", "sinks"} & a.keys() or not a["causal"]:
        return None
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (a[n].flatten(0, 1) if call.op == "attention" else a[n] for n in ("query", "key", "value"))
    if call.op == "attention":
        (batch, queries), keys = a["query"].shape[:2], a["key"].shape[1]
        count = torch.arange(batch + 1, device=query.device, dtype=torch.int32)
        lengths: tuple[Any, ...] = (count * queries, count * keys, queries, keys)
    else:
        lengths = tuple(a[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    more: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if not more.keys() <= inspect.signature(varlen_attn).parameters.keys():
        return None
    return lambda: varlen_attn(query, key, value, *lengths, scale=a["scale"], window_size=(a.get("window_left", -1), 0), **more)


PEERS: dict[str, Callable[[Setup, Call], Run | None]] = {"torch.sdpa": sdpa, "torch.flex": flex, "torch.varlen": varlen}
