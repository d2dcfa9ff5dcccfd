"""Recognises calls of torch in a traced graph, expressions, and RMS norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..core.private_torch import OpOverload, OpOverloadPacket
from .graph_tools import arguments, fake_of

_HALVES = ("first", "second")
_CALLS = {"first": ("getitem",), "second": ("getitem",), "cat": ("cat", "concat")}
"""By operation the functions and methods, where these have other names."""

_CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


Pattern = str | int | float | tuple[Any, ...]
"""A variable by its name, a number, or an operation, `(name, *patterns of its operands)`.

"cast" is a conversion or none, "mean" one along the last dim, which stays, "cat" joins along it,
and "first" and "second" are the halves of a tensor along it.
"""

_SQUARES: tuple[Pattern, ...] = ("pow", "x", 2), ("square", "x"), ("mul", "x", "x")
_MEANS: tuple[Pattern, ...] = tuple(("add", ("mean", square), "eps") for square in _SQUARES)
_ROOTS: tuple[Pattern, ...] = tuple(
    root for mean in _MEANS for root in (("rsqrt", mean), ("pow", mean, -0.5))
)
NORMS = [("cast", ("mul", "gain", ("cast", ("mul", "x", root)))) for root in _ROOTS]


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
    for found in (found for pattern in NORMS for found in readings(pattern, node)):
        gain, x, eps = found["gain"], found["x"], found["eps"]
        value = number(gain)
        if isinstance(value, Tensor) and value.dim() == 1 and is_float(eps):
            # From the squares to their product with x. Before it are casts, and that with the gain.
            wide = x, *found["nodes"][-5:]
            inner = {node, *found["nodes"], x} - {uncast(x)}
            return Norm(uncast(x), gain, float(number(eps)), frozenset(inner), wide)
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
    if isinstance(target, (OpOverload, OpOverloadPacket)):
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


# Patterns ---------------------------------------------------------------------------------------


Reading = dict[str, Any]
"""What a pattern stands for: values by variable, and under "nodes" those of its operations."""

_UNREAD: Reading = {"nodes": ()}


def readings(pattern: Pattern, node: Any, before: Reading = _UNREAD) -> Iterator[Reading]:
    """Each way to read a node as a pattern. Sums and products have their operands in any order.

    before: what is known. A variable has one value throughout.
    """
    if isinstance(pattern, str):
        if before.get(pattern, node) is node:
            yield before | {pattern: node}
        return
    if not isinstance(pattern, tuple):
        if pattern == node:
            yield before
        return
    name, *parts = pattern
    operands, nodes = _operation(name, node)
    for order in permutations(parts) if name in ("add", "mul") else [parts]:
        found = [before | {"nodes": before["nodes"] + nodes}] if len(parts) == len(operands) else []
        for part, operand in zip(order, operands, strict=False):
            found = [after for one in found for after in readings(part, operand, one)]
        yield from found


def _operation(name: str, node: Any) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
    """(operands, nodes) of an operation of this name. No operands: the node is another one."""
    if name == "cast":
        inner = uncast(node)
        return (inner,), (() if inner is node else (node,))
    called, operands = call_of(node)
    if called not in _CALLS.get(name, (name,)):
        return (), ()
    if name in _HALVES:
        return _half(_HALVES.index(name), node)
    if name == "cat":
        tensors, dim = arguments(node, "tensors", "dim")
        return (tuple(tensors) if dim == -1 else ()), (node,)
    if name == "mean":
        x, dim = arguments(node, "input", "dim")
        stays = dim in (-1, (-1,), [-1]) and fake_of(node).dim() == fake_of(x).dim()
        return ((x,) if stays else ()), (node,)
    return (() if node.kwargs else operands), (node,)


def _half(which: int, node: fx.Node) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
    """As `_operation`, of the first or second half of a tensor along its last dim."""
    source, index = cast(tuple[fx.Node, Any], node.args)
    if call_of(source)[0] == "chunk":
        x, n, dim = arguments(source, "input", "chunks", "dim")
        return ((x,) if (n, dim, index) == (2, -1, which) else ()), (node, source)
    x = number(source)
    if not isinstance(x, Tensor) or x.shape[-1] % 2:
        return (), ()
    half = x.shape[-1] // 2
    part = (slice(None, half, None), slice(half, None, None))[which]
    return ((source,) if index == (Ellipsis, part) else ()), (node,)
