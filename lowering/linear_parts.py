"""Recognises a linear in a traced graph with its RMS norm, gated activation and residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..core.fx_effects import may_write, storages, writer
from ..core.private_torch import FakeTensor
from ..ops.linear.reference import GATES
from .graph_tools import arguments, facts_of, fake_of, is_parameter, linear_arguments
from .patterns import call_of, norm_of, pairs, uncast

ADAPTERS = ("_base_layer_", "_lora_")
"""In the names of weights: linears within an adapter of PEFT."""


@dataclass
class Match:
    """A linear and the nodes around it that one call replaces.

    last: the node whose value the call gives.
    left: parts that are left as they are, and why.
    """

    node: fx.Node
    x: Any
    weight: Any
    bias: Any
    last: fx.Node
    inner: set[fx.Node]
    norm: tuple[fx.Node, float, float] | None = None
    activation: str = ""
    residual: fx.Node | None = None
    left: list[str] = field(default_factory=list)

    @property
    def parts(self) -> tuple[str, ...]:
        parts = {
            "norm": self.norm,
            "linear": True,
            self.activation: self.activation,
            "residual": self.residual,
        }
        return tuple(name for name, there in parts.items() if there)

    @property
    def inputs(self) -> dict[str, fx.Node | None]:
        return {
            "x": self.x,
            "weight": self.weight,
            "bias": self.bias,
            "norm_weight": self.norm and self.norm[0],
            "residual": self.residual,
        }

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """The arguments of the record, but for the output."""
        _, eps, offset = self.norm or (None, 0.0, 0.0)
        numbers = {"norm_eps": eps, "norm_offset": offset, "activation": self.activation}
        return {**self.inputs, **numbers, **changed}


def match_linear(node: fx.Node) -> Match | str:
    """The linear with the parts beside it, or the reason why it must be left as it is."""
    x, weight, bias = linear_arguments(node)
    parameters = [_unmerged(p) for p in (weight, bias) if p is not None]
    if not isinstance(x, fx.Node) or not all(map(is_parameter, parameters)):
        return "its weight or bias is no parameter of a module"
    if any(word in p.name for p in parameters for word in ADAPTERS):
        return "it is within an adapter"
    if fake_of(weight).numel() == 0:
        return "its weight has no numbers"
    match = Match(node, x, weight, bias, node, {node})
    _take_norm(match)
    _take_activation(match)
    _take_residual(match)
    inputs = {name: given for name, given in match.inputs.items() if given is not None}
    for name, given in inputs.items():
        if why := _unlike(fake_of(given), fake_of(weight)):
            return f"{name} is {why}"
    # The residual is read where the call will be, and the others are read before.
    inputs.pop("residual", None)
    return writer(min(match.inner), match.last, inputs.values(), fake_of) or match


def _unmerged(parameter: Any) -> Any:
    """The graph input. Of merged linears it is the first, from which all are read."""
    merged = isinstance(parameter, fx.Node) and parameter.target is torch.as_strided
    return parameter.args[0] if merged else parameter


def name_of(node: fx.Node) -> str:
    """The name of a linear's weight."""
    return str(_unmerged(linear_arguments(node)[1]))


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


def _take_norm(match: Match) -> None:
    if (norm := norm_of(match.x)) is None or (found := _gain(norm.gain)) is None:
        return
    gain, offset, steps = found
    x, parameter, nodes = fake_of(norm.x), fake_of(gain), norm.nodes | set(steps)
    others = {user for node in nodes for user in node.users} - nodes - {match.node}
    narrow = offset and any(fake_of(step).dtype != norm.dtype for step in steps)
    like = {x.dtype, parameter.dtype} == {fake_of(match.weight).dtype}
    if others:
        match.left.append(f"norm: {min(others).name} reads it, too")
    elif narrow or not norm.is_wide:
        match.left.append(f"norm: it is not computed in {norm.dtype}")
    elif not like or parameter.shape != x.shape[-1:]:
        match.left.append(f"norm: of {x.dtype} by a gain of {parameter.dtype}")
    else:
        match.x, match.norm = norm.x, (gain, norm.eps, offset)
        match.inner |= nodes


def _take_activation(match: Match) -> None:
    """The activation of one half of the result, times the other half."""
    product, value = match.last, fake_of(match.last)
    if not (halves := _two_views(product)):
        return
    rows = value.shape[-1] // 2
    for gate, up in (halves, halves[::-1]):
        [act], [last] = gate.users, up.users
        name = _activation(act, gate)
        if not name or list(act.users) != [last] or (act, up) not in pairs(last, "mul"):
            continue
        layouts = [facts_of(fake_of(half)) for half in (gate, up)]
        if layouts == [facts_of(value.narrow(-1, at, rows)) for at in (0, rows)]:
            match.activation, match.last = name, last
            match.inner |= {*product.users, *halves, act, last}
        else:
            match.left.append(f"{name}: not of the first half")


def _two_views(product: fx.Node) -> list[fx.Node]:
    """The two views, of one user each, that are all that is made of a result; or none."""
    halves: list[fx.Node] = []
    for user in product.users:
        halves += [user] if isinstance(fake_of(user), Tensor) else user.users
    if len(halves) != 2 or any(len(half.users) != 1 for half in halves):
        return []
    if any(user.op == "output" or may_write(user) for user in product.users):
        return []
    memory = {*storages([fake_of(half) for half in halves])}
    return halves if memory == {*storages(fake_of(product))} else []


def _activation(node: fx.Node, gate: fx.Node) -> str:
    name, args = call_of(node)
    more = {**node.kwargs}
    if more.pop("inplace", False) or args != (gate,):
        return ""
    if name == "gelu":
        name += {"none": "", "tanh": "_tanh"}[str(more.pop("approximate", "none"))]
    return name if name in GATES and not more else ""


def _take_residual(match: Match) -> None:
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
