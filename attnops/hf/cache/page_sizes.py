"""The sizes of the pages of a cache for a patched model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnops.cache.latent import columns_of
from attnops.cache.ledger import Layer, Room
from attnops.core.problem import Problem
from attnops.hf.models.states import StateSizes
from attnops.ops.pages.plan import over_latents

# New tokens of a row that a sliding layer has room for beside the window, where no more are asked
# for.
DRAFTS = 32
# As `drafts`: any number of positions may be taken back, so that sliding layers have pages for the
# whole text.
ALL = 2**30


class Sizes(NamedTuple):
    """The request that pages are made for.

    rows: requests.
    length: tokens of each, padding included.
    layers: of one kind and dtype; their page_size is 0, for it is still to be chosen.
    device: of the pages.
    kernel: the kernel that reads them, or None.
    drafts: new tokens of a row that a sliding layer has room for beside the window, and that can be
    taken back. A longer step attends to
        copies of the window.
    fixed: graphs are captured over the pages, so the compiler need not know of other sizes.
    states: of the layers with states beside pages.
    """

    rows: int
    length: int
    layers: tuple[Problem, ...]
    device: torch.device
    kernel: str | None
    drafts: int = DRAFTS
    fixed: bool = False
    states: tuple[StateSizes, ...] = ()


def room_of(sizes: Sizes, page_size: int) -> Room:
    """The room of these pages."""
    rows, length = sizes.rows, sizes.length
    whole = -(-length // page_size)
    # Two columns at least: the compiler specialises on a table of one.
    latents = over_latents(sizes.layers[0])
    columns = columns_of(length, page_size) if latents else max(2, whole)
    layers = list(map(layer_of, sizes.layers))
    pages = 1 + rows * whole
    return Room(layers, pages, page_size, rows, columns, sizes.drafts, length, "max_length")


def layer_of(layer: Problem) -> Layer:
    """What a layer keeps of a token, and the window that it keeps."""
    if over_latents(layer):
        return Layer(((layer.head_dim,),))
    keys, values = (layer.kv_heads, layer.head_dim), (layer.kv_heads, layer.v_head_dim)
    return Layer((keys, values), layer.rules.window[0] + 1)
