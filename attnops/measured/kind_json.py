"""Kinds of calls as tables of measured times write them: the fields that differ from the defaults, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnops.core.checks import name
from attnops.core.problem import AS_OTHERS, LEAVES, Extent, Problem, leaf
from attnops.measured.kinds import counting

LARGEST_INT = 1 << 31


def leaves_of(kind: Problem) -> dict[str, Any]:
    """The fields of a kind that differ from the defaults, as JSON has them. See `Problem.kind`."""
    found = {n: leaf(kind, n) for n in LEAVES if n not in ("op", "target")}
    usual = {n: leaf(Problem.kind(kind.op), n) for n in found} | {n: found[other] for n, other in AS_OTHERS.items()}
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
    """The kind with these fields, as `leaves_of` gives them. Raises ValueError, TypeError, KeyError or AttributeError."""
    kind = Problem.kind(**{n: _leaf(n, value) for n, value in leaves.items()})
    if not counting(kind.op).sound(kind):
        raise ValueError(f"problem {leaves} has no such sizes")
    return kind


def _leaf(n: str, value: Any) -> Any:
    usual, found, parts = "" if n == "op" else LEAVES[n].default, value, [value]
    match usual:
        case torch.dtype():
            found = getattr(torch, value)
        case Extent():
            found = Extent(value, value, value)
        case tuple() | frozenset() if isinstance(value, list):
            found, parts = type(usual)(value), value
    of = int if isinstance(usual, Extent | tuple) else str if isinstance(usual, torch.dtype | frozenset) else type(usual)
    right = type(found) is type(usual) and all(type(part) is of for part in parts)
    if not right or (isinstance(usual, tuple) and len(found) != len(usual)):
        raise ValueError(f"{n}: got {value!r}, want a value like {_plain(usual)!r}")
    if any(isinstance(part, int) and abs(part) > LARGEST_INT for part in parts):
        raise ValueError(f"{n}: got a number that is too large")
    return found
