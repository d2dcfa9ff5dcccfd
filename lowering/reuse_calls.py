"""Reuses the results of equal calls in a graph, for metadata that several layers ask for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..traced import may_write


def earlier_call(node: fx.Node) -> fx.Node | None:
    """The first call in the graph that equals `node`, a call of an op, or None.

    Applies to ops that write nothing, if no node writes their arguments or results and the graph does not return the results, because
    two results of a model are two tensors.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not inputs or any(_writes(user, n) for n in inputs for user in n.users):
        return None
    first = min(n for n in inputs[0].users if n.target is node.target and _arguments(n) == _arguments(node))
    return None if first is node or _escapes(first) or _escapes(node) else first


def _arguments(node: fx.Node) -> Any:
    def of(x: Any) -> Any:
        if isinstance(x, fx.Node):
            value = x.meta.get("val")
            # Equal sizes of different tensors have one symbol.
            return x if value is None or isinstance(value, torch.Tensor) else str(value)
        return type(x), str(x)

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return [of(x) for x in leaves], spec


def _escapes(node: fx.Node) -> bool:
    """Does the graph return or write the results of a call?"""
    return any(user.op == "output" or _writes(user, n) for n in _results(node) for user in n.users)


def _results(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    yield from (user for user in node.users if user.op == "call_function" and not isinstance(user.target, torch._ops.OpOverload))


def _writes(user: fx.Node, node: fx.Node) -> bool:
    if not isinstance(user.target, torch._ops.OpOverload):
        return may_write(user)
    arguments = user.target._schema.arguments
    given = dict(zip((a.name for a in arguments), user.args, strict=False)) | user.kwargs
    return any(a.alias_info is not None and a.alias_info.is_write and node in pytree.tree_leaves(given.get(a.name)) for a in arguments)
