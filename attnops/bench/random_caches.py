"""Random keys and values in place of those of a long prompt.

Exact numbers of a prompt of n tokens take O(n²) operations in float32: those of Llama-3-8B at 128k
tokens more than four minutes on an H200. Exact numbers of the few tokens that follow do not, and a
graph does not know who wrote the pages.

Attention averages values over all keys, so that with the weights of a new model little of it is
left after many tokens: no logits would show whether a page was read. These values are as much
larger as their average is smaller. A page of p tokens that is left out then changes what a layer
adds by about sqrt(p / n), which for 16 tokens of 128k is a few times the rounding of bfloat16.

New tokens have no such values, and one of 32k changes less than the rounding. So all is compared
after a short random cache, too: one that is written to a wrong slot, or is not read, shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.bench import Point
from attnops.bench.work import heads
from attnops.hf.cache.names import argument
from attnops.hf.cache.paged_cache import PagedModelCache

VALUES = 8.0
"""The standard deviation of values, by the root of the tokens. Attention is then the larger part
of what a layer adds."""

LATER = 4096
"""Tokens of a prompt that follow a random cache: those of a chunk over pages
(`attnops.hf.steps.prompt.CHUNK`), so that its graph runs them."""


SHORT = 64
"""Tokens of the short cache."""


def tail_of(context: int) -> int:
    """The tokens of a prompt of this length that follow a random cache."""
    return min(LATER, context // 2)


def serve(config: Any, point: Point) -> bool:
    """Is the point long, and does every layer keep the keys and values of all tokens?"""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    others = ("sliding_window", "kv_lora_rank")
    whole = kinds <= {"full_attention"} and not any(getattr(config, n, None) for n in others)
    return point.long and whole


def short_of(length: int) -> int:
    """The tokens of the short cache beside one of this length."""
    return min(SHORT, length // 2)


def logits_after(
    forward: Callable[..., Any],
    model: Any,
    empty: Callable[[], Any],
    prompt: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Logits `[2, B, 1, V]` of a prompt whose last tokens run after a random cache, and after a
    short one. empty: an empty cache, in this dtype, of the model that `forward` runs."""
    rows, context = prompt.shape
    tail = tail_of(context)

    def after(length: int) -> Tensor:
        cache = empty()
        fill(cache, model, rows, length, dtype)
        given = {**argument(model, cache), "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = forward(prompt[:, -tail:], **given).logits
        return logits

    return torch.stack([after(context - tail), after(short_of(context - tail))])


def fill(cache: Any, model: Any, rows: int, length: int, dtype: torch.dtype) -> None:
    """Put `length` tokens of each row into an empty cache of transformers or of pages: the same
    numbers into every one, and those of the first rows into one of fewer rows.

    dtype: of the cache. A wider one holds the numbers of the model's dtype, too.
    """
    config, narrow = model.config, model.get_input_embeddings().weight
    for layer in range(config.num_hidden_layers):
        made = (_tokens(config, layer, row, length, narrow) for row in range(rows))
        if isinstance(cache, PagedModelCache):
            _into_pages(cache, layer, made)
        else:
            keys, values = map(torch.stack, zip(*made, strict=True))
            cache.update(keys.to(dtype), values.to(dtype), layer)
    if isinstance(cache, PagedModelCache):
        state = cache.state
        state.pages.advance(state.pages.pad.new_zeros(rows), length)
        state.filled = True


def _tokens(
    config: Any, layer: int, row: int, length: int, narrow: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values `[Hkv, S, D]` of a row in a layer."""
    _, kv_heads, head_dim = heads(config)
    source = torch.Generator(narrow.device).manual_seed((layer << 16) + row)

    def take() -> Tensor:
        return torch.randn(
            (kv_heads, length, head_dim), generator=source, dtype=narrow.dtype, device=narrow.device
        )

    return take(), take() * (VALUES * length**0.5)


def _into_pages(cache: PagedModelCache, layer: int, made: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Write the keys and values of the rows into their pages of a layer."""
    pages = cache.state.pages
    pages.use()
    table = pages.tables[pages.table_of[cache.numbers[layer]]]
    for row, tokens in enumerate(made):
        for into, new in zip(cache.pages_of(layer), tokens, strict=True):
            size = into.shape[1]
            whole = -(-new.shape[1] // size)
            rest = whole * size - new.shape[1]
            by_page = pad(new, (0, 0, 0, rest)).unflatten(1, (whole, size))
            into[table[row, :whole].long()] = by_page.permute(1, 2, 0, 3)
