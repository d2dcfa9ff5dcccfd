"""`PagedBatch`: one step of several requests, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class PagedBatch:
    """What the attention layers of a model share during one step. An ordinary argument of compiled and exported functions.

    B requests bring T new tokens, packed one request after the other. M is the width of the cache's page table.

    page_table: int32 `[B, M]`, ids of each request's pages in the order of its tokens; entries past its end are 0, the null page.
    seq_lens: int32 `[B]`, tokens of each request, the new ones included.
    cu_seqlens_q: int32 `[B + 1]`; request b brings tokens `cu[b]:cu[b + 1]`.
    slots: int64 `[T]`, `page_id * page_size + offset` where each new token's key and value go; -1 is not stored.
    positions: int64 `[T]`, the position of each new token in its request, from 0.
    max_seqlen_q: the most new tokens of one request; 1 says decode. The only value a compiled graph may look at.
    workspace: uint8 `[bytes]`, the cache's scratch for kernels that ask for one, or None.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slots: Tensor
    positions: Tensor
    max_seqlen_q: int
    workspace: Tensor | None = None


register_dataclass(PagedBatch)
