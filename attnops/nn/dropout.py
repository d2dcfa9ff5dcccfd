"""Attention with dropout: torch's own, which drops weights of the softmax by its Philox seeds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import scaled_dot_product_attention

from attnops.call import check
from attnops.errors import InvalidInput, fail
from attnops.ops import eager
from attnops.ops.bias import as_rule
from attnops.ops.dense import Attention


def refuse(dropout: float, **given: tuple[object, object]) -> None:
    """Raise InvalidInput unless each of `given`, (its value, the value that dropout goes with), has that value."""
    for field, (value, wanted) in given.items():
        if isinstance(value, Tensor) or value != wanted:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            fail(InvalidInput, field, got, f"{wanted}, because dropout is {dropout} in training and no kernel has both; or call .eval()")


def dropped(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with dropout, where a query that sees no key gives 0. Differentiable.

    A weight is dropped with probability p and divided by 1 - p otherwise: https://arxiv.org/abs/1706.03762, section 5.4, applied to the
    weights. torch's generator of the device decides which, as in torch's own call; a mask costs memory for its logits.

    Args:
        query: `[B, S, Hq, D]`. key, value: `[B, K, Hkv, D]`, `[B, K, Hkv, Dv]`, the query's dtype. Hq is a multiple of Hkv.
        dropout: p, 0 <= p <= 1.
        scale: factor on q.k.
        causal: query i sees keys up to its own position; the last query is at the last key.
        mask: as `attnops.attention` takes it.

    Returns:
        `[B, S, Hq, Dv]`, the query's dtype.

    Raises:
        InvalidInput: as `attnops.attention`.
    """
    mask, causal = as_rule(mask, causal, query, key)
    eager.mask(mask)
    if mask is not None and 2 <= mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if not is_dynamo_compiling():  # it cannot trace the check
        check(Attention(query, key, value, mask, scale=scale, causal=causal))
    queries, keys, group = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    if causal and (mask is not None or queries != keys):
        # torch's own flag aligns the first query with the first key, and goes with no mask.
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        causal = False
    blind, dtype = None, query.dtype
    if mask is not None:
        # torch's backends differ in a query that sees no key, and their gradients, too: it sees all, and its result goes.
        if mask.dtype == torch.bool:
            blind = ~mask.any(-1, keepdim=True)
            mask = mask | blind
        else:
            blind = (mask == float("-inf")).all(-1, keepdim=True)
            wide = torch.promote_types(dtype, mask.dtype)
            query, key, value, mask = (x.to(wide) for x in (query, key, value, mask.masked_fill(blind, 0.0)))
        if group != 1:  # the backend that takes masks wants as many key heads
            key, value, group = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2), 1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=group != 1).to(dtype)
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)
