"""Caches of the layers without pages of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from attnops.core.errors import InvalidInput, PatchError
from attnops.core.record import need

# transformers 5.15 has no layers without a cache.
_NOTHING: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
_BLANK = ("moe", "mlp")


def layers_without_pages(
    config: Any, paged_layers: Sequence[int], apart: Collection[int] = ()
) -> dict[int, Any]:
    """New caches, by number, of the layers without pages: states of linear attention and
    convolutions, as transformers keeps them, and nothing for a layer of experts alone.

    apart: layers that are left out.

    Raises InvalidInput for a layer that keeps keys and values, which would need pages.
    """
    count = max(max(paged_layers) + 1, len(getattr(config, "layer_types", None) or ()))
    if len(paged_layers) == count:
        return {}
    missing = sorted({*range(count)}.difference(paged_layers, apart))
    made: list[Any] = DynamicCache(config=config).layers
    for i in missing:
        own = made[i] if i < len(made) else None
        fits = has_states(own) or isinstance(own, _NOTHING)
        need(
            fits,
            f"cache of layer {i}",
            type(own).__name__,
            "one of pages, or the states of linear attention",
        )
    return {i: made[i] for i in missing}


def check_others(owner: Any, config: Any, paged_layers: Sequence[int]) -> None:
    """Raise PatchError where there is no cache for the layers without pages. config: of the text
    of a model."""
    try:
        layers_without_pages(config, paged_layers)
    except InvalidInput as error:
        raise PatchError(
            f'patch: cache="paged" cannot make a cache for {type(owner).__name__}: {error}'
        ) from error


def has_states(layer: Any) -> bool:
    """Does a layer of a cache keep states of linear attention, and no keys?"""
    return keeps_states(layer) and not isinstance(layer, CacheLayerMixin)


def keeps_states(layer: Any) -> bool:
    """Does it keep states, with keys or without?"""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def layers_with_states(config: Any) -> tuple[int, ...]:
    """The numbers of the layers that keep states. transformers 5.17 has a cache of states for a
    layer of experts alone, too, which leaves it empty."""
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    made = enumerate(DynamicCache(config=config).layers)
    return tuple(n for n, own in made if keeps_states(own) and kinds.get(n) not in _BLANK)
