"""torch's own attention for a call. Each function returns None if it cannot answer the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnops.bench.setup import Setup
from attnops.bench.vendors import packed
from attnops.inputs import Call
from attnops.tune.clock import Run


def _heads_first(call: Call) -> list[Tensor] | None:
    """query, key, value `[B, H, S, D]`; pages of requests of one length are copied into a contiguous cache."""
    a = call.arguments
    if "q_nope" in a or "sinks" in a:
        return None
    if call.op == "attention":
        found = [a[n] for n in ("query", "key", "value")]
    elif call.op == "varlen_attention":
        found = [a[n].unflatten(0, (a["cu_seqlens_q"].shape[0] - 1, -1)) for n in ("query", "key", "value")]
    else:
        table = a["page_table"].long()
        if a["k_pages"].dtype != a["query"].dtype or not bool((a["seq_lens"] == table.shape[1] * a["k_pages"].shape[1]).all()):
            return None
        found = [a["query"].unflatten(0, (table.shape[0], -1)), *(a[n][table].flatten(1, 2) for n in ("k_pages", "v_pages"))]
        return [found[0].transpose(1, 2), *(t.transpose(1, 2).contiguous() for t in found[1:])]
    return [t.transpose(1, 2) for t in found]


def _tokens_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def sdpa(setup: Setup, call: Call) -> Run | None:
    """`scaled_dot_product_attention`: whole causal prompts, and decode over a contiguous cache of as many bytes."""
    a, given = call.arguments, _heads_first(call)
    if given is None or "softcap" in a or "window_left" in a:
        return None
    new, square = given[0].shape[2], given[0].shape[2] == given[1].shape[2]
    if not square and new > 1:
        return None
    attend: Any = partial(
        scaled_dot_product_attention, is_causal=square and bool(a["causal"]) and new > 1, scale=a["scale"], enable_gqa=True
    )
    return lambda: _tokens_first(attend(*given))


def flex(setup: Setup, call: Call) -> Run | None:
    """`flex_attention`, compiled, with a block mask made beforehand. Not for decode, where it needs options for splits."""
    a, given = call.arguments, _heads_first(call)
    if given is None or a["query"].shape[-3] == 1 or call.op == "paged_attention":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, keys = given[0].shape[2], given[1].shape[2]
    before, left, cap = keys - queries, a.get("window_left", -1), a.get("softcap", 0.0)

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = k <= q + before
        return visible & (q + before - k <= left) if left >= 0 else visible

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(seen, None, None, queries, keys, device=str(setup.device)) if a["causal"] else None
    run, score = setup.compiled(flex_attention, dynamic=False), capped if cap else None
    return lambda: _tokens_first(run(*given, score_mod=score, block_mask=mask, scale=a["scale"], enable_gqa=True))


def varlen(setup: Setup, call: Call) -> Run | None:
    """`torch.nn.attention.varlen_attn`, if this torch has it with grouped heads: causal prompts on CUDA."""
    a = call.arguments
    if not setup.on_gpu or call.op not in ("attention", "varlen_attention") or {"softcap", "sinks"} & a.keys() or not a["causal"]:
        return None
    from torch.nn.attention.varlen import varlen_attn

    tensors, lengths = packed(call)
    run: Any = varlen_attn
    more: dict[str, Any] = {"enable_gqa": True} if tensors[0].shape[1] != tensors[1].shape[1] else {}
    if not more.keys() <= inspect.signature(varlen_attn).parameters.keys():
        return None
    return lambda: run(*tensors, *lengths, scale=a["scale"], window_size=(a.get("window_left", -1), 0), **more)


PEERS: dict[str, Callable[[Setup, Call], Run | None]] = {"torch.sdpa": sdpa, "torch.flex": flex, "torch.varlen": varlen}
