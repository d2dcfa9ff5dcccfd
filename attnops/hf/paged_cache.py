"""`PagedModelCache`: a cache in pages that attnops owns, in the shape transformers knows. What is the same whatever lies in the pages.

What transformers asks of a cache it gets: lengths, resets, rollbacks, one layer object a layer. What it does not get is keys and values:
`update` hands what is new on as it came, and the attention function (see `attnops.hf.latent` and `attnops.hf.keyed`) writes and reads the
pages. It is handed on with one dimension too many, so that a consumer which does not know of this cache fails instead of computing
nonsense.

A row is a request, and has the same pages as long as the cache lives. Padding on the left is not stored: row b's token at position p of
the padded batch is token `p - pad[b]` of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import Cache, CacheLayerMixin

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.errors import InvalidInput

EMPTY = 2**62
"""Padding of a row that has no token yet: more than anything seen."""

PLENTY = 2**30
"""Bytes: pages are negotiated as if scratch were free. What the kernel then asks for is made."""


class Sizes(Protocol):
    """What pages are made for. rows: requests. length: tokens of each, padding included. Everything else must be the same."""

    @property
    def rows(self) -> int: ...
    @property
    def length(self) -> int: ...


def holds(have: Any, want: Any) -> bool:
    """Would pages made for `have` do for `want`? Both are `Sizes`, tuples that begin with rows and length."""
    return bool(have.rows >= want.rows and have.length >= want.length and have[2:] == want[2:])


class Tokens(NamedTuple):
    """The new tokens of a step, as many of each row, one row after the other. B rows, T tokens.

    before: int64 `[B]`, tokens the rows' pages have; negative where more padding is to come. positions: int64 `[T]`, that of each token
    in its request; padding's are negative. rows: int64 `[T]`, whose each token is. cu_seqlens_q: int32 `[B + 1]`. new: how many of a
    row. heads: query heads of the first layer. fresh: the cache was empty before.
    """

    before: Tensor
    positions: Tensor
    rows: Tensor
    cu_seqlens_q: Tensor
    new: int
    heads: int
    fresh: bool


class Past(NamedTuple):
    """The last tokens before a step, for pages that have no room for them and the step's. W of each row.

    slots: int64 `[B * W]`, where they lie. start: int64 `[B]`, how many of a row's first ones are none of its tokens.
    """

    slots: Tensor
    start: Tensor


class View(NamedTuple):
    """A step, as the layers that share a page table see it. past: set where they cannot attend through the table."""

    batch: PagedBatch
    past: Past | None = None


class Step(NamedTuple):
    """What the layers of one forward share. views: one a page table. fresh: the cache was empty before it."""

    views: tuple[View, ...]
    fresh: bool


class Rows(NamedTuple):
    """What a step of one token each says of its rows by itself. start: int64 `[B]`, the padding. real: bool `[B]`, is it stored?"""

    start: Tensor
    real: Tensor


class Pages(Protocol):
    """The tensors of a cache. All are made at once, are written in place, and keep their addresses.

    seen: int64 `[]`, positions so far, padding included. pad: int64 `[rows]`, those of them that are a row's padding; EMPTY for a row
    that the last step had not. page_size: in tokens.
    """

    seen: Tensor
    pad: Tensor
    page_size: int

    @property
    def sizes(self) -> Sizes: ...

    def clear(self) -> None:
        """Forget every token."""

    def advance(self, start: Tensor, count: int) -> None:
        """Count `count` new positions of rows with padding `start` `[B]` as seen."""

    def views(self, tokens: Tokens) -> tuple[View, ...]:
        """A step that is not yet counted as seen, for each page table."""
        ...

    def may_keep(self, length: Tensor) -> None:
        """Raise InvalidInput when the first `length` `[]` positions cannot be all that is left: tokens they need are gone."""


def counters(rows: int, device: torch.device, fixed: bool) -> tuple[Tensor, Tensor]:
    """New `seen` and `pad` of an empty cache."""
    with ordinary():
        seen = torch.zeros((), dtype=torch.int64, device=device)
        pad = torch.full((rows,), EMPTY, dtype=torch.int64, device=device)
    tell_compiler(seen)
    tell_compiler(pad, sizes=() if fixed else (0,))
    return seen, pad


def tell_compiler(*tensors: Tensor, sizes: tuple[int, ...] = ()) -> None:
    """These never move. Other caches of the same model have other sizes in the dims `sizes`, for which nothing need be compiled anew."""
    from torch._dynamo import mark_static_address, maybe_mark_dynamic

    for tensor in tensors:
        mark_static_address(tensor)
        maybe_mark_dynamic(tensor, list(sizes))


def count_seen(pages: Pages, start: Tensor, count: int) -> None:
    """What `advance` does to `seen` and `pad`."""
    # A row that this step has not will lack its tokens: it may come back only as one whose padding reaches so far.
    pages.pad.fill_(EMPTY)
    # Not into a slice, of which Inductor of torch 2.13 asks whether it is as long as the whole.
    pages.pad.index_copy_(0, torch.arange(start.shape[0], device=start.device), start)
    pages.seen.add_(count)


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

    def __init__(self, pages: Pages) -> None:
        self.pages: Any = pages
        self.give_back: Any = None
        self.step: Step | None = None
        # Read by the host, so it is no tensor: which form runs depends on it.
        self.filled = False
        self.unfinished = 0
        # Set while a step in graphs is traced or captured (attnops.hf.decode).
        self.rows: Rows | None = None

    def end_step(self) -> None:
        """No step is under way: its last layer has written, or nothing of it counts."""
        self.step, self.rows, self.unfinished = None, None, 0


class PagedLayer(CacheLayerMixin):
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
        """What is new, `[1, B, ...]` of `[B, ...]`. Nothing is stored yet."""
        return key_states[None], value_states[None]

    def get_seq_length(self) -> Any:
        """int64 `[]`, positions so far, padding included: a tensor, as a static cache gives."""
        return self.state.pages.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(room in tokens, padding `[rows]`). There are no keys at hand: a row's first key stands at the position after its padding.

        That the second is a tensor tells attnops' mask function whose cache it makes a mask for. `[B, 1]`: whatever the mask is.
        """
        rows = self.state.rows
        return self.state.pages.sizes.length, self.state.pages.pad if rows is None else rows.start[:, None]

    def get_max_length(self) -> int:
        """Positions there is room for."""
        room: int = self.state.pages.sizes.length
        return room

    def reset(self) -> None:
        """Forget every token."""
        self.state.pages.clear()
        self.state.step, self.state.filled, self.state.unfinished = None, False, 0

    def crop(self, tokens_to_remove: Any) -> None:
        """Forget the last `-tokens_to_remove` positions. A positive number, as transformers once had it, is the length to keep.

        Raises InvalidInput when a sliding window would need tokens whose pages have been used again: nothing is then forgotten.
        """
        if self.number == 0:
            self.keep(self.left(tokens_to_remove))

    def left(self, tokens_to_remove: Any) -> Tensor:
        """int64 `[]`, positions that `crop` would keep. Raises as it would."""
        pages = self.state.pages
        seen: Tensor = pages.seen
        if isinstance(tokens_to_remove, Tensor):
            asked = tokens_to_remove.to(seen).reshape(())
            left = torch.where(asked > 0, torch.minimum(seen, asked), (seen + asked).clamp(min=0))
        elif tokens_to_remove > 0:
            left = seen.clamp(max=tokens_to_remove)
        else:
            left = (seen + tokens_to_remove).clamp(min=0)
        pages.may_keep(left)
        return left

    def keep(self, length: Tensor) -> None:
        """Forget all but the first `length` `[]` positions."""
        seen, unfinished = self.state.pages.seen, self.state.unfinished
        if unfinished:
            self.state.unfinished = max(0, unfinished - int(seen - length))
        seen.copy_(length)

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
    return InvalidInput("past_key_values", "a cache of pages", want)


