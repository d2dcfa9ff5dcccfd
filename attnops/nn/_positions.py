"""The positions of a layer's tokens, in any of the three forms."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.errors import InvalidInput, fail
from attnops.nn import _check as check
from attnops.ops import token_rows


def positions_of(hidden: Tensor, given: Tensor | None, cu_seqlens: Tensor | None, batch: PagedBatch | None) -> Tensor:
    """int `[S]`, `[B, S]` or `[T]`: those given for hidden `[B, S, E]` or `[T, E]`, or the batch's, or from 0 in each request."""
    if given is not None:
        dense = hidden.dim() == 3
        check.tensor("positions", given, "[S] or [B, S]" if dense else "[T]", 1, *(2,) * dense)
        if given.shape != hidden.shape[-1 - given.dim() : -1]:
            fail(InvalidInput, "positions", f"shape {tuple(given.shape)}", f"one a token of hidden {tuple(hidden.shape)}")
        return given
    if batch is not None:
        return batch.positions
    at = torch.arange(hidden.shape[-2], device=hidden.device)
    if cu_seqlens is None:
        return at
    owner = token_rows(cu_seqlens, hidden.shape[0])
    return at - torch.where(owner >= 0, cu_seqlens[owner], 0)
