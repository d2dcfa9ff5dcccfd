"""`PagedLatentCache`: the cache of a patched MLA model, latents in pages that attnops owns, in the shape transformers knows.

What transformers asks of a cache it gets: lengths, resets, rollbacks, one layer object a layer. What it does not get is keys and values:
`update` hands the new latents on as they came, and the attention function (see `attnops.hf.latent`) writes and reads the pages. They are
handed on with one dimension too many, so that a consumer which does not know of this cache fails instead of computing nonsense.

A row is a request, and has the same pages as long as the cache lives. Padding on the left is not stored: row b's token at position p of
the padded batch is token `p - pad[b]` of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import Cache, CacheLayerMixin

from attnops.cache.batch import PagedBatch
from attnops.cache.latent import LatentCache
from attnops.cache.page_size import negotiate_page_size
from attnops.cache.paged import ordinary
from attnops.errors import InvalidInput
from attnops.ops import slot_mapping
from attnops.ops.plan_mla import LatentSpec
from attnops.problem import Target
from attnops.select import key_for, select, workspace_bytes

EMPTY = 2**62
"""Padding of a row that has no token yet: more than anything seen."""

PLENTY = 2**30
"""Bytes: pages are negotiated as if scratch were free. What the kernel then asks for is made."""

PLANNED = 8
"""The most new tokens of a request for which a plan is made: kernels that read one on the device decode, they do not prefill."""


class Sizes(NamedTuple):
    """What pages are made for. layers: how many hold latents. rows: requests. length: tokens of each, padding included.

    latent, rope: Dc and Dr. heads: query heads. dtype, device: of the pages. kernel: the one that shall read them, or None.
    """

    layers: int
    rows: int
    length: int
    latent: int
    rope: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    kernel: str | None


class LatentPages:
    """The tensors of a cache. All are made here, are written in place, and keep their addresses.

    latent_pages: a tuple of one `[P, page, Dc + Dr]` a layer. page_table: int32 `[rows, M]`. workspace: uint8 `[bytes]` or None.
    seen: int64 `[]`, positions so far, padding included. pad: int64 `[rows]`, those of them that are a row's padding; EMPTY for a row
    that the last step had not. device_plan: makes the plan that the kernel which will decode reads on the device, or None.
    """

    def __init__(self, sizes: Sizes, page_size: int | None = None) -> None:
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
        with ordinary():
            self.seen = torch.zeros((), dtype=torch.int64, device=sizes.device)
            self.pad = torch.full((sizes.rows,), EMPTY, dtype=torch.int64, device=sizes.device)
        from torch._dynamo import mark_static_address

        for tensor in (self.page_table, self.seen, self.pad):
            mark_static_address(tensor)

    def holds(self, sizes: Sizes) -> bool:
        """Would these do for `sizes`?"""
        return self.sizes.rows >= sizes.rows and self.sizes.length >= sizes.length and self.sizes[3:] == sizes[3:]

    def clear(self) -> None:
        """Forget every token."""
        with ordinary():
            self.seen.zero_()
            self.pad.fill_(EMPTY)


class Step(NamedTuple):
    """What the layers of one forward share. fresh: the cache was empty before it."""

    batch: PagedBatch
    fresh: bool


class Returned:
    """What a cache has instead of pages after `generate()` took them back."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        want = "return_dict_in_generate=True, or a cache of Patched.new_cache, to keep it"
        raise InvalidInput("past_key_values", "the cache of a generate() call that has ended", want)


class State:
    """The pages while one cache uses them. What the cache and its layers hold in common: when all are gone the pages are free again.

    give_back: of pages that are lent, what frees them now. unfinished: positions of a step that counts as seen, and that not all layers
    have written. It stays when a layer raises.
    """

    def __init__(self, pages: LatentPages) -> None:
        self.pages: Any = pages
        self.give_back: Any = None
        self.step: Step | None = None
        # Read by the host, so it is no tensor: which form runs depends on it.
        self.filled = False
        self.unfinished = 0


