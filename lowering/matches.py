"""Nodes that one call of an op can replace: the norm before them, and the residual after them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ..core.fx_effects import writer
from ..core.op import Op
from ..core.private_torch import FakeTensor
from .graph_tools import arguments, facts_of, fake_of, is_parameter
from .patterns import Norm, call_of, norm_of, pairs, uncast

BESIDE = ("gate", "residual")
"""The inputs that are rows of the result's width."""


@dataclass(kw_only=True)
class Match:
    """Nodes that one call replaces.

    op, record: of the call.
    last: the node whose value the call gives.
    left: parts that are left as they are, and why.
    """

    op: ClassVar[Op]
    record: ClassVar[Any]

    x: Any
    last: fx.Node
    inner: set[fx.Node]
    residual: fx.Node | None = None
    left: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """What the call computes, in order."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, fx.Node | None]:
        """The tensors that the call reads, by argument."""

    @property
    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """The other arguments."""

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """The arguments of the record, but for the output."""
        return {**self.inputs, **self.numbers, **changed}


@dataclass(frozen=True)
class GainedNorm:
    """A norm whose gain is a parameter and a number that is added to it.

    steps: the nodes that compute the gain.
    """

    norm: Norm
    gain: fx.Node
    offset: float
    steps: tuple[fx.Node, ...]

    @property
    def nodes(self) -> frozenset[fx.Node]:
        return self.norm.nodes | {*self.steps}

    def against(self, dtype: torch.dtype, others: set[fx.Node]) -> str:
        """Why a call of this dtype may not compute it, or "". others: the nodes that would miss
        what is replaced."""
        x, gain = fake_of(self.norm.x), fake_of(self.gain)
        narrow = self.offset and any(fake_of(s).dtype != self.norm.dtype for s in self.steps)
        if others:
            return f"norm: {min(others).name} reads it, too"
        if narrow or not self.norm.is_wide:
            return f"norm: it is not computed in {self.norm.dtype}"
        if {x.dtype, gain.dtype} != {dtype}:
            return f"norm: of {x.dtype} by a gain of {gain.dtype}"
        if gain.shape != x.shape[-1:]:
            return f"norm: of {list(x.shape)} by a gain of {list(gain.shape)}"
        return ""


def gained_norm(node: Any) -> GainedNorm | None:
    """The norm whose result the node is."""
    if (norm := norm_of(node)) is None or (found := _gain(norm.gain)) is None:
        return None
    return GainedNorm(norm, *found)


def readers(nodes: Set[fx.Node]) -> set[fx.Node]:
    """The other nodes that read one of these."""
    return {user for node in nodes for user in node.users} - nodes


def against_inputs(match: Match, weight: Tensor) -> str:
    """Why one call may not read the inputs of the match, or "". weight: what they must be like."""
    inputs = {name: given for name, given in match.inputs.items() if given is not None}
    for name, given in inputs.items():
        if why := _unlike(fake_of(given), weight):
            return f"{name} is {why}"
    # The residual is read where the call will be, and the others are read before.
    inputs.pop("residual", None)
    return writer(min(match.inner), match.last, inputs.values(), fake_of)


def _unlike(given: Any, weight: Tensor) -> str:
    if type(given) is not FakeTensor:
        return f"a {type(given).__name__}"
    if (given.dtype, given.device) != (weight.dtype, weight.device):
        return f"{given.dtype} on {given.device}, the weight {weight.dtype} on {weight.device}"
    return ""


def _gain(factor: Any) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """(the parameter, the number added to it, the nodes) of the gain of a norm."""
    if is_parameter(parameter := uncast(factor)):
        return parameter, 0.0, (factor,) if factor is not parameter else ()
    for offset, weight in pairs(factor, "add"):
        if isinstance(offset, (int, float)) and is_parameter(parameter := uncast(weight)):
            nodes = (factor, weight) if weight is not parameter else (factor,)
            return parameter, float(offset), nodes
    return None


def take_residual(match: Match) -> None:
    """Take in a sum of the value with a tensor of its shape and dtype."""
    last, passed = match.last, set[fx.Node]()
    while len(last.users) == 1:
        [user] = last.users
        same = uncast(user) is last and fake_of(user).dtype == fake_of(last).dtype
        if same or _is_dropout(user):
            last = user
            passed.add(user)
            continue
        for one, other in pairs(user, "add"):
            if one is not last or other is last or not isinstance(other, fx.Node):
                continue
            if facts_of(fake_of(other))[0] != facts_of(fake_of(last))[0]:
                match.left.append("residual: of another shape or dtype")
            else:
                match.residual, match.last = other, user
                match.inner |= {*passed, user}
        return


def _is_dropout(node: fx.Node) -> bool:
    """Is it a dropout that is off?"""
    _, _, training, inplace = arguments(node, "input", "p", "training", "inplace")
    return call_of(node)[0] == "dropout" and training is False and not inplace
