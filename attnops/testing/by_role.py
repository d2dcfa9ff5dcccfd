"""The arguments of a scene that no row gives: numbers from the features, and random tensors by what
the record says that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg
from attnops.ops.case_data import Scene

SPREAD = {torch.int8: 3.0, torch.float8_e4m3fn: 60.0, torch.float8_e5m2: 9000.0}
"""Of new keys that are written into quantised pages: some exceed the range of the dtype by far."""


def number(scene: Scene, a: Arg) -> Any:
    """The argument that is no tensor, None where it is left out."""
    f = scene.f
    if a.holds == "scale_of_logits":
        return f.head_dim**-0.5 if f.scale is None else f.scale
    for fact in a.facts:
        if scene.padding is None and fact.field in ("padded", "holes"):
            return False
        value = getattr(f, fact.field, None)
        value = value if fact.part is None or value is None else value[fact.part]
        if value != a.default:
            return value
    return None


def dtype_of(a: Arg, dtype: torch.dtype) -> torch.dtype:
    """The only dtype of an argument, or this one."""
    return a.dtypes[0] if isinstance(a.dtypes, tuple) and len(a.dtypes) == 1 else dtype


def tensor(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor | None:
    """The tensor of this argument as the features ask; None where they leave it out."""
    source, f = scene.source, scene.f
    if a.holds in ROLES:
        return ROLES[a.holds](scene, a, shape)
    facts = {fact.field for fact in a.facts}
    if "mask" in facts:
        return source.mask(shape, f)
    if "sinks" in facts:
        return None if f.sinks is None else source.normal(*shape, dtype=f.sinks)
    returned = a.written and "lse" in facts and f.lse
    return _wanted(scene, a, shape, returned or a.default is REQUIRED)


def _wanted(scene: Scene, a: Arg, shape: Sequence[int], asked: bool) -> Tensor | None:
    """Random numbers, or memory to be written. None unless it is asked for, or given a dtype."""
    source, wanted = scene.source, scene.given.get(a.name)
    if not (wanted or asked):
        return None
    dtype = wanted if isinstance(wanted, torch.dtype) else dtype_of(a, scene.f.dtype)
    if a.written:
        return torch.empty(*shape, dtype=dtype, device=source.device)
    return source.normal(*shape, dtype=dtype)


def _stored(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    return scene.source.stored(*shape, dtype=dtype_of(a, scene.f.kv_dtype or scene.f.dtype))


def _queries(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    return scene.source.query(shape, scene.f)


def _new_keys(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    return scene.source.normal(
        *shape, dtype=scene.f.dtype, spread=SPREAD.get(scene.f.kv_dtype or scene.f.dtype, 1.0)
    )


def _scales(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor | None:
    quantised = scene.f.q_dtype if a.holds == "scale_of_query" else scene.f.kv_dtype
    return None if quantised is None else scene.source.scales(shape[0], quantised)


def _factors(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor | None:
    return scene.source.normal(*shape).exp() if scene.f.temperature else None


def _shares(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    return scene.source.normal(*shape, dtype=scene.given[a.name]).abs()


def _weight_rows(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    dtype = dtype_of(a, scene.f.dtype)
    if dtype == torch.uint8:
        return scene.source.stored(*shape, dtype=dtype)
    return scene.source.normal(*shape, dtype=dtype, spread=shape[-1] ** -0.5)


def _states(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    return scene.source.normal(*shape, dtype=dtype_of(a, scene.f.dtype))


def _exponents(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor:
    """2**-9 to 2**-5."""
    return scene.source.stored(*shape, dtype=torch.uint8) % 5 + 244


ROLES: dict[str, Callable[[Scene, Arg, Sequence[int]], Tensor | None]] = {
    "pages": _stored,
    "keys": _stored,
    "queries": _queries,
    "new_keys": _new_keys,
    "scale_of_query": _scales,
    "scale_of_keys": _scales,
    "factors": _factors,
    "shares": _shares,
    "weight_rows": _weight_rows,
    "exponents": _exponents,
    "states": _states,
}
"""How the tensor of an argument is made, by what it holds."""
