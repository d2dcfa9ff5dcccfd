"""A guard on addresses: compiled code that reads several weights as one may not run once one of them lies elsewhere.

Dynamo guards a parameter's dtype, shape and strides, and not where it lies: `module.weight.data = other` passes all of its guards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

ALIGNED = 16
"""Bytes. Inductor copies an input that is not aligned so, and the copy is no longer than the input's own shape says."""


@dataclass(frozen=True)
class Row:
    """Inputs of a graph that lie one behind the other. sources: Dynamo's, of each; nbytes: of each."""

    sources: tuple[Any, ...]
    nbytes: tuple[int, ...]

    def conditions(self) -> list[str]:
        """As Python over `L` and `G`, the frame's locals and globals."""
        pointers = [f"{name_of(source)}.data_ptr()" for source in self.sources]
        beside = [f"{a} + {n} == {b}" for a, b, n in zip(pointers, pointers[1:], self.nbytes, strict=False)]
        return [f"{pointers[0]} % {ALIGNED} == 0", *beside]


def name_of(source: Any) -> str:
    """The expression that finds what a source stands for. A method with torch 2.11, a property with 2.13."""
    found = source.name
    return str(found() if callable(found) else found)


def source_of(node: fx.Node) -> Any:
    """Where Dynamo found an input of a graph, or None."""
    return getattr(node, "_dynamo_source", None) if node.op == "placeholder" else None


def can_guard() -> bool:
    """Is Dynamo compiling a frame, whose guards are still open?"""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def guard(rows: Sequence[Row]) -> None:
    """Have the frame that is being compiled run its code only while every row lies as it does now, at whatever address.

    Addresses are compared with each other, so that layers which share compiled code go on sharing it. The check belongs to the frame
    as a whole and runs after all others: those of a single input are left out when the dicts of modules that lead there are unchanged.
    """
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None or not rows:
        return
    # A guard has one source; this one is named after the first, and none is looked up by it.
    context.guards_context.dynamo_guards.add(Guard(rows[0].sources[0], partial(_create, rows=tuple(rows))))


def _create(builder: Any, guard: Any, *, rows: tuple[Row, ...]) -> None:
    code = [condition for row in rows for condition in row.conditions()]
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{line}  # weights that are read as one" for line in code])