class LatentLayer(CacheLayerMixin):
    """One layer's view of the cache. number: which of the pools is its own; all layers share one length, which the first one keeps."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: State, number: int) -> None:
        super().__init__()
        self.state, self.number = state, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new latents `[1, B, 1, S, Dc]` and rotated keys `[1, B, 1, S, Dr]`. Nothing is stored yet."""
        return key_states[None], value_states[None]

    def get_seq_length(self) -> Any:
        """int64 `[]`, positions so far, padding included: a tensor, as a static cache gives."""
        return self.state.pages.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(room in tokens, padding `[rows]`). There are no keys at hand: a row's first key stands at the position after its padding.

        That the second is a tensor tells attnops' mask function whose cache it makes a mask for.
        """
        return self.state.pages.sizes.length, self.state.pages.pad

    def get_max_length(self) -> int:
        """Positions there is room for."""
        room: int = self.state.pages.sizes.length
        return room

    def reset(self) -> None:
        """Forget every token."""
        self.state.pages.clear()
        self.state.step, self.state.filled, self.state.unfinished = None, False, 0

    def crop(self, tokens_to_remove: Any) -> None:
        """Forget the last `-tokens_to_remove` positions. A positive int, as transformers once had it, is the length to keep."""
        if self.number != 0:
            return
        seen, unfinished = self.state.pages.seen, self.state.unfinished
        before = int(seen) if unfinished else 0
        if isinstance(tokens_to_remove, Tensor):
            seen.sub_(tokens_to_remove.to(seen).abs()).clamp_(min=0)
        elif tokens_to_remove > 0:
            seen.clamp_(max=tokens_to_remove)
        else:
            seen.add_(tokens_to_remove).clamp_(min=0)
        if unfinished:
            self.state.unfinished = max(0, unfinished - (before - int(seen)))

    def offload(self) -> None:
        """Nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Nothing: pages stay where they are."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raises InvalidInput: rows keep their pages."""
        raise _cannot_move_rows()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises InvalidInput: rows keep their pages."""
        raise _cannot_move_rows()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raises InvalidInput: rows keep their pages."""
        raise _cannot_move_rows()


def _cannot_move_rows() -> InvalidInput:
    want = "a cache of transformers' own, for a way to generate that reorders the batch (beam search)"
    return InvalidInput("past_key_values", "PagedLatentCache", want)


