"""Metadata that several layers ask for are made once a graph: a later call of an op with the same arguments gives what the first gave."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..traced import may_write


def made_before(node: fx.Node) -> fx.Node | None:
    """The first call in the graph that gives what `node`, a call of an op, gives. None: no call before it does.

    Only of ops that write nothing, where nothing writes their arguments or results, and where the graph does not return the results:
    two results of the model are two tensors.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not inputs or any(_writes(user, n) for n in inputs for user in n.users):
        return None
    alike = (n for n in inputs[0].users if n.target is node.target and _key(n) == _key(node))
    first = min(alike)
    return None if first is node or _taken(first) or _taken(node) else first


def _key(node: fx.Node) -> Any:
    def of(x: Any) -> Any:
        if isinstance(x, fx.Node):
            value = x.meta.get("val")
            # Layers ask for one size of tensors of their own, which are of one symbol.
            return x if value is None or isinstance(value, torch.Tensor) else str(value)
        return type(x), str(x)

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return [of(x) for x in leaves], spec


def _taken(node: fx.Node) -> bool:
    """Are the results of a call returned or written?"""
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
