"""Questions of passes over traced graphs: may a node write, and which calls of ops are equal?"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attnops.core.private_torch import (
    FUNCTIONAL,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)

_IN_PLACE = {
    getattr(operator, n)
    for n in dir(operator)
    if n[:1] == "i" and {n[1:], f"{n[1:]}_"} & {*dir(operator)}
} | {operator.setitem, operator.delitem}

_KNOWN = ("torch", "_operator", "math", "builtins")
"""Modules whose functions say by their names that they write. Functions of other modules may do
anything."""

# Functions and methods other than attnops' ops whose equal calls give equal results; arguments of
# metadata rarely come from others.
_PURE = {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv}
_PURE_METHODS = {
    "to",
    "int",
    "long",
    "view",
    "reshape",
    "flatten",
    "unsqueeze",
    "squeeze",
    "expand",
    "size",
    "contiguous",
    "diff",
}


def may_write(node: fx.Node) -> bool:
    """May this operation change a tensor that it is given? Yes where it cannot be told."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target: Any = node.target
    if node.op == "call_module" or isinstance(target, HigherOrderOperator):
        return True
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if isinstance(target, str):
        return _writes_by_name(target)
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(
            getattr(target, o)._schema.is_mutable
            for o in target.overloads()
            if not o.endswith("out")
        )
    return _function_may_write(target, node.args)


def _function_may_write(function: Any, args: tuple[Any, ...]) -> bool:
    # torch's functions of C name no module.
    home = getattr(function, "__module__", None) or "torch"
    if home == "_operator":
        return function in _IN_PLACE
    # Modules' functions take `inplace` by place as well.
    if home in FUNCTIONAL and any(a is True for a in args):
        return True
    return home.partition(".")[0] not in _KNOWN or _writes_by_name(
        getattr(function, "__name__", "_")
    )


def _writes_by_name(name: str) -> bool:
    """As `add_`, `__iadd__` and `__setitem__` do."""
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def equal_calls(graph: fx.Graph, value_of: Callable[[Any], Any]) -> dict[fx.Node, fx.Node]:
    """Calls of attnops' ops that repeat an earlier call, mapped to that call: metadata that every
    layer computes.

    Applies to ops that write nothing, on tensors that no node writes, and to results that the graph
    does not return, because two results of a model are two tensors. value_of: the fake value of a
    node.
    """
    written = {s for node in graph.nodes for s in _storages_of(written_by(node), value_of)}
    returned = {
        s
        for node in graph.find_nodes(op="output")
        for s in _storages_of(node.all_input_nodes, value_of)
    }
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}

    def argument(node: fx.Node) -> Any:
        value = value_of(node)
        # Equal sizes of different tensors have one symbol.
        return same.get(node, node) if value is None or any(storages(value)) else str(value)

    for node in filter(_is_pure, graph.nodes):
        used = {*storages(value_of(node)), *_storages_of(node.all_input_nodes, value_of)}
        if used & written or not returned.isdisjoint(storages(value_of(node))):
            continue
        earlier = first.setdefault(
            (node.target, comparable((node.args, node.kwargs), argument)), node
        )
        if earlier is not node:
            same[node] = earlier
    return {node: earlier for node, earlier in same.items() if _is_pure_op(node.target)}


def _storages_of(nodes: Iterable[fx.Node], value_of: Callable[[Any], Any]) -> Iterator[Any]:
    return storages([value_of(node) for node in nodes])


def _is_pure(node: fx.Node) -> bool:
    """Do equal calls give equal results? A call whose data decide a size has a size of its own each
    time."""
    if node.meta.get("unbacked_bindings"):
        return False
    pure: dict[str, Collection[Any]] = {"call_method": _PURE_METHODS, "call_function": _PURE}
    return _is_pure_op(node.target) or node.target in pure.get(node.op, ())


def comparable(
    x: Any, node: Callable[[fx.Node], Any], tensor: Callable[[Tensor], Any] = str
) -> Any:
    """A hashable value, equal for equal arguments of FX nodes. node, tensor: replace the nodes and
    tensors in the structure x."""
    if isinstance(x, fx.Node):
        return node(x)
    if isinstance(x, Tensor):
        return tensor(x)
    if isinstance(x, (tuple, list)):
        # By type, too: a list indexes otherwise than a tuple.
        return (type(x).__name__, *(comparable(v, node, tensor) for v in x))
    if isinstance(x, dict):
        return tuple((k, comparable(v, node, tensor)) for k, v in x.items())
    if isinstance(x, slice):
        return (slice, *(comparable(v, node, tensor) for v in (x.start, x.stop, x.step)))
    # The type keeps 1, 1.0 and True apart.
    return type(x), str(x)


def _is_pure_op(target: Any) -> bool:
    return (
        isinstance(target, OpOverload)
        and target.namespace == "attnops"
        and not target._schema.is_mutable
    )


def written_by(node: fx.Node) -> Iterator[Any]:
    """The arguments that a call may write."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        arguments = target._schema.arguments
        given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
        yield from pytree.tree_leaves(
            [
                given.get(a.name)
                for a in arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
        )
    elif may_write(node):
        yield from node.all_input_nodes


def writer(
    first: fx.Node, last: fx.Node, read: Iterable[fx.Node], value_of: Callable[[Any], Any]
) -> str:
    """Which node from `first` up to `last` may write a tensor of `read`, as a reason against
    reading it later; "" for none."""
    tensors = {*_storages_of(read, value_of)}
    while first is not last:
        if may_write(first) and not tensors.isdisjoint(_storages_of(written_by(first), value_of)):
            return f"{first.name} writes one of its inputs in between"
        first = first.next
    return ""


def storages(value: Any) -> Iterator[Any]:
    """The storages of the tensors in `value`, by their addresses in torch."""
    return (t.untyped_storage()._cdata for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
