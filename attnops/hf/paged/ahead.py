"""Kernels of the first steps over new pages begin to be compiled before the model runs, while its first layers are on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnops.core.kernel import own_kernel
from attnops.core.precompile import ahead
from attnops.core.select import active_policy
from attnops.graphs.buckets import decode_sizes
from attnops.hf.attention.descriptor import Range
from attnops.hf.paged.attention import Asked, attend_keys
from attnops.hf.paged.cache import PagedModelCache
from attnops.hf.paged.pages import ModelPages
from attnops.ops.pages.plan import PagedSpec


class _Layer(NamedTuple):
    layer_idx: int


def begin(pages: ModelPages, make: Callable[..., PagedModelCache], rows: int, prompt: int) -> None:
    """Have kernels begin to build what a prompt of `prompt` tokens a row, and the decode steps after it, will wait for (`Kernel.ahead`).

    Once for the pages, a number of rows, and a policy. make: returns a cache over given pages, with `filled=True` without a change to them.
    """
    kind, sizes = (rows, prompt.bit_length(), active_policy()), pages.sizes
    if sizes.device.type == "cpu" or kind in pages.begun or not isinstance(sizes.layers[0], PagedSpec):
        return
    pages.begun.add(kind)
    many = next(n for n in sorted(decode_sizes(sizes.rows)) if n >= rows) if sizes.fixed else rows
    with contextlib.suppress(Exception):  # steps themselves raise it
        for count, of in ((prompt, rows), (1, many)):
            step(make(pages, filled=True), of, count)


def step(cache: PagedModelCache, rows: int, count: int) -> None:
    """As `begin`, of the attention of one step of `count` tokens of each row. cache: of keys and values, for this call alone."""
    pages, layers = cache.state.pages, dict[Any, int]()
    for layer, number in cache.numbers.items():
        layers.setdefault(pages.sizes.layers[number], layer)
    kernels = (own_kernel(op, pages.sizes.kernel) for op in ("attention", "paged_attention"))
    dense, paged = kernels
    cache.state.filled = count == 1
    with torch.no_grad(), ahead():
        start = torch.zeros(rows, dtype=torch.int64, device=pages.sizes.device)
        for spec, layer in layers.items():
            dims = (spec.q_heads, spec.head_dim), (spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.v_head_dim or spec.head_dim)
            q, k, v = (start.new_empty((rows, count, *dim), dtype=spec.dtype).transpose(1, 2) for dim in dims)
            sinks = None if spec.sinks is None else start.new_empty(spec.q_heads, dtype=spec.sinks)
            asked = Asked(_Layer(layer), q, k[None], v[None], None, cache, 0.0, True, None, float(spec.softcap), sinks, {})
            attend_keys(asked, Range(True, spec.window[0], start, start + count), dense, paged)
