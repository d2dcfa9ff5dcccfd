"""Propagates new strides of some values through a graph: new fake values, or the reason against the change."""

from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

VALUE = "example_value"


def propagate(changed: dict[fx.Node, Any]) -> dict[fx.Node, Any] | str:
    """The new fake values of `changed` and of every node whose strides follow from them; or a reason, a str, against the change.

    Reasons: a view becomes a copy or an error, a graph output gets other strides than in the model's own code, or a node cannot be
    evaluated again.
    """
    found = dict(changed)
    fakes = [v for v in changed.values() if isinstance(v, Tensor)]
    mode: Any = getattr(fakes[0], "fake_mode", None) if fakes else None
    if mode is None:
        return "its values are not fake"
    # An autocast region inside the graph changes dtypes.
    if any(_metadata(node.meta.get(VALUE)) != _metadata(value) for node, value in changed.items()):
        return "its shape or dtype would differ"
    pending = [user for node in changed for user in node.users]
    heapify(pending)
    while pending:
        node = heappop(pending)
        if pending and pending[0] is node:
            continue
        if node.op == "output":
            return "it is returned, or a view of it is"
        try:
            with mode, enable_python_dispatcher():
                value = _run(node, found)
        except Exception as e:
            return f"{node.name} fails with the new strides: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        if isinstance(value, str):
            return value
        before = node.meta.get(VALUE)
        if _aliases(before, [n.meta.get(VALUE) for n in node.all_input_nodes]) and not _aliases(
            value, [found.get(n, n.meta.get(VALUE)) for n in node.all_input_nodes]
        ):
            return f"{node.name} would copy it"
        if _metadata(before) != _metadata(value):
            return f"{node.name} would get another shape or dtype"
        if _strides(before) != _strides(value):
            found[node] = value
            for user in node.users:
                heappush(pending, user)
    return found


def _run(node: fx.Node, found: dict[fx.Node, Any]) -> Any:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    old = [x for x in pytree.tree_leaves(node.meta.get(VALUE)) if isinstance(x, (Tensor, torch.SymInt))]
    inputs = [x for n in node.all_input_nodes for x in pytree.tree_leaves(n.meta.get(VALUE)) if isinstance(x, (Tensor, torch.SymInt))]
    if {s for x in old for s in free_unbacked_symbols(x)} - {s for x in inputs for s in free_unbacked_symbols(x)}:
        return f"{node.name} creates an unbacked size"
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: found.get(n, n.meta.get(VALUE)), (node.args, dict(node.kwargs)))
    if node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
        target: Any = node.target
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return f"{node.name} is not a function or method call"


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _storages(value: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in _tensors(value)}


def _aliases(value: Any, inputs: list[Any]) -> bool:
    return bool(_storages(value) & _storages(inputs))


def _metadata(value: Any) -> list[Any]:
    return [(tuple(map(str, x.shape)), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in pytree.tree_leaves(value)]


def _strides(value: Any) -> list[Any]:
    return [(tuple(map(str, x.stride())), str(x.storage_offset())) for x in _tensors(value)]
