"""How tables of measured times count layers that carry a state.

batch: requests. queries: tokens of each. ratio: 1.
"""

from __future__ import annotations

from functools import partial
from math import inf

from attnops.core.checks import name
from attnops.core.problem import Problem
from attnops.measured import Counting, Sizes, Work, sizes_of
from attnops.measured.cost import decodes
from attnops.measured.kinds import NEAR_HEAD_DIM, octaves

KEPT = 4
"""Inputs of a channel that a convolution reads and keeps, in most models."""

PARTS = ("bias", "activation")
"""The arguments that tell kinds of convolutions apart."""


def _steps_alike(kind: Problem, p: Problem) -> bool:
    """Are both steps of one token, or both not, with numbers of one width?"""
    return decodes(kind) == decodes(p) and kind.dtype.itemsize == p.dtype.itemsize


# Matrix states ------------------------------------------------------------------------------------


def _distance(kind: Problem, p: Problem) -> float:
    """Octaves between the heads and their sizes."""
    dims = (kind.head_dim, p.head_dim), (kind.v_head_dim, p.v_head_dim)
    near = all(b and max(a / b, b / a) <= NEAR_HEAD_DIM for a, b in dims)
    if not near or not _has_heads(p) or not _steps_alike(kind, p):
        return inf
    return (
        sum(octaves(a, b) for a, b in dims)
        + 0.5 * octaves(kind.q_heads, p.q_heads)
        + 0.25 * octaves(kind.group_size, p.group_size)
    )


def _place(kind: Problem, p: Problem) -> Sizes:
    """Numbers of the state count as requests."""
    batch, queries, _ = sizes_of(p)
    return Sizes(batch * _numbers(p) / _numbers(kind), queries, 1.0)


def _numbers(p: Problem) -> int:
    """Those of a request's state."""
    return p.q_heads * p.head_dim * p.v_head_dim


def _work(flops: float, kind: Problem, at: Sizes) -> Work:
    """The states, read and written in float32, and the tokens. flops: of a number of the state, a
    token."""
    tokens = at.batch * at.queries
    width = 2 * (kind.kv_heads * kind.head_dim + kind.q_heads * kind.v_head_dim)
    moved = 8.0 * at.batch * _numbers(kind) + tokens * width * kind.dtype.itemsize
    return Work(moved, flops * tokens * _numbers(kind))


def _has_heads(kind: Problem) -> bool:
    return min(kind.q_heads, kind.kv_heads, kind.head_dim, kind.v_head_dim) >= 1


def _title(kind: Problem) -> str:
    """`mamba2_scan step 128/1 heads of 128x64 bfloat16`."""
    heads = f"{kind.q_heads}/{kind.kv_heads} heads of {kind.head_dim}x{kind.v_head_dim}"
    return f"{kind.op} {_when(kind)} {heads} {name(kind.dtype)}"


def _when(kind: Problem) -> str:
    return "step" if decodes(kind) else "tokens"


def of_states(flops: float) -> Counting:
    """Of an op with so many operations a token for each number of a request's state."""
    return Counting(_distance, _place, partial(_work, flops), _has_heads, _title)


# Convolutions -------------------------------------------------------------------------------------


def _conv_distance(kind: Problem, p: Problem) -> float:
    """Octaves between the channels, and 0.25 for each of PARTS that one of both has."""
    if not p.in_features or not _steps_alike(kind, p):
        return inf
    others = sum(part in kind.asks ^ p.asks for part in PARTS)
    return octaves(kind.in_features, p.in_features) + 0.25 * others


def _conv_place(kind: Problem, p: Problem) -> Sizes:
    """Channels count as requests."""
    batch, queries, _ = sizes_of(p)
    return Sizes(batch * p.in_features / kind.in_features, queries, 1.0)


def _conv_work(kind: Problem, at: Sizes) -> Work:
    """The tokens and the states, read and written, and the weight."""
    tokens = at.batch * at.queries
    numbers = kind.in_features * (2 * tokens + 2 * at.batch * KEPT + KEPT)
    return Work(numbers * kind.dtype.itemsize, 2.0 * KEPT * tokens * kind.in_features)


def _has_channels(kind: Problem) -> bool:
    return kind.in_features >= 1


def _conv_title(kind: Problem) -> str:
    """`causal_conv1d tokens 8192 channels activation bfloat16`."""
    parts = "".join(f" {part}" for part in PARTS if part in kind.asks)
    return f"{kind.op} {_when(kind)} {kind.in_features} channels{parts} {name(kind.dtype)}"


OF_CONVOLUTIONS = Counting(_conv_distance, _conv_place, _conv_work, _has_channels, _conv_title)
