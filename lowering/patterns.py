"""Recognises calls of torch in a traced graph, and RMS norms: torch's and those of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .graph_tools import arguments, fake_of

_CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


@dataclass(frozen=True)
class Norm:
    """An RMS norm along the last dim of `x`, times `gain` of one dim.

    nodes: those that compute it, without the gain's. wide: those of `nodes` that must be float32.
    """

    x: fx.Node
    gain: fx.Node
    eps: float
    nodes: frozenset[fx.Node]
    wide: tuple[fx.Node, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which kernels compute it."""
        return torch.promote_types(fake_of(self.x).dtype, torch.float32)

    @property
    def is_wide(self) -> bool:
        """Does the model compute it in that dtype, too?"""
        return all(fake_of(node).dtype == self.dtype for node in self.wide)


def norm_of(node: Any) -> Norm | None:
    """The RMS norm whose result the node is."""
    if call_of(node)[0] == "rms_norm":
        x, shape, gain, eps = arguments(node, "input", "normalized_shape", "weight", "eps")
        known = isinstance(gain, fx.Node) and is_float(eps) and len(shape) == 1
        return Norm(x, gain, float(number(eps)), frozenset({node})) if known else None
    scaled = uncast(node)
    for gain, normed in pairs(scaled, "mul"):
        value = number(gain)
        if not isinstance(value, Tensor) or value.dim() != 1:
            continue
        ratio = uncast(normed)
        for x, root in pairs(ratio, "mul"):
            if (square := _mean_square(root, x)) is not None:
                eps, nodes = square
                wide = x, *nodes, ratio
                inner = {node, scaled, normed, *wide} - {uncast(x)}
                return Norm(uncast(x), gain, eps, frozenset(inner), wide)
    return None


def _mean_square(root: Any, x: Any) -> tuple[float, tuple[fx.Node, ...]] | None:
    """(eps, the nodes) where root is `rsqrt(mean(x**2, -1, keepdim=True) + eps)`."""
    name, args = call_of(root)
    if (name, [*args[1:]]) not in (("rsqrt", []), ("pow", [-0.5])) or not args:
        return None
    for mean, eps in pairs(args[0], "add"):
        if call_of(mean)[0] != "mean":
            continue
        squares, dim = arguments(mean, "input", "dim")
        if (
            dim in (-1, (-1,), [-1])
            and call_of(squares) in (("pow", (x, 2)), ("square", (x,)), ("mul", (x, x)))
            and fake_of(mean).dim() == fake_of(x).dim()
            and is_float(eps)
        ):
            return float(number(eps)), (squares, mean, args[0], root)
    return None


# Calls of torch ---------------------------------------------------------------------------------


def call_of(node: Any) -> tuple[str, tuple[Any, ...]]:
    """The name of the torch function or method that a node calls, and its arguments by place.

    "" for other nodes.
    """
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return "", ()
    target: Any = node.target
    if isinstance(target, str):
        return target, node.args
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "", ()  # a library's op may have the name of a torch function
    home = getattr(target, "__module__", None) or "torch"  # torch's functions of C name no module
    if home.partition(".")[0] not in ("torch", "_operator"):
        return "", ()
    return getattr(target, "__name__", ""), node.args


def pairs(node: Any, called: str) -> Iterator[tuple[Any, Any]]:
    """The operands of a sum or product of two, in both orders."""
    name, args = call_of(node)
    if name == called and len(args) == 2 and not node.kwargs:
        yield args[0], args[1]
        yield args[1], args[0]


def number(x: Any) -> Any:
    """The value of a node, and other things as they are.

    `float` of one that is symbolic, as with dynamic shapes, guards it.
    """
    return fake_of(x) if isinstance(x, fx.Node) else x


def is_float(x: Any) -> bool:
    """Is it a number above 0 with a point, symbolic or not?"""
    return isinstance(known := number(x), (float, torch.SymFloat)) and bool(known > 0)


def uncast(node: Any) -> Any:
    """The operand of a conversion that changes dtype and strides at most, else the node itself."""
    name, args = call_of(node)
    if name not in _CASTS or not isinstance(args[0], fx.Node):
        return node
    x, out = fake_of(args[0]), fake_of(node)
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        return node
    same = (x.shape, x.device) == (out.shape, out.device)
    return args[0] if same and out.is_floating_point() else node
