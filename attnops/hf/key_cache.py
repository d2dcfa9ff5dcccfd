"""`PagedKeyCache`: the cache of a patched model of ordinary attention, keys and values in pages that attnops owns.

Layers that see the same stretch of the text share a page table. Of a layer with a sliding window a row has pages for the window and a few
new tokens, and no more: token t lies at place `t mod room`, so that what falls behind the window gives its pages to what comes. The table
that such a layer attends through is made anew in each step and begins at the first page that is still seen; lengths count from there, as
attention asks for distances only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.page_size import negotiate_kv_page_size
from attnops.cache.paged import PagedCache, ordinary
from attnops.errors import InvalidInput
from attnops.hf.paged_cache import EMPTY, PLENTY, PagedModelCache, Past, Tokens, View, count_seen, counters, tell_compiler
from attnops.ops import slot_mapping
from attnops.ops.plan import PagedSpec
from attnops.problem import Target
from attnops.select import key_for, workspace_bytes

DRAFTS = 32
"""New tokens of a row that a sliding layer's pages have room for besides the window, where no more are asked for."""

ALL = 2**30
"""As `drafts`: any number of positions may be taken back, so that sliding layers have pages for the whole text."""


class KeyLayer(NamedTuple):
    """What a layer keeps and how it reads it. window: tokens a query sees, its own included; 0: all before it. sinks: their dtype."""

    window: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: bool = False
    sinks: torch.dtype | None = None


class KeySizes(NamedTuple):
    """What pages are made for. rows: requests. length: tokens of each, padding included. dtype, device: of the pages. kernel: or None.

    drafts: new tokens of a row that a sliding layer has room for besides the window, and that can be taken back. A step of more attends
    to copies of what it needs. fixed: graphs are captured over them, so no compiler need know of other sizes.
    """

    rows: int
    length: int
    layers: tuple[KeyLayer, ...]
    dtype: torch.dtype
    device: torch.device
    kernel: str | None
    drafts: int = DRAFTS
    fixed: bool = False


