"""What kernels of one query token a request share: the batch by token, whatever requests are idle and whatever tokens are padding."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.reference.packed import rows_of


def by_token(page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(page table `[T, M]`, lengths `[T]`), both int32: of each token its request's, length 0 for padding. B and M are at least 1.

    Where no request has more than one query, this makes the tokens the kernel's batch. A request without a query has no row, and
    negative page ids, which the op allows past a request's end, become page 0: kernels prefetch them.
    """
    rows = rows_of(cu_seqlens_q, tokens)
    real = rows < seq_lens.shape[0]
    rows = torch.where(real, rows, 0)
    return page_table[rows].clamp(min=0), torch.where(real, seq_lens[rows], 0)
