"""Recognises an RMS norm in a traced graph that no linear takes in, with its gate and its
residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ops.linear.norm import RMS_NORM, RmsNorm
from .graph_tools import arguments, facts_of, fake_of
from .matches import (
    BESIDE,
    GainedNorm,
    Match,
    against_inputs,
    gained_norm,
    readers,
    take_residual,
)
from .patterns import call_of, pairs, uncast

ENDS = ("mul", "rms_norm")
"""The calls that may end a norm: the product with its gain, and torch's own norm."""


@dataclass(kw_only=True)
class NormMatch(Match):
    """An RMS norm and the nodes around it.

    wide_gain: it is rounded after its gain alone.
    gate: a tensor whose SiLU multiplies it.
    """

    gain: fx.Node
    eps: float
    offset: float
    wide_gain: bool
    gate: fx.Node | None = None

    op = RMS_NORM
    record = RmsNorm

    @property
    def parts(self) -> tuple[str, ...]:
        beside = (name for name in BESIDE if self.inputs[name] is not None)
        return "norm", *beside

    @property
    def inputs(self) -> dict[str, fx.Node | None]:
        beside = {"gate": self.gate, "residual": self.residual}
        return {"x": self.x, "weight": self.gain, **beside}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"eps": self.eps, "offset": self.offset, "wide_gain": self.wide_gain}


def match_norm(node: fx.Node) -> NormMatch | tuple[str, str] | None:
    """The norm that ends here, with its gate and its residual; or its gain's name and the reason
    why it must be left as it is. None: no norm ends here."""
    if call_of(node)[0] not in ENDS or (found := gained_norm(node)) is None:
        return None
    norm, dtype = found.norm, fake_of(found.norm.x).dtype
    last = _rounded(node, dtype)
    inner = {*found.nodes, last}
    if why := found.against(dtype, readers(inner - {last}) - {last}):
        return found.gain.name, why
    if fake_of(last).dtype != dtype:
        return found.gain.name, f"norm: its result is {fake_of(last).dtype}, its input {dtype}"
    before = _before_gain(node, found)
    if before not in (dtype, norm.dtype) or (found.offset and before != norm.dtype):
        return found.gain.name, f"norm: it is rounded to {before} before its gain"
    alone = NormMatch(
        x=norm.x,
        last=last,
        inner=inner,
        gain=found.gain,
        eps=norm.eps,
        offset=found.offset,
        wide_gain=before == norm.dtype != dtype,
    )
    weight = fake_of(found.gain)
    if why := against_inputs(alone, weight):
        return found.gain.name, why
    match = replace(alone, inner={*inner}, left=[])
    _take_gate(match, norm.dtype)
    take_residual(match)
    if why := against_inputs(match, weight):
        alone.left.append(f"{' and '.join(match.parts[1:])}: {why}")
        return alone
    return match


def _take_gate(match: NormMatch, wide: torch.dtype) -> None:
    """Take in a product of the value with the SiLU of a tensor like it. wide: the dtype in which
    the model must compute both."""
    value = match.last
    users = list(value.users)
    silus = {act for user in users for one, act in pairs(user, "mul") if one is value}
    if len(users) != 1 or len(silus) != 1 or call_of(act := silus.pop())[0] != "silu":
        return
    source, inplace = arguments(act, "input", "inplace")
    gate, last = uncast(source), _rounded(users[0], fake_of(value).dtype)
    if inplace or len(act.users) != 1:
        match.left.append(f"gate: {act.name} is written or read beside it")
    elif {fake_of(act).dtype, fake_of(users[0]).dtype} != {wide}:
        match.left.append(f"gate: it is not computed in {wide}")
    elif any(facts_of(fake_of(x))[0] != facts_of(fake_of(value))[0] for x in (gate, last)):
        match.left.append("gate: of another shape or dtype")
    else:
        match.gate, match.last = gate, last
        match.inner |= {act, users[0], last}
        if source is not gate and len(source.users) == 1:
            match.inner.add(source)


def _before_gain(node: fx.Node, found: GainedNorm) -> torch.dtype:
    """The dtype of what the gain multiplies."""
    if call_of(node)[0] == "rms_norm":
        return found.norm.dtype
    factors = (y for gain, y in pairs(node, "mul") if gain is found.norm.gain)
    dtype: torch.dtype = fake_of(next(factors)).dtype
    return dtype


def _rounded(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The conversion of a norm to this dtype, if nothing else reads it; else the norm itself."""
    users = list(node.users)
    if fake_of(node).dtype == dtype or len(users) != 1 or uncast(users[0]) is not node:
        return node
    return users[0] if fake_of(users[0]).dtype == dtype else node
