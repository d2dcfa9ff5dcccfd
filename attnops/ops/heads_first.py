"""Dense attention for callers whose tensors have their heads before their tokens, as transformers' have.

It is `attnops.attention` of the transposed tensors. Eager calls like one made before go straight to what the kernel that was chosen then
makes of such tensors, and nothing is checked, selected, or transposed that it does not want transposed. While one token of each request
attends to keys that grow in number, calls are alike as long as all that a choice rests on is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Read where they lie: a function that hands one out costs more than the read.
from attnops.kernel import _REGISTRY, Capture, Kernel
from attnops.ops import dense
from attnops.ops._direct import KINDS, PLAIN, SHAPES, TensorGuards, told
from attnops.ops.watched import watched
from attnops.problem import _OVERRIDE, alike
from attnops.select import _ACTIVE, choose, key_for

Run = Callable[..., Tensor]
"""From (query, key, value, mask, sinks, kv_start, kv_end) to the output."""

Kept = tuple[Any, int, int, Run]
"""Guards of the tensors that were given; the fewest and the most keys, 0 and 0 where the guards know their number; what serves."""

_SEEN: dict[tuple[Any, ...], tuple[Kept, ...]] = {}
"""By all that is no tensor: at most KINDS, with at most SHAPES of each."""


def known(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, kv_start: Tensor | None, kv_end: Tensor | None,
    scale: float | None, causal: bool, window_left: int, softcap: float, kernel: str | None,
) -> Run | None:  # fmt: skip
    """What serves the tensors of this call, if one like it was made before; else None, as for what others than the kernel must see.

    Under autocast nothing is known, so that this may be asked before tensors are cast.
    """
    if watched():
        return None
    plain = mask is None and sinks is None and kv_start is None and kv_end is None
    which = _which(plain or (mask is None, sinks is None, kv_start is None, kv_end is None), scale, causal, window_left, softcap, kernel)
    kept = _SEEN.get(which)
    if kept is None:
        return None
    tensors = (query, key, value) if plain else _given(query, key, value, mask, sinks, kv_start, kv_end)
    for guards, fewest, most, run in kept:
        if guards.check(*tensors):
            if not most:
                return run
            keys = key.size(2)
            if fewest <= keys <= most and value.size(2) == keys and (mask is None or mask.size(3) == keys):
                return run
    return None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, kv_start: Tensor | None, kv_end: Tensor | None,
    scale: float | None, causal: bool, window_left: int, softcap: float, kernel: str | None,
) -> Tensor:  # fmt: skip
    """`[B, S, Hq, Dv]`: `attnops.attention` of query `[B, Hq, S, D]`, key `[B, Hkv, K, D]` and value `[B, Hkv, K, Dv]`.

    All else is as there, and so are the errors. What serves the call is `known` for those like it from then on.
    """
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if (
        watched() or torch.is_autocast_enabled(query.device.type) or not _plain(query, key, value, mask, sinks, kv_start, kv_end)
        or type(window_left) is not int or not (scale is None or type(scale) is float)
    ):  # fmt: skip
        return dense.attention(
            q, k, v, scale=scale, causal=causal, window=(window_left, -1), softcap=softcap, mask=mask, sinks=sinks, kv_start=kv_start,
            kv_end=kv_end, kernel=kernel,
        )  # fmt: skip
    args = (q, k, v, mask, sinks, None, None, kv_start, kv_end)
    policy = key_for("attention", kernel)
    kwargs: dict[str, Any] = {
        "scale": dense.default_scale(query, scale), "causal": causal, "window_left": window_left, "softcap": softcap
    }  # fmt: skip
    output: Tensor = dense.ATTENTION.packet.default(*args, **kwargs, policy=policy)[0]
    there = mask is None, sinks is None, kv_start is None, kv_end is None
    which = _which(all(there) or there, scale, causal, window_left, softcap, kernel)
    chosen = choose(dense.ATTENTION.problem(*args, **kwargs), policy)
    if chosen.capture is Capture.NEVER:
        return output  # whether the stream is captured is asked at every call
    kept = _kept(chosen, args, {**kwargs, "policy": policy}, (query, key, value, mask, sinks, kv_start, kv_end))
    if len(_SEEN) >= KINDS:
        _SEEN.clear()
    _SEEN[which] = (kept, *_SEEN.get(which, ())[: SHAPES - 1])
    return output


def _which(
    there: bool | tuple[bool, ...], scale: float | None, causal: bool, window_left: int, softcap: float, kernel: str | None
) -> tuple[Any, ...]:
    # 1, 1.0 and True are equal, and only one of them is what the op takes for a scale.
    return (
        _REGISTRY.generation, _OVERRIDE.target, _ACTIVE.key, kernel, scale, type(scale), window_left, type(window_left), causal, softcap,
        there,
    )  # fmt: skip


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


def _plain(*tensors: Tensor | None) -> bool:
    """Can there be guards of them? Of a subclass there may not be, and of a tensor that comes twice there are none."""
    given = _given(*tensors)
    memory = all(type(t) in PLAIN["Tensor"] and not t.is_neg() for t in given)
    return TensorGuards is not None and memory and len({*map(id, given)}) == len(given)


def _kept(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[Tensor | None, ...]) -> Kept:
    query, key, mask = tensors[0], tensors[1], tensors[3]
    assert query is not None and key is not None
    run = kernel.heads_first and kernel.heads_first(*args, **kwargs)
    settled = None if run is not None or kernel.settled is None else kernel.settled(*args, **kwargs)
    if run is None:
        run = _turned(kernel.run, told(dense.ATTENTION, kernel.run, kwargs)) if settled is None else _turned(settled, {})
    if query.size(2) != 1 or key.size(2) == 0 or settled is not None:
        return TensorGuards(*_given(*tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None), 0, 0, run
    # Of keys, values and mask whatever but their number decides; of their strides only whether the last dim has gaps.
    sizes: list[list[int | None]] = [[*t.shape] for t in _given(*tensors)]
    strides: list[list[int | None]] = [[*t.stride()] for t in _given(*tensors)]
    for i, dim in ((1, 2), (2, 2), *(((3, 3),) if mask is not None else ())):
        sizes[i][dim], strides[i][:3] = None, [None] * 3
    guards = TensorGuards(*_given(*tensors), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards, *alike(key.size(2)), run


def _turned(run: Callable[..., Any], statics: dict[str, Any]) -> Run:
    """`run` of the op's own layout for tensors whose heads come first."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, start: Tensor | None, end: Tensor | None
    ) -> Tensor:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output: Tensor = run(q, k, v, mask, sinks, None, None, start, end, **statics)[0]
        return output

    return call
