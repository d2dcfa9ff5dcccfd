"""`PagedBatch`: one step of several requests, as tensors, and what else a step may say of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class PrefixChunk:
    """Cached tokens of the requests, packed one request after the other: for layers that expand latents before they attend (MLA).

    slots: int64 `[N]`, `page_id * page_size + offset` where each lies. cu_seqlens_k: int32 `[B + 1]`; request b has tokens
        `cu[b]:cu[b + 1]` of the chunk, none perhaps. max_seqlen_k: the most tokens of one request in it.
    """

    slots: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int


@dataclass(frozen=True)
class SharedPrefix:
    """Whole pages that all requests of a batch begin with, and what each has beyond them: the two parts of a cascade.

    page_table: int32 `[1, M]`, the shared pages. seq_lens: int32 `[1]`, their tokens. cu_seqlens_q: int32 `[2]`, `(0, T)`: every new
        token asks. rest_table: int32 `[B, M]`, rest_lens: int32 `[B]`: the batch's own without the shared pages.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    rest_table: Tensor
    rest_lens: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """What the attention layers of a model share during one step. An ordinary argument of compiled and exported functions.

    B requests bring T new tokens, packed one request after the other. M is the width of the cache's page table.

    page_table: int32 `[B, M]`, ids of each request's pages in the order of its tokens; entries past its end are 0, the null page.
    seq_lens: int32 `[B]`, tokens of each request, the new ones included.
    cu_seqlens_q: int32 `[B + 1]`; request b brings tokens `cu[b]:cu[b + 1]`.
    slots: int64 `[T]`, `page_id * page_size + offset` where each new token's key and value go; -1 is not stored.
    positions: int64 `[T]`, the position of each new token in its request, from 0.
    max_seqlen_q: the most new tokens of one request; 1 says decode. It and `padded` are what a compiled graph may look at.
    padded: may there be tokens of no request? False, as PagedCache says of the batches it makes, spares clearing the output first.
        Whoever appends tokens to a batch must say True.
    holes: may there be entries of page_table that are no page? False, as the caches say of the batches they make, spares looking.
    plan: what a `LatentCache` or a `Planner` adds for kernels that read one: int32 beside the tables, or int64 of the host, with the
        workspace that goes with it; give both to the op. It is of these lengths and tables: code that replaces them, as a captured step
        does, replaces the plan too, or sets it to None.
    workspace: uint8 `[bytes]`, the cache's scratch for kernels that ask for one, or None.
    prefix: what the requests had before these tokens, in chunks; `()`: nothing. None: it was not worked out, as in a decode step.
    shared: set when the requests begin with the same pages and the cache was asked to look. The tables above hold them all the same.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slots: Tensor
    positions: Tensor
    max_seqlen_q: int
    padded: bool = True
    holes: bool = True
    plan: Tensor | None = None
    workspace: Tensor | None = None
    prefix: tuple[PrefixChunk, ...] | None = None
    shared: SharedPrefix | None = None


for _cls in (PrefixChunk, SharedPrefix, PagedBatch):
    register_dataclass(_cls)
