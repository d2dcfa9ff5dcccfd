"""Lowers an op to the kernel chosen for it: a call of `attnops.<op>.<kernel>`, or its torch ops."""

import logging
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..core.foreign import answering
from ..core.fx_effects import equal_calls
from ..core.kernel import Kernel
from ..core.op import UNREAD
from ..core.precompile import begin
from ..core.problem import Problem, altered
from ..core.record import Arg, Call, changed, same, split, values
from ..core.select import choose, select
from ..ops import OPS, Op
from . import cache_key, written_views
from .inductor import ASSERT_SCALAR
from .remove_output_copies_pass import become, remove_output_copies_pass

log = logging.getLogger("attnops.lowering")
_LOCK = threading.Lock()
_REGISTERED: set[str] = set()


@dataclass
class GraphNotes:
    """What the lowerings remember of the graph that is lowered. `V.graph` holds it.

    repeats: calls that repeat an earlier call, with that call.
    lowered: the values of calls. Inductor drops them after their last use in the graph.
    prebuilt: kernels that compile beside the lowering by now, with their problems.
    """

    repeats: dict[torch.fx.Node, torch.fx.Node]
    lowered: dict[torch.fx.Node, Any] = field(default_factory=dict)
    prebuilt: set[tuple[str, Problem]] = field(default_factory=set)


def lowering_of(op: Op) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from .inductor import V, fallback_handler

        node, kept = V.graph.current_node, vars(V.graph)
        if "attnops" not in kept:
            kept["attnops"] = GraphNotes(equal_calls(node.graph, _value))
        notes = kept["attnops"]
        if (earlier := notes.repeats.get(node)) is not None:
            return notes.lowered[earlier]
        if node.meta.get("unbacked_bindings") and _unread(node):
            unread = getattr(torch.ops.attnops, f"{op.name}__{UNREAD}").default
            return fallback_handler(unread, add_to_fallback_set=False)(*args)
        given = pytree.tree_map_only(torch.fx.Node, _value, (node.args, node.kwargs))
        call: Any = op.call(*given[0], **given[1])
        # Heads, head dims and page size specialise: each is a guard.
        problem = altered(op.problem(call), compiled=True)
        kernel = choose(problem, call.policy)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", select(problem, call.policy))
        keywords: Any = node.kwargs
        nodes = op.call(*node.args, **keywords)
        placed = written_views.placed(nodes, op.call(*args, **kwargs))
        if _in_place(kernel, problem, call) and not written_views.of_another_dtype(nodes):
            result = _inline(op, kernel, call, placed)
        else:
            if (kernel.name, problem) not in notes.prebuilt:
                notes.prebuilt.add((kernel.name, problem))
                begin(kernel, call)
            result = _call(op, kernel, *split(placed))
        notes.lowered[node] = result
        return result

    return lower


