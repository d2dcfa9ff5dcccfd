"""`Call`: an op with its arguments, before the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnops.call import Spec
from attnops.layout import Arg, evaluate
from attnops.ops import OPS
from attnops.problem import Problem

Make = Callable[[Arg, list[int]], Tensor | None]

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True)
class Call:
    """One call of an op, before it is made.

    Args:
        op: name of the op.
        arguments: by the schema's name, those that are not at their defaults; without `policy`.
        free: by argument, bool and broadcastable to it: entries that no kernel may read and that may hold anything, such as unused
            pages, keys outside a range, and padding.
        writes: arguments that the op writes without reading them.
    """

    op: str
    arguments: Mapping[str, Any]
    free: Mapping[str, Tensor] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, up to the last that is given."""
        names = [a.name for a in self.spec.args if not a.keyword]
        while names and self.arguments.get(names[-1]) is None:
            names.pop()
        return tuple(self.arguments.get(n) for n in names)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword-only arguments that are given."""
        return {a.name: self.arguments[a.name] for a in self.spec.args if a.keyword and a.name in self.arguments}

    @property
    def spec(self) -> Spec:
        """That of the op's record."""
        return OPS[self.op].spec

    @property
    def mutated(self) -> tuple[str, ...]:
        """Arguments given here that the record declares written."""
        return tuple(a.name for a in self.spec.args if a.written and self.arguments.get(a.name) is not None)

    @property
    def problem(self) -> Problem:
        """The Problem that selection would see."""
        return OPS[self.op].problem(self.record)

    @property
    def record(self) -> Any:
        """The op's record of these arguments."""
        return OPS[self.op].call(*self.args, **self.kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by name."""
        return {n: v for n, v in self.arguments.items() if isinstance(v, Tensor)}

    def with_(self, **arguments: Any) -> Call:
        """The same call with other arguments; None takes one away."""
        merged = {n: v for n, v in {**self.arguments, **arguments}.items() if v is not None}
        return replace(self, arguments=merged)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Call:
        """The same call with every tensor replaced by `change(name, tensor)`."""
        return self.with_(**{n: change(n, t) for n, t in self.tensors().items()})


def filled(op: str, sizes: Mapping[str, Any], given: Mapping[str, Any], make: Make, narrow: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of a call of `op`: those given, and the tensors that `make` makes of the others, of the shapes of their layouts.

    sizes: by the layouts' letters. A tensor of an unknown size is left out, and one for which `make` returns None.
    narrow: the sizes that a dim of several sizes ("1 | B") does not take.
    """
    arguments: dict[str, Any] = {}
    for a in OPS[op].spec.args:
        if a.name in given:
            arguments[a.name] = given[a.name]
        elif a.tensor and (shape := _shape(a, {**given, **sizes}, narrow)) is not None and (value := make(a, shape)) is not None:
            arguments[a.name] = value
    return arguments


def _shape(a: Arg, sizes: dict[str, Any], narrow: Sequence[str]) -> list[int] | None:
    shape = []
    for size in a.layout:
        first, *others = size.text.removeprefix(">=").split("|")
        try:
            shape.append(evaluate(others[-1] if others and others[-1].strip() not in narrow else first, sizes))
        except NameError:
            return None
    return shape
