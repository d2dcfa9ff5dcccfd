"""`PagedLatentCache`: the cache of a patched MLA model, latents in pages that attnops owns."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.latent import LatentCache
from attnops.cache.page_size import negotiate_page_size
from attnops.cache.paged import ordinary
from attnops.hf.paged_cache import EMPTY, PLENTY, PagedModelCache, Tokens, View, count_seen, counters, tell_compiler
from attnops.ops import slot_mapping
from attnops.ops.plan_mla import LatentSpec
from attnops.problem import Target
from attnops.select import key_for, select, workspace_bytes

PLANNED = 8
"""The most new tokens of a request for which a plan is made: kernels that read one on the device decode, they do not prefill."""


class LatentSizes(NamedTuple):
    """What pages are made for. rows: requests. length: tokens of each, padding included. layers: how many hold latents.

    latent, rope: Dc and Dr. heads: query heads. dtype, device: of the pages. kernel: the one that shall read them, or None.
    fixed: graphs are captured over them, so no compiler need know of other sizes.
    """

    rows: int
    length: int
    layers: int
    latent: int
    rope: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    kernel: str | None
    fixed: bool = False


class LatentPages:
    """The tensors of a cache, see `attnops.hf.paged_cache.Pages`.

    latent_pages: a tuple of one `[P, page, Dc + Dr]` a layer. page_table: int32 `[rows, M]`. workspace: uint8 `[bytes]` or None.
    device_plan: makes the plan that the kernel which will decode reads on the device, or None.
    """

    def __init__(self, sizes: LatentSizes, page_size: int | None = None) -> None:
        self.sizes = sizes
        self.choice = negotiate_page_size(
            latent_dim=sizes.latent, rope_dim=sizes.rope, max_requests=sizes.rows, max_tokens_per_request=sizes.length, page_size=page_size,
            q_heads=sizes.heads, kernels=None if sizes.kernel is None else (sizes.kernel,), dtype=sizes.dtype, device=sizes.device,
            workspace_bytes=PLENTY,
        )  # fmt: skip
        self.page_size = size = self.choice.page_size
        pages = -(-sizes.length // size)
        spec = LatentSpec(sizes.heads, size, sizes.dtype, sizes.latent + sizes.rope, sizes.latent)
        decode, key = spec.problem(Target.of(sizes.device), sizes.rows, sizes.rows, pages, 1), key_for("mla_attention", sizes.kernel)
        scratch = workspace_bytes(replace(decode, plan="device"), key)
        kernel = select(replace(decode, plan="device", workspace=scratch), key).kernel
        self.device_plan = None if kernel is None else kernel.device_plan
        cache = LatentCache(
            sizes.layers, sizes.rows * pages * size, latent_dim=sizes.latent, rope_dim=sizes.rope, max_requests=sizes.rows,
            max_tokens_per_request=sizes.length, page_size=size, q_heads=sizes.heads, dtype=sizes.dtype, device=sizes.device,
            workspace_bytes=scratch,
        )  # fmt: skip
        for _ in range(sizes.rows):
            cache.alloc(sizes.length)
        self.latent_pages, self.page_table, self.workspace = cache.latent_pages, cache.page_table, cache.workspace
        tell_compiler(self.page_table, sizes=() if sizes.fixed else (0, 1))
        tell_compiler(*self.latent_pages, sizes=() if sizes.fixed else (0,))
        self.seen, self.pad = counters(sizes.rows, sizes.device, sizes.fixed)

    def clear(self) -> None:
        """Forget every token."""
        with ordinary():
            self.seen.zero_()
            self.pad.fill_(EMPTY)

    def advance(self, start: Tensor, count: int) -> None:
        """See `Pages`."""
        count_seen(self, start, count)

    def may_keep(self, length: Tensor) -> None:
        """Any length: nothing is ever thrown away."""

    def views(self, tokens: Tokens) -> tuple[View, ...]:
        """One: all layers share a page table."""
        rows, count, sizes = tokens.before.shape[0], tokens.new, self.sizes
        table = self.page_table[:rows]
        lengths = (tokens.before + count).to(torch.int32)
        # A negative position, which padding has, gives no slot.
        slots = slot_mapping(tokens.positions, tokens.rows, table, page_size=self.page_size)
        plan = None
        if self.device_plan is not None and count <= PLANNED:
            # Nobody reads the query's numbers: its shape, its dtype and where it lies are what a plan needs.
            query = self.latent_pages[0].new_empty(()).expand(rows * count, tokens.heads, sizes.latent)
            plan = self.device_plan(q_nope=query, page_table=table, seq_lens=lengths, cu_seqlens_q=tokens.cu_seqlens_q)
        batch = PagedBatch(
            table,
            lengths,
            tokens.cu_seqlens_q,
            slots,
            tokens.positions,
            count,
            padded=False,
            holes=False,
            plan=plan,
            workspace=self.workspace,
        )
        return (View(batch),)


class PagedLatentCache(PagedModelCache):
    """A `PagedModelCache` of latents."""

    def pages_of(self, layer: int) -> Tensor:
        """`[P, page, Dc + Dr]`: the pages of the model's layer `layer`."""
        pages: Tensor = self.state.pages.latent_pages[self.number_of(layer)]
        return pages
