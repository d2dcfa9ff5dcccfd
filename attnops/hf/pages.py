"""`ModelPages`: the pages of a cache for a patched model, with the counters that its steps read on the device.

Every row of a batch is one request of `attnops.cache.Pages`, allocated once for the whole length. Its pages never change, so that captured
graphs may hold the tables. Layers with a sliding window have pages for the window and a few new tokens, and use them in turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.latent import TILE
from attnops.cache.ledger import Layer, Room, check_kept
from attnops.cache.page_size import PageSizeChoice, negotiate_kv_page_size, negotiate_page_size
from attnops.cache.paged import Pages, fix_address, ordinary
from attnops.cache.step import Tokens, describe
from attnops.ops import slot_mapping
from attnops.ops.plan import LatentSpec, PagedSpec
from attnops.problem import Target
from attnops.select import key_for, select, workspace_bytes

EMPTY = 2**62
"""Padding of a row without tokens: more than any position."""

PLENTY = 2**30
"""Bytes: pages are negotiated as if scratch were free. The workspace is then as large as the chosen kernel asks for."""

DRAFTS = 32
"""New tokens of a row that a sliding layer has room for beside the window, where no more are asked for."""

ALL = 2**30
"""As `drafts`: any number of positions may be taken back, so that sliding layers have pages for the whole text."""

PLANNED = 8
"""The most new tokens of a request for which a plan is made: kernels that read one on the device decode, they do not prefill."""


class KeyLayer(NamedTuple):
    """A layer that keeps keys and values. window: tokens a query sees, its own included; 0: all before it. sinks: their dtype."""

    window: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: bool = False
    sinks: torch.dtype | None = None


class LatentLayer(NamedTuple):
    """A layer that keeps latents. latent, rope: Dc and Dr."""

    latent: int
    rope: int
    q_heads: int


class Sizes(NamedTuple):
    """The request that pages are made for.

    rows: requests.
    length: tokens of each, padding included.
    layers: of one kind, all keys or all latents.
    dtype, device: of the pages.
    kernel: the kernel that reads them, or None.
    drafts: new tokens of a row that a sliding layer has room for beside the window, and that can be taken back. A longer step attends to
        copies of the window.
    fixed: graphs are captured over the pages, so the compiler need not know of other sizes.
    """

    rows: int
    length: int
    layers: tuple[KeyLayer, ...] | tuple[LatentLayer, ...]
    dtype: torch.dtype
    device: torch.device
    kernel: str | None
    drafts: int = DRAFTS
    fixed: bool = False

    def serve(self, want: Sizes) -> bool:
        """May pages of these sizes be used where `want` is asked for?"""
        return self.rows >= want.rows and self.length >= want.length and self[2:] == want[2:]


class Past(NamedTuple):
    """The tokens of a window before a step that is too long for the window's pages. W of each row.

    slots: int64 `[B * W]`.
    start: int64 `[B]`, the first of a row's W entries that is one of its tokens.
    """

    slots: Tensor
    start: Tensor


class View(NamedTuple):
    """A step as the layers of one page table see it. past: set where these cannot attend through the table."""

    batch: PagedBatch
    past: Past | None = None


class ModelPages(Pages):
    """Pages for `rows` requests of `length` tokens, and the counters of the batch. All tensors keep their addresses.

    Attributes:
        sizes: the request they were made for.
        choice: the negotiated page size.
        seen: int64 `[]`, positions so far, padding included.
        pad: int64 `[rows]`, the positions of each row that are padding; EMPTY for a row that the last step did not have.
        high: int64 `[]`, the most positions there have been since the cache was empty, where there are windows.
    """

    def __init__(self, sizes: Sizes, page_size: int | None = None) -> None:
        self.sizes = sizes
        self.choice = _negotiated(sizes, page_size)
        size, first = self.choice.page_size, sizes.layers[0]
        whole = -(-sizes.length // size)
        self._latent = first if isinstance(first, LatentLayer) else None
        # Two columns at least: the compiler specialises on a table of one.
        unit = TILE // size if self._latent is not None and TILE % size == 0 else 1
        columns = -(-whole // unit) * unit if self._latent is not None else max(2, whole)
        layers, pages = [_layer(layer) for layer in sizes.layers], 1 + sizes.rows * whole
        room = Room(layers, pages, size, sizes.rows, columns, sizes.drafts, sizes.length, "max_length")
        super().__init__(room, dtype=sizes.dtype, device=sizes.device)
        for _ in range(sizes.rows):
            self.alloc(sizes.length)
        self._device_plan: Any = None
        if scratch := self._scratch(whole):
            self.add_workspace(scratch)
        with ordinary():
            self.seen, self.high = (torch.zeros((), dtype=torch.int64, device=sizes.device) for _ in range(2))
            self.pad = torch.full((sizes.rows,), EMPTY, dtype=torch.int64, device=sizes.device)
        fix_address(self.seen, self.high)
        for tensors, dims in ((self.tables, (0, 1)), (self.pools, (0,)), ((self.pad,), (0,))):
            fix_address(*tensors, dynamic=() if sizes.fixed else dims)

    def _scratch(self, whole: int) -> int:
        """Bytes that the kernels of a decode step ask for. Of latents, the step's plan is found, too."""
        sizes, target = self.sizes, Target.of(self.sizes.device)
        if (layer := self._latent) is not None:
            spec = LatentSpec(layer.q_heads, self.page_size, sizes.dtype, layer.latent + layer.rope, layer.latent)
            decode, key = spec.problem(target, sizes.rows, sizes.rows, whole, 1), key_for("mla_attention", sizes.kernel)
            scratch = workspace_bytes(replace(decode, plan="device"), key)
            kernel = select(replace(decode, plan="device", workspace=scratch), key).kernel
            self._device_plan = None if kernel is None else kernel.plan.device
            return scratch
        found, key = [0], key_for("paged_attention", sizes.kernel)
        for own, table in set(zip(sizes.layers, self.table_of, strict=True)):
            assert isinstance(own, KeyLayer)
            keys = PagedSpec(
                own.q_heads, own.kv_heads, own.head_dim, self.page_size, sizes.dtype, own.v_head_dim,
                window=(own.window - 1 if own.window else -1, -1), softcap=own.softcap, sinks=own.sinks,
            )  # fmt: skip
            width = self.tables[table].shape[1] if self.windows[table] else whole
            decode = keys.problem(target, sizes.rows, sizes.rows, width, 1)
            bare = replace(decode, plan="none", padded=False, pages_alike=own.head_dim == own.v_head_dim)
            found.append(workspace_bytes(bare, key))
        return max(found)

    @property
    def counters(self) -> tuple[Tensor, ...]:
        """The tensors that a step writes besides keys, values and latents."""
        return self.seen, self.pad, self.high

    def clear(self) -> None:
        """Forget every token."""
        with ordinary():
            self.seen.zero_()
            self.high.zero_()
            self.pad.fill_(EMPTY)

    def advance(self, start: Tensor, count: int) -> None:
        """Count `count` new positions of rows with padding `start` `[B]` as seen."""
        # A row that this step does not have lacks its tokens: it may come back only as one whose padding reaches so far.
        self.pad.fill_(EMPTY)
        # Not into a slice, of which Inductor of torch 2.13 asks whether it is as long as the whole.
        self.pad.index_copy_(0, torch.arange(start.shape[0], device=start.device), start)
        self.seen.add_(count)
        if any(self.windows):
            self.high.copy_(torch.maximum(self.high, self.seen))

    def check_length(self, length: Tensor) -> None:
        """Raise InvalidInput when a window at position `length` `[]` needs tokens that are overwritten. With windows the host waits."""
        if any(self.windows):
            left, high = torch.stack([length, self.high]).tolist()
            for window, table in zip(self.windows, self.tables, strict=True):
                check_kept("crop, positions to keep", left, high, window, table.shape[1] * self.page_size)

    def views(self, tokens: Tokens, before: Tensor, heads: int, fresh: bool) -> tuple[View, ...]:
        """A step that is not yet counted as seen, for each page table.

        Args:
            tokens: as many of each row.
            before: int64 `[B]`, tokens of each row in the pages; negative while padding is still to come.
            heads: query heads of the first layer.
            fresh: the cache was empty.
        """
        lengths = (before + tokens.longest).to(torch.int32)
        found = []
        for table, window in zip(self.tables, self.windows, strict=True):
            rows = table[: before.shape[0]]
            batch = describe(tokens, rows, lengths, self.page_size, window, self.sizes.drafts, self.workspace)
            if self._device_plan is not None and tokens.longest <= PLANNED:
                batch = replace(batch, plan=self._plan(batch, heads))
            long = window and not fresh and tokens.longest > self.sizes.drafts
            found.append(View(batch, self._past(before, rows, window) if long else None))
        return tuple(found)

    def _plan(self, batch: PagedBatch, heads: int) -> Tensor:
        assert self._latent is not None
        # A plan needs the query's shape, dtype and device only.
        query = self.layers[0][0].new_empty(()).expand(batch.slots.shape[0], heads, self._latent.latent)
        plan: Tensor = self._device_plan(
            q_nope=query, page_table=batch.page_table, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q
        )
        return plan

    def _past(self, before: Tensor, rows: Tensor, window: int) -> Past:
        last = before[:, None] + torch.arange(1 - window, 0, device=before.device)
        owner = torch.arange(before.shape[0], device=before.device)[:, None].expand_as(last)
        at = last.clamp(min=0) % (rows.shape[1] * self.page_size)
        slots = slot_mapping(at.reshape(-1), owner.reshape(-1), rows, page_size=self.page_size)
        return Past(slots, (window - 1 - before).clamp(min=0))