def ring_pages(window: int, drafts: int, page_size: int) -> int:
    """Pages of a row that hold what `drafts` new tokens see of a window, wherever in a page it begins."""
    return -(-(window - 1 + drafts + page_size - 1) // page_size)


class KeyPages:
    """The tensors of a cache, see `attnops.hf.paged_cache.Pages`.

    k_pages, v_pages: a tuple of one `[P, page, Hkv, D]` (`Dv`) a layer. windows: of each page table the tokens that a query sees through
    it, 0 for all. tables: int32 `[rows, M]`, each row's pages. kind: which of the tables is each layer's. workspace: uint8 or None.
    high: int64 `[]`, the most positions there have been since the cache was empty.
    """

    def __init__(self, sizes: KeySizes, page_size: int | None = None) -> None:
        self.sizes = sizes
        most, _ = Counter(layer._replace(window=0) for layer in sizes.layers).most_common(1)[0]
        self.choice = negotiate_kv_page_size(
            q_heads=most.q_heads, kv_heads=most.kv_heads, head_dim=most.head_dim, v_head_dim=most.v_head_dim, softcap=most.softcap,
            sinks=most.sinks, max_requests=sizes.rows, max_tokens_per_request=sizes.length, page_size=page_size,
            kernels=None if sizes.kernel is None else (sizes.kernel,), dtype=sizes.dtype, device=sizes.device, workspace_bytes=PLENTY,
        )  # fmt: skip
        self.page_size = self.choice.page_size
        whole = -(-sizes.length // self.page_size)
        # A window that is as long as the text gains nothing.
        rings = {layer.window: ring_pages(layer.window, sizes.drafts, self.page_size) for layer in sizes.layers if layer.window}
        windows = [layer.window if rings.get(layer.window, whole) < whole else 0 for layer in sizes.layers]
        self.windows = tuple(dict.fromkeys(windows))
        self.kind = tuple(self.windows.index(w) for w in windows)
        widths = [rings[w] if w else whole for w in self.windows]

        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        tables: dict[int, Tensor] = {}
        alike: dict[tuple[int, int, int, int], list[int]] = {}
        for number, layer in enumerate(sizes.layers):
            alike.setdefault((self.kind[number], layer.kv_heads, layer.head_dim, layer.v_head_dim), []).append(number)
        for (kind, heads, k_dim, v_dim), numbers in alike.items():
            # Two columns at least: for a table of one a compiler makes other code.
            cache = PagedCache(
                len(numbers), 1 + sizes.rows * widths[kind], self.page_size, heads, k_dim, v_dim, max_requests=sizes.rows,
                max_pages_per_request=max(2, widths[kind]), dtype=sizes.dtype, device=sizes.device,
            )  # fmt: skip
            for _ in range(sizes.rows):
                cache.alloc(widths[kind] * self.page_size)
            keys.update(zip(numbers, cache.k_pages, strict=True))
            values.update(zip(numbers, cache.v_pages, strict=True))
            # Caches of as many pages hand them out alike, so one's table is good for all.
            tables.setdefault(kind, cache.page_table)
        self.k_pages, self.v_pages = (tuple(by_layer[i] for i in range(len(sizes.layers))) for by_layer in (keys, values))
        self.tables = tuple(tables[kind] for kind in range(len(self.windows)))
        tell_compiler(*self.tables, sizes=() if sizes.fixed else (0, 1))
        tell_compiler(*self.k_pages, *self.v_pages, sizes=() if sizes.fixed else (0,))
        scratch = max(self._scratch(layer, widths[kind]) for layer, kind in zip(sizes.layers, self.kind, strict=True))
        with ordinary():
            self.workspace = torch.zeros(scratch, dtype=torch.uint8, device=sizes.device) if scratch else None
            self.high = torch.zeros((), dtype=torch.int64, device=sizes.device)
        tell_compiler(self.high, *(() if self.workspace is None else (self.workspace,)))
        self.seen, self.pad = counters(sizes.rows, sizes.device, sizes.fixed)

    def _scratch(self, layer: KeyLayer, width: int) -> int:
        sizes = self.sizes
        spec = PagedSpec(
            layer.q_heads, layer.kv_heads, layer.head_dim, self.page_size, sizes.dtype, layer.v_head_dim,
            window=(layer.window - 1 if layer.window else -1, -1), softcap=layer.softcap, sinks=layer.sinks,
        )  # fmt: skip
        decode = spec.problem(Target.of(sizes.device), sizes.rows, sizes.rows, width, 1)
        bare = replace(decode, plan="none", padded=False, pages_alike=layer.head_dim == layer.v_head_dim)
        return workspace_bytes(bare, key_for("paged_attention", sizes.kernel))

    def clear(self) -> None:
        """Forget every token."""
        with ordinary():
            self.seen.zero_()
            self.high.zero_()
            self.pad.fill_(EMPTY)

    def advance(self, start: Tensor, count: int) -> None:
        """See `Pages`."""
        count_seen(self, start, count)
        if any(self.windows):
            self.high.copy_(torch.maximum(self.high, self.seen))

    def may_keep(self, length: Tensor) -> None:
        """Raises InvalidInput when a window at position `length` would need tokens whose place has been taken. The host waits."""
        if not any(self.windows):
            return
        left, high = torch.stack([length, self.high]).tolist()
        for window, table in zip(self.windows, self.tables, strict=True):
            first = high - table.shape[1] * self.page_size
            if window and left > 0 and left - window + 1 < first:
                want = f"0, or at least {first + window - 1} of {high}: a window of {window} needs tokens whose pages were used again"
                raise InvalidInput("crop, positions to keep", left, want)

    def views(self, tokens: Tokens) -> tuple[View, ...]:
        """One for each page table."""
        return tuple(
            self._sliding(tokens, window, table) if window else self._whole(tokens, table)
            for window, table in zip(self.windows, self.tables, strict=True)
        )

    def _whole(self, tokens: Tokens, pages: Tensor) -> View:
        table = pages[: tokens.before.shape[0]]
        # A negative position, which padding has, gives no slot.
        slots = slot_mapping(tokens.positions, tokens.rows, table, page_size=self.page_size)
        return View(self._batch(tokens, table, tokens.before + tokens.new, slots))

    def _sliding(self, tokens: Tokens, window: int, pages: Tensor) -> View:
        size, count, before = self.page_size, tokens.new, tokens.before
        rows, places = before.shape[0], pages.shape[1]
        ring, room = pages[:rows], places * size
        wrapped = torch.where(tokens.positions < 0, tokens.positions, tokens.positions % room)
        if count > self.sizes.drafts:
            # Of what has the same place the last one counts.
            late = tokens.positions >= (before + (count - room))[tokens.rows]
            wrapped = torch.where(late, wrapped, -1)
        slots = slot_mapping(wrapped, tokens.rows, ring, page_size=size)
        first = (before - (window - 1)).clamp(min=0) // size
        columns = (first[:, None] + torch.arange(places, device=before.device)) % places
        view = self._batch(tokens, ring.gather(1, columns), before + count - first * size, slots)
        if tokens.fresh or count <= self.sizes.drafts:
            return View(view)
        last = before[:, None] + torch.arange(1 - window, 0, device=before.device)
        owner = torch.arange(rows, device=before.device)[:, None].expand_as(last)
        past = slot_mapping((last.clamp(min=0) % room).reshape(-1), owner.reshape(-1), ring, page_size=size)
        return View(view, Past(past, (window - 1 - before).clamp(min=0)))

    def _batch(self, tokens: Tokens, table: Tensor, lengths: Tensor, slots: Tensor) -> PagedBatch:
        return PagedBatch(
            table, lengths.to(torch.int32), tokens.cu_seqlens_q, slots, tokens.positions, tokens.new, padded=False, holes=False,
            workspace=self.workspace,
        )  # fmt: skip


class PagedKeyCache(PagedModelCache):
    """A `PagedModelCache` of keys and values."""

    def pages_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """`[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`: the pages of the model's layer `layer`."""
        number, pages = self.number_of(layer), self.state.pages
        return pages.k_pages[number], pages.v_pages[number]
