"""Kinds of calls as tables of measured times write them: the fields that differ from the defaults,
by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnops.core.arguments import STORED
from attnops.core.checks import name
from attnops.core.problem import AS_OTHERS, LEAVES, Extent, Problem, leaf
from attnops.measured.kinds import counting

LARGEST_INT = 1 << 31
FIELDS = tuple(n for n in LEAVES if n not in ("op", "target"))
USUAL = {n: leaf(Problem.kind(""), n) for n in FIELDS}
DTYPES = {name(d): d for d in (*STORED, torch.uint8)}
OF = {Extent: int, tuple: int, torch.dtype: str, frozenset: str}
"""The types that JSON has in place of those of a Problem's fields, or of their parts."""


def leaves_of(kind: Problem) -> dict[str, Any]:
    """The fields of a kind that differ from the defaults, as JSON has them. See `Problem.kind`."""
    found = {n: leaf(kind, n) for n in FIELDS}
    usual = USUAL | {n: found[other] for n, other in AS_OTHERS.items()}
    return {"op": kind.op} | {n: _plain(value) for n, value in found.items() if value != usual[n]}


def _plain(value: Any) -> Any:
    match value:
        case torch.dtype():
            return name(value)
        case Extent():
            return value.lo
        case tuple() | frozenset():
            return sorted(value) if isinstance(value, frozenset) else list(value)
    return value


def kind_of(leaves: Mapping[str, Any]) -> Problem:
    """The kind with these fields, as `leaves_of` gives them. Raises ValueError, TypeError or
    KeyError."""
    kind = Problem.kind(**{n: _leaf(n, value) for n, value in leaves.items()})
    if not counting(kind.op).sound(kind):
        raise ValueError(f"problem {leaves} has no such sizes")
    return kind


def _leaf(n: str, value: Any) -> Any:
    usual: Any = "" if n == "op" else LEAVES[n].default
    if isinstance(usual, tuple | frozenset):
        _check_parts(n, value, usual, value)
        return type(usual)(value)
    _check_parts(n, value, usual, [value])
    if isinstance(usual, Extent):
        return Extent(value, value, value)
    return DTYPES[value] if isinstance(usual, torch.dtype) else value


def _check_parts(n: str, value: Any, usual: Any, parts: Any) -> None:
    of = OF.get(type(usual), type(usual))
    right = type(parts) is list and all(type(part) is of for part in parts)
    if not right or (isinstance(usual, tuple) and len(parts) != len(usual)):
        raise ValueError(f"{n}: got {value!r}, want a value like {_plain(usual)!r}")
    if of is int and max(map(abs, parts)) > LARGEST_INT:
        raise ValueError(f"{n}: got a number that is too large")
