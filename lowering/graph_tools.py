"""What the passes share: the values of nodes, new nodes, guards, and the end of a change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..core.private_torch import SET_GRAD, FakeTensor, FakeTensorMode, tracing_context
from .inductor import Guard, enable_python_dispatcher

log = logging.getLogger("attnops.lowering")

VALUE = "example_value"


def graph_of(module: fx.Graph | fx.GraphModule) -> fx.Graph:
    return module.graph if isinstance(module, fx.GraphModule) else module


def fake_of(node: fx.Node) -> Any:
    return node.meta.get(VALUE)


def evaluate(node: fx.Node, mode: FakeTensorMode, value_of: Callable[[fx.Node], Any]) -> Any:
    """The value of a function or method call, where its inputs have the values `value_of`."""
    args, kwargs = pytree.tree_map_only(fx.Node, value_of, (node.args, dict(node.kwargs)))
    target: Any = node.target
    # As Dynamo does: the C++ of some ops specialises symbolic sizes.
    with mode, enable_python_dispatcher():
        if isinstance(target, str):
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


@dataclass
class NewNodes:
    """New calls before another node, with its metadata and values of their own."""

    before: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function, or of a method by its name."""
        graph = self.before.graph
        kind = "call_method" if isinstance(target, str) else "call_function"
        with graph.inserting_before(self.before):
            node = graph.create_node(kind, target, args, kwargs)
        values = pytree.tree_leaves([fake_of(n) for n in (*node.all_input_nodes, self.before)])
        mode = next(x.fake_mode for x in values if isinstance(x, FakeTensor))
        node.meta = {**self.before.meta, VALUE: evaluate(node, mode, fake_of)}
        self.nodes.append(node)
        return node

    def erase(self) -> None:
        for node in reversed(self.nodes):
            node.graph.erase_node(node)


def finish(graph: fx.Graph) -> None:
    """Check a graph that was changed, and compile its module again."""
    graph.lint()
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def records_gradients(graph: fx.Graph) -> bool:
    """Is grad mode on, or switched on anywhere in the graph?"""
    switches = graph.find_nodes(op="call_function", target=SET_GRAD)
    return torch.is_grad_enabled() or any(node.args[0] for node in switches)


def source_of(node: fx.Node) -> Any:
    return getattr(node, "_dynamo_source", None)


def add_guard(node: fx.Node, code: list[str], why: str, **names: Any) -> None:
    """Guard the frame that Dynamo is compiling. The guard runs after all others.

    Args:
        node: an input of the graph. A guard has one source, and takes that of this input.
        code: the conditions. They may use the sources of other inputs, and `names`.
        why: a comment on the conditions, for those who read Dynamo's logs.
    """
    create = partial(_create, code=code, why=why, names=names or None)
    tracing_context().guards_context.dynamo_guards.add(Guard(source_of(node), create))


def _create(builder: Any, guard: Any, *, code: list[str], why: str, names: Any) -> None:
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{line}  # {why}" for line in code], names)


def facts_of(value: Any) -> tuple[list[Any], list[Any]]:
    """Shapes, dtypes and devices of tensors, and other values; strides and offsets of tensors."""
    facts, layouts = list[Any](), list[Any]()
    for x in pytree.tree_leaves(value):
        if isinstance(x, Tensor):
            facts.append((str(x.shape), x.dtype, x.device))
            layouts.append(f"{x.stride()} from {x.storage_offset()}")
        else:
            facts.append(str(x))
    return facts, layouts


def arguments(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call, by place or by name; None where one is not given."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given.get(name) for name in names]


def linear_arguments(node: fx.Node) -> list[Any]:
    return arguments(node, "input", "weight", "bias")


def is_parameter(node: Any) -> bool:
    """Is it an input that is a contiguous parameter of a module, of sizes that are known?"""
    # Inductor may clone any other input before a CUDA graph, and a clone ends where its input ends.
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    if "_dynamo_static_input_type" not in node.meta.get("tensor_dict", {}):
        return False
    fake = fake_of(node)
    if not isinstance(fake, torch.nn.Parameter) or fake.layout != torch.strided:
        return False
    known = all(isinstance(n, int) for n in (*fake.shape, fake.storage_offset()))
    return known and fake.is_contiguous()