def _unread(node: torch.fx.Node) -> bool:
    """Does nothing read the result, and nothing but assertions its size?"""
    aten = torch.ops.aten
    for user in node.users:
        compared = user.target in (aten.sym_size.int, operator.ge, operator.le)
        if user.target is not ASSERT_SCALAR and not (compared and _unread(user)):
            return False
    return True


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def _in_place(kernel: Kernel, problem: Problem, call: Call) -> bool:
    """Are the torch ops of `kernel` lowered here, rather than the kernel called?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if kernel.inline is None or kernel.inline.when is None:
        return kernel.inline is not None
    if not kernel.inline.when(problem):
        return False
    # Lowered torch ops need sizes at compile time. Unbacked ones are known at run time only, where
    # the kernel's call reads them.
    return not any(map(free_unbacked_symbols, _sized(call).values()))


def _sized(call: Any) -> dict[str, Any]:
    """The arguments that are tensors or symbolic sizes."""
    given = zip(call.spec.names, values(call), strict=True)
    return {name: x for name, x in given if isinstance(x, (torch.Tensor, torch.SymInt))}


def _call(op: Op, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from .inductor import V, fallback_handler

    graph, overload = V.graph, getattr(op.packet, kernel.name)
    # C++ cannot call a Python function, and an FX graph holds ops: both keep the dispatcher.
    in_python = not (graph.cpp_wrapper or getattr(graph, "fx_wrapper", False))
    if in_python:
        args, kwargs = as_dispatched(op, args, kwargs)
    before = len(graph.operations)
    result = fallback_handler(overload, add_to_fallback_set=False)(*args, **kwargs)
    # The partitioner asks the FX node's target for the tag cudagraph_unsafe, so the target must be
    # the kernel's overload.
    node = torch.fx.Graph().call_function(overload)
    node.meta = dict(graph.current_node.meta)
    made: list[Any] = graph.operations[before:]
    for operation in made:
        if hasattr(operation, "fx_node"):
            operation.fx_node = node
        if in_python and getattr(operation, "python_kernel_name", None) == f"torch.ops.{overload}":
            operation.python_kernel_name += ".run"
    return result


def as_dispatched(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments as the dispatcher gives them to a Python kernel.

    They come by position where the schema has a position, floats as floats, and without those at
    their defaults, which a kernel need not know.
    """
    by_position: list[tuple[Arg, Any]] = []
    by_name: dict[str, Any] = {}
    for a, x in zip(op.spec.args, values(op.call(*args, **kwargs)), strict=True):
        x = float(x) if a.kind == "float" and type(x) is int else x
        if not a.keyword:
            by_position.append((a, x))
        elif not same(x, a.default):
            by_name[a.name] = x
    while by_position and same(by_position[-1][1], by_position[-1][0].default):
        by_position.pop()
    return tuple(x for _, x in by_position), by_name


def _inline(op: Op, kernel: Kernel, call: Any, placed: Any) -> Any:
    """Lower the kernel's own torch ops in place of a call, so that they fuse with their neighbours.

    placed: the call with IR nodes.
    """
    from .inductor import inline_subgraph_to_ir_nodes

    module = _traced(op, kernel, call)
    given = [getattr(placed, name) for name in _sized(call)]
    outputs = remove_output_copies_pass(module.graph, given)
    last = module.graph.output_node()
    last.args = ((last.args[0], *(result for _, result in outputs)),)
    module.recompile()
    out, *results = inline_subgraph_to_ir_nodes(module, given, f"attnops_{kernel.op}")
    for (output, _), result in zip(outputs, results, strict=True):
        become(output, result)
    return None if out == () else out


def _traced(op: Op, kernel: Kernel, call: Any) -> torch.fx.GraphModule:
    """The torch ops of a kernel, as a graph of the call's tensors and symbolic sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import NodeSource

    from .inductor import V, select_decomp_table

    answers, sized = answering(kernel), _sized(call)

    def run(*traced: Any) -> Any:
        out = answers(changed(call, **dict(zip(sized, traced, strict=True))))
        # torch 2.11 takes an output of None for a missing output node.
        return () if out is None else out

    with V.fake_mode:
        module = make_fx(run, decomposition_table=select_decomp_table())(*sized.values())
    # The comments of the generated code name the kernel.
    node, name = V.graph.current_node, f"attnops.{kernel.op}.{kernel.name}"
    source = NodeSource(node, "attnops")
    source.node_info = NodeSource.NodeInfo(name, str(op.packet), id(node.graph))
    for made in module.graph.nodes:
        made.meta["from_node"] = [source]
    return module


def install() -> None:
    """Register the lowerings and the cache key, when a compiler first traces an op.

    Idempotent; leaves lowerings of users as they are.
    """
    from .inductor import add_needs_realized_inputs, register_lowering

    with _LOCK:
        for op in OPS.values():
            if op.name not in _REGISTERED:
                add_needs_realized_inputs(op.packet.default)
                register_lowering(op.packet.default, type_promotion_kind=None)(lowering_of(op))
                _REGISTERED.add(op.name)
        cache_key.install()
        written_views.install()