class PagedLatentCache(Cache):
    """Latents of a batch in pages, for `past_key_values=` of a model patched with `cache="paged"`. Made by `Patched.new_cache`.

    It holds `max_batch` rows of `max_length` positions each, padding included. It is filled by calls of the model, in turns: each brings
    as many new positions to every row. Batches may shrink, but a row that was left out has no further steps until `reset()`, which makes
    the cache as new. `crop(-n)` takes back the last n positions.
    """

    def __init__(self, pages: LatentPages, latent_layers: Sequence[int], others: Callable[[], dict[int, Any]]) -> None:
        """latent_layers: numbers, rising, of the model's layers that hold latents. others: makes caches of the rest, by number."""
        self.state = State(pages)
        pages.clear()
        at = {layer: number for number, layer in enumerate(latent_layers)}
        self.first_layer, self.last_layer = latent_layers[0], latent_layers[-1]
        self._others = others
        rest = others()
        count = max((*latent_layers, *rest)) + 1
        super().__init__(layers=[LatentLayer(self.state, at[i]) if i in at else rest[i] for i in range(count)])

    def reset(self) -> None:
        """Forget every token. The states of linear attention, whose shape is that of a batch, are made anew."""
        super().reset()
        for layer, states in self._others().items():
            self.layers[layer] = states

    @property
    def max_batch(self) -> int:
        """Rows there are."""
        rows: int = self.state.pages.sizes.rows
        return rows

    @property
    def max_length(self) -> int:
        """Positions each row has room for, padding included."""
        room: int = self.state.pages.sizes.length
        return room

    def pages_of(self, layer: int) -> Tensor:
        """`[P, page, Dc + Dr]`: the pages of the model's layer `layer`."""
        own: Any = self.layers[layer]
        pages: Tensor = self.state.pages.latent_pages[own.number]
        return pages

    def step_of(self, layer: int, start: Tensor, queries: int, heads: int) -> Step:
        """What the forward that `layer` runs in brings. The first layer works it out and counts the new positions as seen.

        start: int64 `[B]`, the padding of each row. queries: new positions of each. heads: query heads of the layer.
        Raises InvalidInput when an earlier layer has not run, or when the step before this one ended in an error half way.
        """
        if layer == self.first_layer:
            self.state.step = self._begin(start, queries, heads)
        step = self.state.step
        if step is None:
            raise InvalidInput("layer_idx", layer, f"layer {self.first_layer} before it: the first layer begins a step of this cache")
        return step

    def wrote(self, layer: int) -> None:
        """The step's latents of `layer` are in its pages. With the last layer's the step is whole."""
        if layer == self.last_layer:
            self.state.step, self.state.unfinished = None, 0

    def _begin(self, start: Tensor, queries: int, heads: int) -> Step:
        pages, rows, unfinished = self.state.pages, start.shape[0], self.state.unfinished
        if unfinished:
            got = f"a cache whose last step, of {unfinished} positions, did not reach every layer"
            raise InvalidInput("past_key_values", got, f"reset(), or crop(-{unfinished}), before it is used again")
        device = pages.page_table.device
        fresh = not self.state.filled
        table = pages.page_table[:rows]
        before = pages.seen - start
        positions = (before[:, None] + torch.arange(queries, device=device)).reshape(-1)
        owner = torch.arange(rows, device=device)[:, None].expand(rows, queries).reshape(-1)
        lengths = (before + queries).to(torch.int32)
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * queries
        # A negative position, which padding has, gives no slot.
        slots = slot_mapping(positions, owner, table, page_size=pages.page_size)
        # Whoever runs the model on fake tensors, as `explain` does, has stored nothing.
        if torch.compiler.is_compiling() or not isinstance(slots, FakeTensor):
            # A row that this step has not will lack its tokens: it may come back only as one whose padding reaches so far.
            pages.pad.fill_(EMPTY)
            pages.pad[:rows].copy_(start)
            pages.seen.add_(queries)
            self.state.filled, self.state.unfinished = True, queries
        plan = None
        if pages.device_plan is not None and queries <= PLANNED:
            # Nobody reads the query's numbers: its shape, its dtype and where it lies are what a plan needs.
            query = pages.latent_pages[0].new_empty(()).expand(rows * queries, heads, pages.sizes.latent)
            plan = pages.device_plan(q_nope=query, page_table=table, seq_lens=lengths, cu_seqlens_q=cu_seqlens_q)
        batch = PagedBatch(table, lengths, cu_seqlens_q, slots, positions, queries, padded=False, plan=plan, workspace=pages.workspace)
        return Step(batch, fresh)


def other_layers(config: Any, latent_layers: Sequence[int]) -> dict[int, Any]:
    """New caches for a model's layers besides those that hold latents, as transformers makes them, by number.

    Raises InvalidInput for one that keeps keys and values: it would need pages of its own.
    """
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

    count = max(latent_layers) + 1
    kinds = getattr(config, "layer_types", None)
    count = max(count, len(kinds) if kinds is not None else 0)
    missing = [i for i in range(count) if i not in set(latent_layers)]
    if not missing:
        return {}
    made = DynamicCache(config=config).layers
    for i in missing:
        if i >= len(made) or not isinstance(made[i], LinearAttentionCacheLayerMixin) or isinstance(made[i], CacheLayerMixin):
            kind = type(made[i]).__name__ if i < len(made) else "none"
            raise InvalidInput(f"cache of layer {i}", kind, "latents, or the states of linear attention")
    return {i: made[i] for i in missing}
