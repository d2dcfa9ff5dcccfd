"""The caches of a model's layers that have no pages: states of linear attention and convolutions, as transformers keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from attnops.errors import InvalidInput


def cache_layers(config: Any) -> list[Any]:
    """Empty caches of all layers, as transformers makes them."""
    from transformers.cache_utils import DynamicCache

    made: list[Any] = DynamicCache(config=config).layers
    return made


def other_layers(config: Any, paged_layers: Sequence[int]) -> dict[int, Any]:
    """New caches for a model's layers besides those that have pages, as transformers makes them, by number.

    Raises InvalidInput for one that keeps keys and values: it would need pages of its own.
    """
    kinds = getattr(config, "layer_types", None)
    count = max(max(paged_layers) + 1, len(kinds) if kinds is not None else 0)
    missing = [i for i in range(count) if i not in set(paged_layers)]
    if not missing:
        return {}
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    made = cache_layers(config)
    for i in missing:
        if i >= len(made) or not isinstance(made[i], LinearAttentionCacheLayerMixin) or isinstance(made[i], CacheLayerMixin):
            kind = type(made[i]).__name__ if i < len(made) else "none"
            raise InvalidInput(f"cache of layer {i}", kind, "one of pages, or the states of linear attention")
    return {i: made[i] for i in missing}
