"""Attention of the exact models in chunks of queries, so that the scores of a long context fit into
memory: those of one prompt of 64k tokens and 32 heads take 512 GiB in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

# Bytes of the scores of a chunk. The math of torch holds a few copies of them.
MOST = 1 << 31


class InChunks(TorchFunctionMode):
    """In the block and this thread, torch's scaled_dot_product_attention takes as many queries at a
    time as have `MOST` bytes of scores, and at least one.

    A query's softmax is over all of its keys, so that its numbers are those of the whole call, but
    for the order of sums.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        call = attend if func is scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`[..., H, S, Dv]`, as torch's scaled_dot_product_attention of `[..., H, S, D]` and
    `[..., Hkv, L, D]`, in chunks. A call with dropout, or with a mask that is causal besides, is
    torch's own."""
    queries, keys = query.shape[-2], key.shape[-2]
    per_query = query.shape[:-2].numel() * keys * query.element_size()
    chunk = max(1, MOST // max(1, per_query))
    if chunk >= queries or dropout_p or (is_causal and attn_mask is not None):
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:  # once, and not in each chunk
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for start in range(0, queries, chunk):
        end = min(start + chunk, queries)
        # Later keys are invisible to a causal chunk.
        seen = min(end, keys) if is_causal else keys
        out[..., start:end, :] = scaled_dot_product_attention(
            query[..., start:end, :],
            key[..., :seen, :],
            value[..., :seen, :],
            _mask_of(attn_mask, is_causal, start, end, seen, query.device),
            scale=scale,
        )
    return out


def _mask_of(
    whole: Tensor | None,
    is_causal: bool,
    start: int,
    end: int,
    seen: int,
    device: torch.device,
) -> Tensor | None:
    """The mask of the queries from `start` to `end` and the first `seen` keys."""
    if is_causal:
        query_at, key_at = (torch.arange(n, device=device) for n in (end, seen))
        return query_at[start:, None] >= key_at
    if whole is None or whole.dim() < 2 or whole.shape[-2] == 1:
        return whole
    return whole[..., start:end, :]
