"""What follows for a graph when some of its values get other strides: new fake values, or the reason why it may not be."""

from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

VALUE = "example_value"


def follow(changed: dict[fx.Node, Any]) -> dict[fx.Node, Any] | str:
    """The fake values of all nodes that differ once those of `changed` do, these among them; or why one cannot bear it.

    What may not be: a view that becomes a copy, or that there is none of; a result of the graph with other strides than the model's
    own code gives it; and an operation that cannot be asked twice.
    """
    found = dict(changed)
    fakes = [v for v in changed.values() if isinstance(v, Tensor)]
    mode: Any = getattr(fakes[0], "fake_mode", None) if fakes else None
    if mode is None:
        return "its values are not fake"
    # As under an autocast that the graph itself enters.
    if any(_kinds(node.meta.get(VALUE)) != _kinds(value) for node, value in changed.items()):
        return "it is of another shape or dtype there"
    waiting = [user for node in changed for user in node.users]
    heapify(waiting)
    while waiting:
        node = heappop(waiting)
        if waiting and waiting[0] is node:
            continue
        if node.op == "output":
            return "it is returned, or a view of it"
        try:
            with mode, enable_python_dispatcher():
                value = _run(node, found)
        except Exception as e:
            return f"{node.name} does not take it: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        if isinstance(value, str):
            return value
        before = node.meta.get(VALUE)
        if _aliases(before, [n.meta.get(VALUE) for n in node.all_input_nodes]) and not _aliases(
            value, [found.get(n, n.meta.get(VALUE)) for n in node.all_input_nodes]
        ):
            return f"{node.name} would copy it"
        if _kinds(before) != _kinds(value):
            return f"{node.name} would be of another shape or dtype"
        if _places(before) != _places(value):
            found[node] = value
            for user in node.users:
                heappush(waiting, user)
    return found


def _run(node: fx.Node, found: dict[fx.Node, Any]) -> Any:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    old = [x for x in pytree.tree_leaves(node.meta.get(VALUE)) if isinstance(x, (Tensor, torch.SymInt))]
    inputs = [x for n in node.all_input_nodes for x in pytree.tree_leaves(n.meta.get(VALUE)) if isinstance(x, (Tensor, torch.SymInt))]
    if {s for x in old for s in free_unbacked_symbols(x)} - {s for x in inputs for s in free_unbacked_symbols(x)}:
        return f"{node.name} makes a size that depends on data"
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: found.get(n, n.meta.get(VALUE)), (node.args, dict(node.kwargs)))
    if node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
        target: Any = node.target
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return f"{node.name} is no plain operation"


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _storages(value: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in _tensors(value)}


def _aliases(value: Any, inputs: list[Any]) -> bool:
    return bool(_storages(value) & _storages(inputs))


def _kinds(value: Any) -> list[Any]:
    return [(tuple(map(str, x.shape)), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in pytree.tree_leaves(value)]


def _places(value: Any) -> list[Any]:
    return [(tuple(map(str, x.stride())), str(x.storage_offset())) for x in _tensors(value)]