def _layer(layer: KeyLayer | LatentLayer) -> Layer:
    if isinstance(layer, LatentLayer):
        return Layer(((layer.latent + layer.rope,),))
    return Layer(((layer.kv_heads, layer.head_dim), (layer.kv_heads, layer.v_head_dim)), layer.window)


def _negotiated(sizes: Sizes, page_size: int | None) -> PageSizeChoice:
    """The page size of all layers, by the kind of layer that most of them are."""
    given: dict[str, Any] = {
        "max_requests": sizes.rows, "max_tokens_per_request": sizes.length, "page_size": page_size,
        "kernels": None if sizes.kernel is None else (sizes.kernel,), "dtype": sizes.dtype, "device": sizes.device,
        "workspace_bytes": PLENTY,
    }  # fmt: skip
    most, _ = Counter(layer if isinstance(layer, LatentLayer) else layer._replace(window=0) for layer in sizes.layers).most_common(1)[0]
    if isinstance(most, LatentLayer):
        return negotiate_page_size(latent_dim=most.latent, rope_dim=most.rope, q_heads=most.q_heads, **given)
    return negotiate_kv_page_size(
        q_heads=most.q_heads, kv_heads=most.kv_heads, head_dim=most.head_dim, v_head_dim=most.v_head_dim, softcap=most.softcap,
        sinks=most.sinks, **given,
    )  # fmt: skip
