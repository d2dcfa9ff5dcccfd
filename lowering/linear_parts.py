"""Recognises a linear in a traced graph with the RMS norm before it, and the gated activation and the residual after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ..reference.linear import GATES
from ..traced import may_write, storages, written_by
from .fuse_linears import facts_of, fake_of, is_static, linear_arguments

ADAPTERS = ("_base_layer_", "_lora_")
"""In the names of weights: linears within an adapter of PEFT."""

_CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


@dataclass
class Match:
    """A linear and the nodes around it that one call replaces. last: the one whose value the call gives. left: parts left, and why."""

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
        named = (("norm", self.norm), ("linear", True), (self.activation, self.activation), ("residual", self.residual))
        return tuple(name for name, there in named if there)

    @property
    def inputs(self) -> dict[str, fx.Node | None]:
        gain = None if self.norm is None else self.norm[0]
        return {"x": self.x, "weight": self.weight, "bias": self.bias, "norm_weight": gain, "residual": self.residual}

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """The arguments of the record, but for the output."""
        _, eps, offset = self.norm or (None, 0.0, 0.0)
        return {**self.inputs, "norm_eps": eps, "norm_offset": offset, "activation": self.activation, **changed}


def match_linear(node: fx.Node) -> Match | str:
    """The linear with the parts beside it, or the reason why it must be left as it is."""
    x, weight, bias = linear_arguments(*node.args, **node.kwargs)
    base: list[Any] = [p.args[0] if isinstance(p, fx.Node) and p.target is torch.as_strided else p for p in (weight, bias) if p is not None]
    if not isinstance(x, fx.Node) or not all(map(is_static, base)):
        return "its weight or bias is no parameter of a module"
    if any(word in p.name for p in base for word in ADAPTERS):
        return "it is within an adapter"
    if fake_of(weight).numel() == 0:
        return "its weight has no numbers"
    match = Match(node, x, weight, bias, node, {node})
    _take_norm(match)
    _take_activation(match)
    _take_residual(match)
    for name, given in match.inputs.items():
        if given is not None and (why := _unlike(fake_of(given), fake_of(weight))):
            return f"{name} is {why}"
    # The residual is read where the call will be, and the others are read before.
    read = set(storages([fake_of(n) for name, n in match.inputs.items() if n is not None and name != "residual"]))
    at = min(match.inner)
    while at is not match.last:
        if may_write(at) and not read.isdisjoint(storages([fake_of(n) for n in written_by(at)])):
            return f"{at.name} writes one of its inputs in between"
        at = at.next
    return match


def _unlike(given: Any, weight: Tensor) -> str:
    if type(given) is not FakeTensor:
        return f"a {type(given).__name__}"
    if (given.dtype, given.device) != (weight.dtype, weight.device):
        return f"{given.dtype} on {given.device}, the weight {weight.dtype} on {weight.device}"
    return ""


def _call(node: Any) -> tuple[str, tuple[Any, ...]]:
    """The name of the torch function or method that a node calls, and its arguments by place; "" for other nodes."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return "", ()
    target: Any = node.target
    if isinstance(target, str):
        return target, node.args
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "", ()  # a library's op may have the name of a torch function
    home = getattr(target, "__module__", None) or "torch"  # torch's functions of C name no module
    return (getattr(target, "__name__", ""), node.args) if home.partition(".")[0] in ("torch", "_operator") else ("", ())


def _pairs(node: Any, called: str) -> Iterator[tuple[Any, Any]]:
    """The operands of a sum or product of two, in both orders."""
    name, args = _call(node)
    if name == called and len(args) == 2 and not node.kwargs:
        yield args[0], args[1]
        yield args[1], args[0]


def _uncast(node: Any) -> Any:
    """The operand of a conversion that changes the dtype at most, else the node itself."""
    name, args = _call(node)
    return args[0] if name in _CASTS and _layout(args[0]) == _layout(node) else node


def _layout(node: Any) -> Any:
    value = fake_of(node) if isinstance(node, fx.Node) else None
    return (value.shape, value.stride(), value.device) if isinstance(value, Tensor) else node


@dataclass(frozen=True)
class _Norm:
    """An RMS norm. nodes: that compute it. wide: those of them that must be float32."""

    x: fx.Node
    gain: fx.Node
    eps: float
    offset: float
    nodes: frozenset[fx.Node]
    wide: tuple[fx.Node, ...] = ()


