"""Helpers of kernels: results without keys, values past a request's end, and a log-sum-exp that comes with the heads first."""

from __future__ import annotations

import torch
from torch import Tensor


def past(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool `[T]`: the tokens of no request."""
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def zeroed(value: Tensor, where: Tensor) -> Tensor:
    """A copy of the value, 0 where `where`, a bool of its first dims: whole tiles are loaded, and a weight of 0 does not silence NaN."""
    where = where[..., None, None]
    # float8 has no masked_fill; a byte of 0 is its 0.
    return value.view(torch.uint8).masked_fill(where, 0).view(value.dtype) if value.dtype.itemsize == 1 else value.masked_fill(where, 0.0)


def see_nothing(output: Tensor, lse: Tensor | None) -> None:
    """Write the results of queries that see no key: 0, and -inf for lse."""
    output.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """lse `[..., Hq]`: the kernels give -inf to a query that sees no key, where the contract wants the sink."""
    return lse if sinks is None else torch.where(lse == float("-inf"), sinks.float(), lse)


def packed_lse(lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor, padded: bool = True) -> Tensor:
    """`[Hq, T]` of the kernel -> `[T, Hq]`, -inf for tokens of no request."""
    lse = with_sinks(lse.transpose(0, 1), sinks)
    return lse.masked_fill(past(cu_seqlens_q, lse.shape[0])[:, None], float("-inf")) if padded else lse