class PagedModelCache(Cache):
    """A batch in pages, for `past_key_values=` of a model patched with `cache="paged"`. Made by `Patched.new_cache`.

    It holds `max_batch` rows of `max_length` positions each, padding included. It is filled by calls of the model, in turns: each brings
    as many new positions to every row. Batches may shrink, but a row that was left out has no further steps until `reset()`, which makes
    the cache as new. `crop(-n)` takes back the last n positions.
    """

    def __init__(self, pages: Pages, paged_layers: Sequence[int], others: Callable[[], dict[int, Any]], filled: bool = False) -> None:
        """paged_layers: numbers, rising, of the model's layers that have pages. others: makes caches of the rest, by number.

        filled: the pages keep what they hold.
        """
        self.state = State(pages)
        if filled:
            self.state.filled = True
        else:
            pages.clear()
        at = {layer: number for number, layer in enumerate(paged_layers)}
        self.first_layer, self.last_layer = paged_layers[0], paged_layers[-1]
        self._others = others
        rest = others()
        count = max((*paged_layers, *rest)) + 1
        super().__init__(layers=[PagedLayer(self.state, at[i]) if i in at else rest[i] for i in range(count)])

    def reset(self) -> None:
        """Forget every token. The states of linear attention, whose shape is that of a batch, are made anew."""
        super().reset()
        for layer, states in self._others().items():
            self.layers[layer] = states

    def crop(self, tokens_to_remove: Any) -> None:
        """Forget the last `-tokens_to_remove` positions of all layers, or of none. A positive number is the length to keep.

        Raises InvalidInput when a sliding window would need what is gone. States of linear attention raise transformers' own RuntimeError
        where they cannot go back.
        """
        first: Any = self.layers[self.first_layer]
        left = first.left(tokens_to_remove)
        others: list[Any] = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        for layer in others:
            layer.crop(tokens_to_remove)
        first.keep(left)

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

    def pages_of(self, layer: int) -> Any:
        """The pages of the model's layer `layer`: a tensor of latents, or one of keys and one of values."""
        raise NotImplementedError

    def number_of(self, layer: int) -> int:
        """Which of the pools is that of the model's layer `layer`."""
        own: Any = self.layers[layer]
        number: int = own.number
        return number

    def step_of(self, layer: int, start: Tensor, count: int, heads: int) -> Step:
        """What the forward that `layer` runs in brings. The first layer works it out and counts the new positions as seen.

        start: int64 `[B]`, the padding of each row. count: new positions of each. heads: query heads of the layer.
        Raises InvalidInput when an earlier layer has not run, or when the step before this one ended in an error half way.
        """
        if layer == self.first_layer:
            self.state.step = self._begin(start, count, heads)
        step = self.state.step
        if step is None:
            raise InvalidInput("layer_idx", layer, f"layer {self.first_layer} before it: the first layer begins a step of this cache")
        return step

    def wrote(self, layer: int) -> None:
        """What the step brings to `layer` is in its pages. With the last layer's the step is whole."""
        if layer == self.last_layer:
            self.state.step, self.state.unfinished = None, 0

    def _begin(self, start: Tensor, count: int, heads: int) -> Step:
        pages, rows, unfinished = self.state.pages, start.shape[0], self.state.unfinished
        if unfinished:
            got = f"a cache whose last step, of {unfinished} positions, did not reach every layer"
            raise InvalidInput("past_key_values", got, f"reset(), or crop(-{unfinished}), before it is used again")
        device = pages.seen.device
        before = pages.seen - start
        positions = (before[:, None] + torch.arange(count, device=device)).reshape(-1)
        if self.state.rows is not None:
            positions = torch.where(self.state.rows.real, positions, -1)
        owner = torch.arange(rows, device=device)[:, None].expand(rows, count).reshape(-1)
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
        fresh = not self.state.filled
        views = pages.views(Tokens(before, positions, owner, cu_seqlens_q, count, heads, fresh))
        # Whoever runs the model on fake tensors, as `explain` does, has stored nothing.
        if torch.compiler.is_compiling() or not isinstance(positions, FakeTensor):
            pages.advance(start if self.state.rows is None else torch.where(self.state.rows.real, start, EMPTY), count)
            self.state.filled, self.state.unfinished = True, count
        return Step(views, fresh)
