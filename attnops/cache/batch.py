"""`PagedBatch`: the tensors of one step of several requests, and the descriptions of its cached
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class PrefixChunk:
    """Cached tokens of the requests, packed one request after the other, for layers that expand
    latents before they attend (MLA).

    slots: int64 `[N]`, `page_id * page_size + offset` of each token.
    cu_seqlens_k: int32 `[B + 1]`; request b has tokens `cu[b]:cu[b + 1]` of the chunk, and may have
    no token in it.
    max_seqlen_k: the most tokens of one request in it.
    """

    slots: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int


@dataclass(frozen=True)
class SharedPrefix:
    """The two parts of a cascade: whole pages that all requests of a batch begin with, and the rest
    of each request.

    page_table: int32 `[1, M]`, the shared pages.
    seq_lens: int32 `[1]`, their tokens.
    cu_seqlens_q: int32 `[2]`, `(0, T)`: every new token attends to them.
    rest_table: int32 `[B, M]`, the batch's table without the shared pages.
    rest_lens: int32 `[B]`, the batch's lengths without the shared tokens.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    rest_table: Tensor
    rest_lens: Tensor


@dataclass(frozen=True)
class HostLengths:
    """The lengths of the B requests of a batch, as the host knows them.

    tokens: of each, the new ones included. new_tokens: the new ones. window, page_size: of the
    batch's page table, in tokens; window 0: none. requests: the id of each and its number of
    changes, this step included; `()`: the batch is not of a cache's requests.
    """

    tokens: Sequence[int]
    new_tokens: Sequence[int]
    window: int = 0
    page_size: int = 1
    requests: Sequence[tuple[int, int]] = ()

    @cached_property
    def seq_lens(self) -> Sequence[int]:
        """As those of the batch: from the first visible page on. Made when they are first read, as
        most batches have no plan."""
        if not self.window:
            return self.tokens
        size, each = self.page_size, zip(self.tokens, self.new_tokens, strict=True)
        return [n - size * pages_behind(n - new, self.window, size) for n, new in each]


def pages_behind(before: int, window: int, page_size: int) -> int:
    """Pages that no new token of a request with so many tokens before them sees."""
    return max(before - (window - 1), 0) // page_size


@dataclass(frozen=True)
class PagedBatch:
    """The tensors that the attention layers of a model share during one step. An ordinary argument
    of compiled and exported functions.

    B requests bring T new tokens, packed one request after the other. M is the width of the cache's
    page table.

    page_table: int32 `[B, M]`, ids of each request's pages in the order of its tokens; entries past
    its end are 0, the null page.
    seq_lens: int32 `[B]`, tokens of each request, the new ones included.
    cu_seqlens_q: int32 `[B + 1]`; request b brings tokens `cu[b]:cu[b + 1]`.
    slots: int64 `[T]`, `page_id * page_size + offset` for each new token's key and value; -1 is not
    stored.
    positions: int64 `[T]`, the position of each new token in its request, from 0.
    max_seqlen_q: the most new tokens of one request; 1 means decode. Compiled graphs may specialise
    on it and on `padded`.
    padded: may there be tokens without a request? False, as in the batches of a cache, means that
    the output need not be cleared first.
        Code that appends tokens to a batch must set it to True.
    holes: may page_table have entries that are no page? False, as in the batches of a cache, spares
    the check.
    plan: the plan of a `LatentCache` or a `Planner` for kernels that read one: int32 beside the
    tables, or int64 on the host together with
        `workspace`; give both to the op. It holds for these lengths and tables: code that replaces
        them, as a captured step does, replaces the plan too, or sets it to None.
    workspace: uint8 `[bytes]`, the cache's scratch for kernels that ask for it, or None.
    prefix: the cached tokens of the requests, in chunks; `()`: no request has any. None: not
    described, as in a decode step.
    shared: set when the requests begin with the same pages and the caller asked for `share`. The
    tables above hold these pages too.
    others: of a cache with several windows, the batches of its further page tables. Their tables
    begin at the first visible page, and
        their lengths count from there.
    host: `seq_lens` and the new tokens on the host, in the batches of a cache, for plans that would
        otherwise wait for the device. No field: compiled code does not see it, and
        `dataclasses.replace`, which may bring other lengths, leaves it out.
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
    others: tuple[PagedBatch, ...] = ()
    host: ClassVar[HostLengths | None] = None

    def known(self, host: HostLengths | None) -> PagedBatch:
        """This batch, with its lengths on the host."""
        object.__setattr__(self, "host", host)
        return self

    def of(self, table: int) -> PagedBatch:
        """The batch of a cache's page table: this one for 0, see `PagedCache.tables`."""
        return self if table == 0 else self.others[table - 1]


for _cls in (PrefixChunk, SharedPrefix, PagedBatch):
    register_dataclass(_cls)
