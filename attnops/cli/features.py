"""The features of every kernel, found by querying it with typical Problems of its op and one
feature at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from attnops.core.kernel import Kernel, all_kernels
from attnops.core.problem import Extent, Problem, Refusal, Target, altered
from attnops.ops import OPS, typical

TARGETS = ("cpu", "sm80", "sm90", "sm100")
BF16 = torch.bfloat16
F32 = torch.float32
E4M3 = torch.float8_e4m3fn
I32 = torch.int32
U8 = torch.uint8

Change = dict[str, Any]


class Feature(NamedTuple):
    """A column of the table: `change` turns a typical Problem into one that asks for the feature.

    An op has it if its optional arguments ask for all that is changed, or if `Op.shown` names it.
    """

    name: str
    change: Change


FEATURES = (
    Feature("float32", {"dtype": F32, "kv_dtype": F32}),
    Feature("window", {"window": (1023, -1)}),
    Feature("softcap", {"softcap": True}),
    Feature("sinks", {"sinks": True, "sinks_dtype": BF16}),
    Feature("mask", {"mask": "additive"}),
    Feature("padding", {"kv_range": True}),
    Feature("lse", {"lse": True}),
    Feature("heads 192/128", {"q_heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128}),
    Feature("float8 keys", {"kv_dtype": E4M3, "kv_scales": True}),
    Feature("float8 query", typical.FLOAT8),
    Feature("equal bits", {"repeatable": "must"}),
    Feature("packed latents", {"kv_dtype": U8}),
    Feature("chunk", {"attention_chunk": 8192}),
    Feature("decode", {"queries": Extent(1, 1, 1), "tokens": Extent(8, 8, 8)}),
    *(Feature(f"page {n}", {"page_size": n}) for n in (1, 16, 64, 128)),
)

_NUMBERS: tuple[Change, ...] = (
    {"dtype": I32, "kv_dtype": I32, "page_size": 64, "tokens": Extent.of(8)},
)


def problems(op: str, target: Target) -> tuple[Problem, ...]:
    """Typical Problems of `op` on `target`, the most usual first. An op that says none gets the
    Problem of a table of integers."""
    return tuple(Problem.of(op=op, target=target, **base) for base in OPS[op].typical or _NUMBERS)


def columns(op: str) -> tuple[Feature, ...]:
    """The features that make sense for `op`."""
    spec = OPS[op].spec
    fields = {fact.field for args in spec.features.values() for a in args for fact in a.facts}
    fields |= {"page_size"} & spec.measures.keys() if spec.stored else set()
    return tuple(f for f in FEATURES if f.change.keys() <= fields or f.name in OPS[op].shown)


class Support(NamedTuple):
    """`runs`: the targets on which the kernel takes a typical Problem. `takes`: by feature, the
    targets on which it takes that too."""

    kernel: Kernel
    runs: tuple[str, ...]
    takes: Mapping[str, tuple[str, ...]]


def support(kernel: Kernel) -> Support:
    """Query `kernel` for every target and feature, as if its packages were installed."""
    assume = tuple(p.module for p in kernel.packages)
    bases = list(zip(*(problems(kernel.op, Target.parse(t, assume)) for t in TARGETS), strict=True))

    def taken(asked: Iterable[Problem]) -> tuple[str, ...]:
        return tuple(t for t, p in zip(TARGETS, asked, strict=True) if not kernel.refusals(p))

    base = next(filter(taken, bases), bases[0])
    return Support(
        kernel,
        taken(base),
        {f.name: taken(altered(p, **f.change) for p in base) for f in columns(kernel.op)},
    )


def why_not(kernel: Kernel, target: Target) -> tuple[Refusal, ...]:
    """Why `kernel` refuses every typical Problem on `target`: absent packages, or the shared
    refusals. Empty if it takes one."""
    if absent := kernel.absences(target):
        return absent
    asked = problems(kernel.op, target)
    answers = [
        kernel.refusals(p)
        for p in (*asked, *(altered(p, **f.change) for p in asked for f in columns(kernel.op)))
    ]
    if not all(answers):
        return ()
    shared = set.intersection(*({r.field for r in reasons} for reasons in answers))
    return tuple(r for r in answers[0] if r.field in shared) or answers[0]


def ops_of_kernels() -> tuple[str, ...]:
    """Every op that has a kernel, in order of registration."""
    return tuple(dict.fromkeys(k.op for k in all_kernels()))