def _norm(node: fx.Node) -> _Norm | None:
    """The RMS norm whose result the node is: torch's own, or as transformers spells it out."""
    name, args = _call(node)
    if name == "rms_norm":
        x, shape, gain, eps = _rms_norm(*args, **node.kwargs)
        known = is_static(gain) and isinstance(eps, float) and len(shape) == 1
        return _Norm(x, gain, eps, 0.0, frozenset({node})) if known else None
    scaled = _uncast(node)
    for factor, normed in _pairs(scaled, "mul"):
        ratio = _uncast(normed)
        for wide, root in _pairs(ratio, "mul"):
            square = _mean_square(root, wide)
            gain = _gain(factor)
            if square is not None and gain is not None:
                x, (parameter, offset, steps) = _uncast(wide), gain
                float32 = (wide, *square[1], ratio, *(n for n in steps if offset))
                nodes = {node, scaled, normed, *float32, *steps} - {x}
                return _Norm(x, parameter, square[0], offset, frozenset(nodes), float32)
    return None


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> tuple[Any, Any, Any, Any]:
    return input, normalized_shape, weight, eps


def _mean_square(root: Any, x: Any) -> tuple[float, tuple[fx.Node, ...]] | None:
    """(eps, the nodes) where root is `rsqrt(mean(x**2, -1, keepdim=True) + eps)`."""
    name, args = _call(root)
    if (name, [*args[1:]]) not in (("rsqrt", []), ("pow", [-0.5])) or not args:
        return None
    for mean, eps in _pairs(args[0], "add"):
        squares, dim = _mean(mean)
        over_last = dim in (-1, (-1,), [-1]) and isinstance(eps, float) and eps > 0
        if over_last and _call(squares) in (("pow", (x, 2)), ("square", (x,)), ("mul", (x, x))) and fake_of(mean).dim() == fake_of(x).dim():
            return eps, (squares, mean, args[0], root)
    return None


def _mean(node: Any) -> tuple[Any, Any]:
    """The operand of a mean without a dtype and its dims; Nones for other nodes."""
    name, args = _call(node)
    if name != "mean" or not args or "dtype" in node.kwargs:
        return None, None
    return args[0], args[1] if len(args) > 1 else node.kwargs.get("dim")


def _gain(factor: Any) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """(the parameter, the number added to it, the nodes) of the gain of a norm."""
    if is_static(parameter := _uncast(factor)):
        return parameter, 0.0, (factor,) if factor is not parameter else ()
    for offset, weight in _pairs(factor, "add"):
        if isinstance(offset, (int, float)) and is_static(parameter := _uncast(weight)):
            return parameter, float(offset), (factor, *((weight,) if weight is not parameter else ()))
    return None


def _take_norm(match: Match) -> None:
    if (norm := _norm(match.x)) is None:
        return
    x, gain, wide = fake_of(norm.x), fake_of(norm.gain), torch.promote_types(fake_of(norm.x).dtype, torch.float32)
    others = {user for node in norm.nodes for user in node.users} - norm.nodes - {match.node}
    if others:
        match.left.append(f"norm: {min(others).name} reads it, too")
    elif any(fake_of(node).dtype != wide for node in norm.wide):
        match.left.append(f"norm: it is not computed in {wide}")
    elif {x.dtype, gain.dtype} != {fake_of(match.weight).dtype} or gain.shape != x.shape[-1:]:
        match.left.append(f"norm: of {x.dtype} by a gain of {gain.dtype}")
    else:
        match.x, match.norm = norm.x, (norm.gain, norm.eps, norm.offset)
        match.inner |= norm.nodes


def _take_activation(match: Match) -> None:
    """The activation of one half of the result, times the other half."""
    product, nodes, halves = match.last, set[fx.Node](), list[fx.Node]()
    for user in product.users:
        nodes.add(user)
        halves += [user] if isinstance(fake_of(user), Tensor) else user.users
    value, parts = fake_of(product), [fake_of(half) for half in halves]
    views = {*storages(parts)} == {*storages(value)} and not any(map(may_write, nodes))
    if len(halves) != 2 or any(len(half.users) != 1 for half in halves) or not views:
        return
    rows = value.shape[-1] // 2
    for gate, up in (halves, halves[::-1]):
        [act], [last] = gate.users, up.users
        name = _activation(act, gate)
        if not name or list(act.users) != [last] or (act, up) not in _pairs(last, "mul"):
            continue
        found = [facts_of(fake_of(half)) for half in (gate, up)]
        if found == [facts_of(value.narrow(-1, at, rows)) for at in (0, rows)]:
            match.activation, match.last = name, last
            match.inner |= {*nodes, *halves, act, last}
        else:
            match.left.append(f"{name}: not of the first half")


def _activation(node: fx.Node, gate: fx.Node) -> str:
    name, args = _call(node)
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
        if _is_dropout(user) or (_uncast(user) is last and fake_of(user).dtype == fake_of(last).dtype):
            last = user
            passed.add(user)
            continue
        for one, other in _pairs(user, "add"):
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
    name, args = _call(node)
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | node.kwargs
    return name == "dropout" and given.get("training", True) is False and not given.get("inplace")
