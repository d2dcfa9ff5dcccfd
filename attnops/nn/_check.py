"""Checks of the modules' arguments. Those of the tensors' further shapes and dtypes are the ops' own."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from attnops.errors import InvalidInput, fail


def size(field: str, value: Any, unit: str = "") -> int:
    """`value`, a positive int."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fail(InvalidInput, field, repr(value), f"an int >= 1{unit and f' ({unit})'}")
    return value


def number(field: str, value: Any, least: float, below: float = math.inf) -> float:
    """`value`, a number with `least <= value < below`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < below:
        fail(InvalidInput, field, repr(value), f"a number >= {least} and < {below}")
    return float(value)


def window(value: Any) -> tuple[int, int]:
    """`value`, a (left, right) pair."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or any(type(side) is not int or side < -1 for side in value):
        fail(InvalidInput, "window", repr(value), "(left, right), two ints >= -1 (-1: unbounded)")
    return value[0], value[1]


def tensor(field: str, value: Any, layout: str, *dims: int) -> Tensor:
    """`value`, a tensor of one of `dims` dimensions."""
    if not isinstance(value, Tensor):
        fail(InvalidInput, field, type(value).__name__, f"a tensor {layout}")
    if value.dim() not in dims:
        fail(InvalidInput, field, f"shape {tuple(value.shape)}", layout)
    return value


def last(field: str, value: Tensor, *sizes: int) -> Tensor:
    """`value`, whose last sizes are `sizes`, viewed so that a compiler knows them as constants."""
    lead = value.dim() - len(sizes)
    for dim, want in enumerate(sizes, lead):
        if value.shape[dim] != want:
            fail(InvalidInput, f"{field}.shape[{dim}]", value.shape[dim], f"{want}, as the module was built")
    return value.view(*value.shape[:lead], *sizes)


def absent(why: str, **given: object) -> None:
    """None of `given` is there."""
    for field, value in given.items():
        if value is not None:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            fail(InvalidInput, field, got, f"None {why}")
