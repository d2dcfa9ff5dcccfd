"""Recognises an RMS norm in a traced graph that no linear takes in, with its residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ops.linear.norm import RMS_NORM, RmsNorm
from .graph_tools import fake_of
from .matches import GainedNorm, Match, against_inputs, gained_norm, readers, take_residual
from .patterns import call_of, pairs, uncast

ENDS = ("mul", "rms_norm")
"""The calls that may end a norm: the product with its gain, and torch's own norm."""


@dataclass(kw_only=True)
class NormMatch(Match):
    """An RMS norm and the nodes around it. wide_gain: it is rounded after its gain alone."""

    gain: fx.Node
    eps: float
    offset: float
    wide_gain: bool

    op = RMS_NORM
    record = RmsNorm

    @property
    def parts(self) -> tuple[str, ...]:
        return ("norm", "residual") if self.residual else ("norm",)

    @property
    def inputs(self) -> dict[str, fx.Node | None]:
        return {"x": self.x, "weight": self.gain, "residual": self.residual}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"eps": self.eps, "offset": self.offset, "wide_gain": self.wide_gain}


def match_norm(node: fx.Node) -> NormMatch | tuple[str, str] | None:
    """The norm that ends here, with its residual; or its gain's name and the reason why it must be
    left as it is. None: no norm ends here."""
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
    take_residual(match)
    if why := against_inputs(match, weight):
        alone.left.append(f"residual: {why}")
        return alone
    return match


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
