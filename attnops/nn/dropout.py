"""Attention with dropout: torch's own, which drops weights of the softmax by its Philox seeds."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attnops.core import eager_cache
from attnops.core.errors import InvalidInput, fail
from attnops.core.record import check
from attnops.ops.attention.bias import as_rule
from attnops.ops.attention.by_sdpa import attend
from attnops.ops.attention.record import Attention, with_leading_dims


def refuse(dropout: float, **given: tuple[object, object]) -> None:
    """Raise InvalidInput unless each of `given`, (its value, the value that dropout goes with), has
    that value."""
    for field, (value, wanted) in given.items():
        if isinstance(value, Tensor) or value != wanted:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            fail(
                InvalidInput,
                field,
                got,
                f"{wanted}, because dropout is {dropout} in training and no kernel has both; or "
                "call .eval()",
            )


def dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with dropout, where a query that sees no key
    gives 0. Differentiable.

    A weight is dropped with probability p and divided by 1 - p otherwise:
    https://arxiv.org/abs/1706.03762, section 5.4, applied to the weights. torch's generator of the
    device decides which, as in torch's own call; a mask costs memory for its logits.

    Args:
        query: `[B, S, Hq, D]`. key, value: `[B, K, Hkv, D]`, `[B, K, Hkv, Dv]`, the query's dtype.
            Hq is a multiple of Hkv.
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
    if mask is not None:
        eager_cache.mask(mask)
        mask = with_leading_dims(mask, query)
    if not is_dynamo_compiling():  # it cannot trace the check
        check(Attention(query, key, value, mask, scale=scale, causal=causal))
    return attend(query, key, value, scale=scale, causal=causal, mask=mask, dropout=dropout)
