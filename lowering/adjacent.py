"""A guard on adjacency: compiled code that reads several weights as one runs only while they are adjacent in memory.

Dynamo guards a parameter's dtype, shape and strides, but not its address: `module.weight.data = other` passes all of its guards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

ALIGNED = 16
"""Bytes. Inductor clones an input that is less aligned, and the clone ends where that input ends."""


@dataclass(frozen=True)
class Adjacent:
    """Graph inputs that follow each other in memory.

    sources: Dynamo's source of each.
    nbytes: of each.
    """

    sources: tuple[Any, ...]
    nbytes: tuple[int, ...]

    def conditions(self) -> list[str]:
        """Python expressions over `L` and `G`, the frame's locals and globals."""
        # A method with torch 2.11, a property with 2.13.
        pointers = [f"{source.name() if callable(source.name) else source.name}.data_ptr()" for source in self.sources]
        follows = [f"{a} + {n} == {b}" for a, b, n in zip(pointers, pointers[1:], self.nbytes, strict=False)]
        return [f"{pointers[0]} % {ALIGNED} == 0", *follows]


def source_of(node: fx.Node) -> Any:
    """Dynamo's source of a graph input, or None."""
    return getattr(node, "_dynamo_source", None) if node.op == "placeholder" else None


def can_guard() -> bool:
    """Is Dynamo compiling a frame, so that guards can be added?"""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def guard(groups: Sequence[Adjacent]) -> None:
    """Guard the frame that Dynamo is compiling on the adjacency of every group.

    The guard compares addresses with each other, not with constants, so layers that share compiled code keep sharing it. It is a guard
    of the frame and runs last: Dynamo skips the guards of a single input while the module dicts that lead to it are unchanged.
    """
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is not None and groups:
        # A guard has one source. The first weight's names this one; the check itself looks up all of them.
        code = [condition for group in groups for condition in group.conditions()]
        context.guards_context.dynamo_guards.add(Guard(groups[0].sources[0], partial(_create, code=code)))


def _create(builder: Any, guard: Any, *, code: list[str]) -> None:
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{line}  # weights that are read as one" for line in code])
