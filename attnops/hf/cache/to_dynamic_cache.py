"""`unpaged`: the tokens of a cache of pages in a cache of transformers' own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from attnops.hf.cache.model_pages import EMPTY
from attnops.hf.cache.other_layers import keeps_states
from attnops.hf.cache.own_class import empty
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.models.states import States

TOGETHER = 2**28
"""The most bytes of several layers in one tensor, so that a copy fills all of them."""


class Run(NamedTuple):
    """Tokens that lie side by side in the pages of some rows.

    rows: of the batch. slots: in the pages of each row. places: in the copy of each row.
    """

    rows: slice
    slots: slice
    places: slice


def unpaged(cache: PagedModelCache, config: Any) -> DynamicCache:
    """A copy of the tokens of all rows that the last step had, with zeros for padding. The host
    waits for the device.

    config: of the text model. Raises torch.OutOfMemoryError.
    """
    pages, made = cache.state.pages, empty(cache.own, config)
    pages.use()
    length, *padding = torch.cat([pages.seen[None], pages.pad]).tolist()
    padding = [pad for pad in padding if pad < EMPTY]
    layers, begun = list(cache.numbers), dict[Any, Any]()
    for table, numbers, whole in pages.allocations:
        # Every row has its pages side by side, behind the null page.
        kept = [x[:, 1:].unflatten(1, (pages.sizes.rows, -1)).flatten(2, 3) for x in whole]
        if len(kept) == 1:
            # Latents, with the rotated keys behind them. They have one head.
            rank = config.kv_lora_rank
            kept = [*kept[0][..., None, :].tensor_split((rank,), -1)]
        window, slots = pages.windows[table], kept[0].shape[2]
        first = max(0, length - window + 1) if window else 0
        # The pages of a window were allocated for the last tokens that there is room for.
        skipped = -(-pages.sizes.length // pages.page_size) * pages.page_size - slots
        runs = [*_runs(padding, first, length, slots, skipped)]
        sizes, padded = (len(padding), length - first), first < max(padding, default=0)
        copies = (_copies(x, runs, sizes, padded) for x in kept)
        for number, keys, values in zip(numbers, *copies, strict=True):
            _fill(made.layers[layers[number]], keys, values, length, begun)
    for layer, place in cache.states.items():
        _fill_state(made, layer, pages.states.of(place, len(padding), keeps=False))
    return made


def _fill_state(made: Any, layer: int, states: States) -> None:
    """Give a layer of a cache copies of its states."""
    conv, state, _ = states
    if hasattr(made, "set_linear_cache"):
        made.set_linear_cache(layer, state.mT.to(conv.dtype, copy=True).contiguous())
        return
    own = made.layers[layer]
    own.update_conv_state(conv)
    if state.numel():  # not of a convolution alone, whose layer can be cropped
        own.update_recurrent_state(state)


def _runs(
    padding: Sequence[int], first: int, length: int, slots: int, skipped: int
) -> Iterator[Run]:
    """The runs of the positions from `first` to `length`, of rows with so much padding.

    slots: of a row, which its tokens use in turn. skipped: the token that is in slot 0.
    """
    row = 0
    for pad, alike in groupby(padding):
        rows = slice(row, row + len([*alike]))
        row, token = rows.stop, max(0, first - pad)
        while token < length - pad:
            slot, place = (token - skipped) % slots, token + pad - first
            count = min(length - pad - token, slots - slot)
            yield Run(rows, slice(slot, slot + count), slice(place, place + count))
            token += count


def _copies(
    kept: Tensor, runs: Sequence[Run], sizes: tuple[int, int], padded: bool
) -> Iterator[Tensor]:
    """The tokens of each layer, `[rows, heads, positions, width]`.

    kept: `[layers, rows, slots, heads, width]`. sizes: the rows and positions of the copies.
    padded: are there zeros between the runs?
    """
    (rows, positions), (heads, width) = sizes, kept.shape[-2:]
    layer_bytes = rows * positions * heads * width * kept.element_size()
    for some in kept.split(max(1, TOGETHER // max(1, layer_bytes))):
        shape = len(some), rows, heads, positions, width
        made = some.new_zeros(shape) if padded else some.new_empty(shape)
        for run in runs:
            made[:, run.rows, :, run.places] = some[:, run.rows, run.slots].transpose(2, 3)
        # Memory of its own for each layer: a layer may be pickled alone, and a write to one spoils
        # no gradient that needs another.
        yield from (each.clone() for each in made.unbind())


def _fill(own: Any, keys: Tensor, values: Tensor, length: int, begun: dict[Any, Any]) -> None:
    """Give a layer of the cache its tokens. begun: layers that have theirs, by their kind."""
    kind = type(own), getattr(own, "sliding_window", 0)
    if kind in begun and not keeps_states(own):
        # It takes longer to initialise them one by one, and for a window the host waits.
        vars(own).update(vars(begun[kind]))
    else:
        own.lazy_initialization(keys, values)
        begun[kind] = own
    own.keys, own.values = keys, values
    if own.is_sliding:
        own.cumulative_length = length
        if keys.shape[2] >= own.sliding_window:
            # Of pages that hold the whole text.
            last = slice(1 - own.sliding_window, None)
            own.keys, own.values = keys[:, :, last], values[:, :, last]
