"""Attention by torch's own scaled_dot_product_attention.

For dropout, which no kernel has, and for tools that know torch's ops alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnops.core.errors import NotRecordable, fail
from attnops.core.record import asked
from attnops.core.tensors import Rules, dense_visible

_SAID = {
    "causal",
    "window_left",
    "window_right",
    "attention_chunk",
    "mask",
    "kv_start",
    "kv_end",
}
"""The optional arguments of attention that torch's own can say, most of them as a mask."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`[B, S, Hq, Dv]`; a query that sees no key gives 0. Arguments as `dropped` takes them."""
    queries, keys = query.shape[1], key.shape[1]
    group = int(query.shape[2]) // int(key.shape[2])  # tensors under torch.jit.trace
    if causal and (mask is not None or queries != keys):
        # torch's own flag aligns the first query with the first key, and goes with no mask.
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask, causal = both(mask, seen.tril(keys - queries)), False
    blind, dtype = None, query.dtype
    if mask is not None:
        # torch's backends differ in a query that sees no key, and in its gradients: it sees all,
        # and its result goes.
        if mask.dtype == torch.bool:
            blind = ~mask.any(-1, keepdim=True)
            mask = mask | blind
        else:
            blind = (mask == float("-inf")).all(-1, keepdim=True)
            wide, mask = torch.promote_types(dtype, mask.dtype), mask.masked_fill(blind, 0.0)
            query, key, value, mask = (x.to(wide) for x in (query, key, value, mask))
        if group != 1:  # the backend that takes masks wants as many key heads
            key, value = (x.repeat_interleave(group, 2) for x in (key, value))
            group = 1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    grouped = group != 1
    out = scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
    ).to(dtype)
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


def both(mask: Tensor | None, seen: Tensor) -> Tensor:
    """A mask, bool or additive, and what is `seen` besides, bool."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def says(call: Any) -> bool:
    """Can torch's scaled_dot_product_attention say an `Attention`?"""
    return asked(call) <= _SAID


def attention(call: Any) -> tuple[Tensor, Tensor]:
    """(output, an empty lse) of an `Attention`. Raises NotRecordable for what torch cannot say."""
    if unsaid := sorted(asked(call) - _SAID):
        tool = f"torch.onnx.export with {', '.join(unsaid)}"
        fail(NotRecordable, "attention", tool, f"at most {', '.join(sorted(_SAID))}")
    rules, mask, causal = Rules.of(call), call.mask, call.causal
    if rules != Rules(call.scale, causal) or asked(call) & {"kv_start", "kv_end"}:
        seen = dense_visible(call.query, call.key, call.kv_start, call.kv_end, rules)
        causal = False
        if seen is not None:
            mask = both(mask, seen[:, None])
    key, value = call.key, call.value
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        # The exporter that traces knows no grouped heads.
        group = int(call.query.shape[2]) // int(key.shape[2])
        key, value = (x.repeat_interleave(group, 2) for x in (key, value))
    output = attend(call.query, key, value, scale=call.scale, causal=causal, mask=mask)
    return output.contiguous(), output.new_empty(0, dtype=torch.float32)
