"""Kinds of calls, by which tables of measured times are keyed: Problems whose sizes are left open.

A kind speaks for its neighbours. How near a call is, which sizes of the kind have its work, and how
much work that is, a family of ops says by its `Counting`, on its records. Ops whose records say
nothing are counted as attention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log2
from typing import NamedTuple

from attnops.core.checks import name
from attnops.core.problem import Problem
from attnops.core.record import RECORDS
from attnops.measured.cost import Sizes, Work, decodes, sizes_of, work_of_attention

NEAR_HEAD_DIM = 2.0
"""A kind speaks for head dims up to this factor away from its own."""


class Counting(NamedTuple):
    """How the calls of a family are counted, by functions of a kind and a Problem of the same op,
    or of either alone.

    distance: how unlike the Problem the kind is: 0 for the same kind, infinite when it does not
    speak for the Problem.
    place: the sizes of the kind with the work of the Problem. work: the bytes and operations at
    some sizes.
    sound: has a kind all that the others want? title: a kind in a few words.
    """

    distance: Callable[[Problem, Problem], float]
    place: Callable[[Problem, Problem], Sizes]
    work: Callable[[Problem, Sizes], Work]
    sound: Callable[[Problem], bool]
    title: Callable[[Problem], str]


def counting(op: str) -> Counting:
    """That of an op."""
    spec = RECORDS.get(op)
    return ATTENTION if spec is None or spec.counted is None else spec.counted


def distance(kind: Problem, p: Problem) -> float:
    """How unlike `p` a kind is: 0 for the same kind, infinite when it does not speak for `p`."""
    return counting(kind.op).distance(kind, p) if kind.op == p.op else inf


def place(kind: Problem, p: Problem) -> Sizes:
    """The sizes of `kind` with the work of `p`."""
    return counting(kind.op).place(kind, p)


def work(kind: Problem, at: Sizes) -> Work:
    """The bytes and operations of a call of this kind."""
    return counting(kind.op).work(kind, at)


def title(kind: Problem) -> str:
    """A kind in a few words."""
    return counting(kind.op).title(kind)


def octaves(a: float, b: float) -> float:
    """How often one of both is to be doubled to be the other; 0 where one is 0."""
    return abs(log2(a / b)) if a and b else 0.0


# Attention ----------------------------------------------------------------------------------------


def _distance(kind: Problem, p: Problem) -> float:
    """The weights below count octaves."""
    if not _may_speak_for(kind, p):
        return inf
    own, rules, decode = kind.rules, p.rules, decodes(kind)
    return (
        0.75 * sum(octaves(a, b) for a, b in _dims(kind, p))
        + octaves(kind.group_size, p.group_size) * (1.0 if decode else 0.5)
        + 0.25 * (octaves(kind.kv_heads, p.kv_heads) + octaves(kind.page_size, p.page_size))
        + 0.1 * octaves(own.window[0] + 1, rules.window[0] + 1)
        + 0.5 * (not decode and own.causal != rules.causal)
        + 0.25 * ((own.sinks != rules.sinks) + (own.softcap != rules.softcap))
        + 2.0 * (kind.results.lse != p.results.lse)
    )


def _may_speak_for(kind: Problem, p: Problem) -> bool:
    if (
        not _has_heads(p)
        or p.rules.mask != "none"
        or p.rules.attention_chunk
        or _must_match(kind) != _must_match(p)
    ):
        return False
    # The forward of a training step speaks for such calls only.
    if kind.results.lse and not p.results.lse:
        return False
    if _without_mask(kind) and kind.step.sizes_equal != p.step.sizes_equal:
        return False
    return all(b and max(a / b, b / a) <= NEAR_HEAD_DIM for a, b in _dims(kind, p))


def _without_mask(kind: Problem) -> bool:
    """Do equal sizes say that no mask must be written out?"""
    return not decodes(kind) and kind.rules.causal and not kind.rules.kv_range


def _dims(kind: Problem, p: Problem) -> tuple[tuple[int, int], ...]:
    return (kind.head_dim, p.head_dim), (kind.v_head_dim, p.v_head_dim)


def _must_match(p: Problem) -> tuple[object, ...]:
    """A kind speaks only for calls with the same of these."""
    return (
        p.rope_dim,
        p.rules.kv_range,
        p.rules.windowed,
        decodes(p),
        p.page_size > 0,
        p.dtype.itemsize,
        p.kv_dtype.itemsize,
    )


def _place(kind: Problem, p: Problem) -> Sizes:
    """Heads and head dims count as requests: key heads in a decode step, query heads in a prefill.
    Over pages, where many keys may meet few queries, the query heads of a group count as queries.
    Less than one request is one with less work.
    """
    batch, queries, ratio = sizes_of(p)
    decode = decodes(kind)
    paged = kind.page_size > 0 and not decode
    heads = p.kv_heads / kind.kv_heads if decode or paged else p.q_heads / kind.q_heads
    if paged:
        group = p.group_size / kind.group_size
        queries, ratio = queries * group, ratio / group
        if ratio < 1:
            queries, ratio = queries * ratio**0.5, 1.0
    batch *= heads * (p.head_dim + p.v_head_dim) / (kind.head_dim + kind.v_head_dim)
    if batch < 1 and decode:
        batch, ratio = 1.0, ratio * batch
    elif batch < 1:
        batch, queries = 1.0, queries * batch**0.5
    return Sizes(batch, queries, ratio)


def _has_heads(kind: Problem) -> bool:
    return min(kind.q_heads, kind.kv_heads) >= 1


def _title(kind: Problem) -> str:
    rules, decode = kind.rules, decodes(kind)
    dims = f"{kind.head_dim}" + f"/{kind.v_head_dim}" * (kind.v_head_dim != kind.head_dim)
    words = [
        kind.op,
        "decode" if decode else "extend",
        f"{kind.q_heads}/{kind.kv_heads} heads of {dims}",
        name(kind.dtype),
    ]
    words += [f"keys {name(kind.kv_dtype)}"] * (kind.kv_dtype != kind.dtype)
    words += [f"page {kind.page_size}"] * bool(kind.page_size)
    words += (
        [f"window {rules.window[0]}"] * (rules.window[0] >= 0)
        + ["sinks"] * rules.sinks
        + ["padded"] * rules.kv_range
    )
    words += ["soft cap"] * rules.softcap + ["with lse"] * kind.results.lse
    return " ".join(words + ["not causal"] * (not rules.causal and not decode))


ATTENTION = Counting(_distance, _place, work_of_attention, _has_heads, _title)
