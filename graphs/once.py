"""Metadata that every layer asks for are made once: a compiler that sees a layer at a time cannot tell that another asked before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..traced import may_write

Values = Callable[[Any], Any]
"""The fake value that a node stands for."""

# Of what is no op of ours, these make the same of the same; arguments of metadata are rarely made by others.
_PURE = {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv}
_PURE_METHODS = {"to", "int", "long", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "size", "contiguous", "diff"}


def make_once(graph: fx.Graph, value_of: Values) -> dict[fx.Node, fx.Node]:
    """Use what a call of an op of ours gave before, where arguments are the same.

    Only of ops that write nothing, on tensors that nothing in the graph writes. Returns, by call that nobody uses any more, the one that
    is used instead; both are still in the graph.
    """
    written = {_storage(t) for node in graph.nodes for x in _written(node) for t in _tensors(value_of(x))}
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}

    def of(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return same.get(x, x)
        if isinstance(x, (tuple, list)):
            return tuple(map(of, x))
        if isinstance(x, dict):
            return tuple((k, of(v)) for k, v in x.items())
        # The type keeps 1, 1.0 and True apart.
        return (slice, of(x.start), of(x.stop), of(x.step)) if isinstance(x, slice) else (type(x), str(x))

    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        ours = _is_pure_op(node.target)
        if not ours and node.target not in (_PURE if node.op == "call_function" else _PURE_METHODS if node.op == "call_method" else ()):
            continue
        touched = (node, *node.all_input_nodes)
        if any(_storage(t) in written for x in touched for t in _tensors(value_of(x))):
            continue
        before = first.setdefault((node.target, of(node.args), of(node.kwargs)), node)
        if before is not node:
            same[node] = before
            if ours:
                replaced[node] = before
    for node, before in replaced.items():
        node.replace_all_uses_with(before)
    return replaced


def _is_pure_op(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "attnops" and not target._schema.is_mutable


def _written(node: fx.Node) -> Iterator[Any]:
    """What a call may write, those among its arguments that are nodes."""
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
