"""Recognises a linear in a traced graph with its RMS norm, gated activation and residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..core.fx_effects import may_write, storages
from ..ops.linear.record import LINEAR, Linear
from ..ops.linear.reference import GATES
from .graph_tools import facts_of, fake_of, is_parameter, linear_arguments
from .matches import Match, against_inputs, gained_norm, readers, take_residual
from .patterns import call_of, pairs

ADAPTERS = ("_base_layer_", "_lora_")
"""In the names of weights: linears within an adapter of PEFT."""


@dataclass(kw_only=True)
class LinearMatch(Match):
    """A linear and the nodes around it. norm: its gain, eps and offset."""

    node: fx.Node
    weight: Any
    bias: Any
    norm: tuple[fx.Node, float, float] | None = None
    activation: str = ""

    op = LINEAR
    record = Linear

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

    @property
    def numbers(self) -> dict[str, Any]:
        _, eps, offset = self.norm or (None, 0.0, 0.0)
        return {"norm_eps": eps, "norm_offset": offset, "activation": self.activation}


def match_linear(node: fx.Node) -> LinearMatch | str:
    """The linear with the parts beside it, or the reason why it must be left as it is."""
    x, weight, bias = linear_arguments(node)
    parameters = [_unmerged(p) for p in (weight, bias) if p is not None]
    if not isinstance(x, fx.Node) or not all(map(is_parameter, parameters)):
        return "its weight or bias is no parameter of a module"
    if any(word in p.name for p in parameters for word in ADAPTERS):
        return "it is within an adapter"
    if fake_of(weight).numel() == 0:
        return "its weight has no numbers"
    match = LinearMatch(node=node, x=x, weight=weight, bias=bias, last=node, inner={node})
    _take_norm(match)
    _take_activation(match)
    take_residual(match)
    return against_inputs(match, fake_of(weight)) or match


def _unmerged(parameter: Any) -> Any:
    """The graph input. Of merged linears it is the first, from which all are read."""
    merged = isinstance(parameter, fx.Node) and parameter.target is torch.as_strided
    return parameter.args[0] if merged else parameter


def name_of(node: fx.Node) -> str:
    """The name of a linear's weight."""
    return str(_unmerged(linear_arguments(node)[1]))


def _take_norm(match: LinearMatch) -> None:
    if (norm := gained_norm(match.x)) is None:
        return
    if why := norm.against(fake_of(match.weight).dtype, readers(norm.nodes) - {match.node}):
        match.left.append(why)
        return
    match.x = norm.norm.x
    match.norm = norm.gain, norm.norm.eps, norm.offset
    match.inner |= norm.nodes


def _take_activation(match: LinearMatch) -> None:
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
