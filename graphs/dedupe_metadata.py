"""Computes metadata once that every layer asks for: a compiler of one layer's piece cannot see the calls of the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..traced import may_write

# Functions and methods other than attnops' ops whose equal calls give equal results; arguments of metadata rarely come from others.
_PURE = {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv}
_PURE_METHODS = {"to", "int", "long", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "size", "contiguous", "diff"}


def comparable(x: Any, node: Callable[[fx.Node], Any], tensor: Callable[[Tensor], Any] = str) -> Any:
    """A hashable form of an FX node's argument, equal for equal arguments.

    Args:
        x: the argument, a structure of nodes and constants.
        node: the form of a node.
        tensor: the form of a tensor.
    """
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


def dedupe(graph: fx.Graph, value_of: Callable[[Any], Any]) -> dict[fx.Node, fx.Node]:
    """Replace calls of attnops' ops by earlier calls with the same arguments.

    Applies to ops that write nothing, on tensors that no node of the graph writes.

    Args:
        graph: changed in place; replaced calls stay in it, without users.
        value_of: the fake value of a node.

    Returns:
        The earlier call, by the call that it replaces.
    """
    written = {_storage(t) for node in graph.nodes for x in _written(node) for t in _tensors(value_of(x))}
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        ours = _is_pure_op(node.target)
        if not ours and node.target not in (_PURE if node.op == "call_function" else _PURE_METHODS if node.op == "call_method" else ()):
            continue
        if any(_storage(t) in written for x in (node, *node.all_input_nodes) for t in _tensors(value_of(x))):
            continue
        earlier = first.setdefault((node.target, comparable((node.args, node.kwargs), lambda n: same.get(n, n))), node)
        if earlier is not node:
            same[node] = earlier
            if ours:
                replaced[node] = earlier
    for node, earlier in replaced.items():
        node.replace_all_uses_with(earlier)
    return replaced


def _is_pure_op(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "attnops" and not target._schema.is_mutable


def _written(node: fx.Node) -> Iterator[Any]:
    """The arguments that a call may write."""
    if isinstance(node.target, torch._ops.OpOverload):
        given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
        writes = {a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        yield from (x for name, x in given.items() if name in writes)
    elif may_write(node):
        yield from node.all_input_nodes


def _tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata
