"""How tables of measured times count linear layers."""

from __future__ import annotations

from math import inf

from attnops.core.checks import name
from attnops.core.problem import Problem
from attnops.measured import Counting, Sizes, Work
from attnops.measured.kinds import octaves

MOST_TIMED = 64
"""Rows of the largest calls that are timed: more of them are no longer bound by the weight."""

PARTS = {"norm_weight": "norm", "activation": "activation", "residual": "residual"}
"""The arguments that tell kinds of calls apart, each with its word in the title of a kind."""


def distance(kind: Problem, p: Problem) -> float:
    """Octaves between the weights' sizes, and 1 for each of PARTS that one of both has; infinite
    for another width of numbers, and for more rows than were timed."""
    if p.sizes.tokens.lo > MOST_TIMED:
        return inf
    if not p.in_features or not p.out_features or p.dtype.itemsize != kind.dtype.itemsize:
        return inf
    others = sum(part in kind.asks ^ p.asks for part in PARTS)
    return (
        octaves(kind.out_features, p.out_features)
        + octaves(kind.in_features, p.in_features)
        + others
    )


def place(kind: Problem, p: Problem) -> Sizes:
    """batch: the rows of `p`. ratio: the size of its weight as a multiple of the kind's."""
    numbers = p.in_features * p.out_features / (kind.in_features * kind.out_features)
    return Sizes(float(max(p.sizes.tokens.hint, 1)), 1.0, numbers)


def work(kind: Problem, at: Sizes) -> Work:
    """The weight, and the rows that are read and written."""
    outs = kind.out_features // 2 if "activation" in kind.asks else kind.out_features
    numbers = at.ratio * kind.in_features * kind.out_features
    rows = at.batch * (kind.in_features + outs * (2 if "residual" in kind.asks else 1))
    return Work((numbers + rows) * kind.dtype.itemsize, 2.0 * at.batch * numbers)


def has_a_weight(kind: Problem) -> bool:
    """Has the weight rows and columns?"""
    return min(kind.out_features, kind.in_features) >= 1


def title(kind: Problem) -> str:
    """`linear 6144x4096 norm bfloat16`."""
    parts = "".join(f" {word}" for part, word in PARTS.items() if part in kind.asks)
    return f"{kind.op} {kind.out_features}x{kind.in_features}{parts} {name(kind.dtype)}"


COUNTING = Counting(distance, place, work, has_a_weight, title)
