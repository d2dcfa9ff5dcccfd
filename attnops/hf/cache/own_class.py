"""Models that take only a cache of a class of their own, as MiniMax, whose layers of lightning
attention keep their states in it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from attnops.hf.cache.paged_cache import PagedKeyCache, PagedLatentCache
from attnops.hf.models.states import StateSizes


def takes_any(owner: Any) -> bool:
    """Does a model, or a class of models, take transformers' DynamicCache?"""
    return bool(getattr(owner, "_supports_default_dynamic_cache", lambda: True)())


def own_class(owner: Any) -> Any:
    """The class of cache that a model takes alone, where it keeps the states of lightning attention
    beside keys; else None."""
    cls: Any = type(owner)
    return _own_class(cls)


@functools.cache
def _own_class(cls: Any) -> Any:
    files = () if takes_any(cls) else (vars(sys.modules[each.__module__]) for each in cls.__mro__)
    found = (value for names in files for value in names.values())
    return next((value for value in found if hasattr(value, "set_linear_cache")), None)


def class_in_pages(owner: Any, latent: bool) -> Any:
    """The class of a model's caches in pages. It may take only one of its own."""
    return _in_pages(PagedLatentCache if latent else PagedKeyCache, own_class(owner))


@functools.cache
def _in_pages(kind: Any, own: Any) -> Any:
    body = {"__module__": __name__, "own": own, "linear_cache": ()}
    return kind if own is None else type(kind.__name__, (kind, own), body)


def sizes_in(cache: Any, layer: int) -> StateSizes:
    """Of the states of a layer with lightning attention, from its model's own cache, which has them
    transposed and in the dtype of the tokens."""
    state: Tensor = cache.get_linear_cache(layer)
    return StateSizes(torch.Size((0, 0)), state.dtype, state.mT.shape[1:], torch.float32)


def empty(own: Any, config: Any) -> DynamicCache:
    """A new cache of transformers' own with all layers. own: as `own_class`."""
    if own is None:
        return DynamicCache(config=config)
    made: DynamicCache = own()
    made.layers.extend(DynamicLayer() for _ in range(config.num_hidden_layers))
    return made
