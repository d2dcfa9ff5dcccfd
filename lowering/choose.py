"""Lowering of an op to the kernel chosen for it: `attnops.<op>.default` becomes a call of `attnops.<op>.<kernel>`."""

import logging
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..call import Call, changed, same, split, values
from ..kernel import Kernel
from ..ops import OPS, Op
from ..ops.ahead import begin
from ..ops.foreign import answering
from ..ops.op import UNREAD
from ..problem import Problem, altered
from ..select import choose, select
from ..traced import equal_calls
from . import cache_key, written_views
from .remove_output_copies_pass import become, remove_output_copies_pass

log = logging.getLogger("attnops.lowering")
_LOCK = threading.Lock()
_REGISTERED: set[str] = set()


def lowering_of(op: Op) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.lowering import fallback_handler
        from torch._inductor.virtualized import V

        node, kept = V.graph.current_node, vars(V.graph)
        if "attnops_equal" not in kept:
            kept["attnops_equal"], kept["attnops_lowered"], kept["attnops_begun"] = equal_calls(node.graph, _value), {}, set()
        # Inductor drops a node's value after its last use, so it is kept for equal calls.
        lowered = kept["attnops_lowered"]
        if (earlier := kept["attnops_equal"].get(node)) is not None:
            return lowered[earlier]
        if node.meta.get("unbacked_bindings") and _unread(node):
            return fallback_handler(getattr(torch.ops.attnops, f"{op.name}__{UNREAD}").default, add_to_fallback_set=False)(*args)
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
        inline = _in_place(kernel, problem, call) and not written_views.of_another_dtype(nodes)
        if not inline and (kernel.name, problem) not in kept["attnops_begun"]:
            kept["attnops_begun"].add((kernel.name, problem))
            begin(kernel, call)
        lowered[node] = _inline(op, kernel, call, placed) if inline else _call(op, kernel, *split(placed))
        return lowered[node]

    return lower


def _unread(node: torch.fx.Node) -> bool:
    """Does nothing read the result, and nothing but assertions its size?"""
    aten, compared = torch.ops.aten, (torch.ops.aten.sym_size.int, operator.ge, operator.le)
    return all(user.target is aten._assert_scalar.default or (user.target in compared and _unread(user)) for user in node.users)


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def _in_place(kernel: Kernel, problem: Problem, call: Call) -> bool:
    """Are the torch ops of `kernel` lowered here, rather than the kernel called?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if kernel.inline is None or kernel.inline.when is None:
        return kernel.inline is not None
    if not kernel.inline.when(problem):
        return False
    # Lowered torch ops need sizes at compile time. Unbacked ones are known at run time only, where the kernel's call reads them.
    return not any(free_unbacked_symbols(x) for x in values(call) if isinstance(x, (torch.Tensor, torch.SymInt)))


def _call(op: Op, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    graph, overload = V.graph, getattr(op.packet, kernel.name)
    # C++ cannot call a Python function, and an FX graph holds ops: both keep the dispatcher.
    in_python = not (graph.cpp_wrapper or getattr(graph, "fx_wrapper", False))
    if in_python:
        args, kwargs = as_dispatched(op, args, kwargs)
    before = len(graph.operations)
    result = fallback_handler(overload, add_to_fallback_set=False)(*args, **kwargs)
    # The partitioner asks the FX node's target for the tag cudagraph_unsafe, so the target must be the kernel's overload.
    node = torch.fx.Graph().call_function(overload)
    node.meta = dict(graph.current_node.meta)
    made: list[Any] = graph.operations[before:]
    for operation in made:
        if hasattr(operation, "fx_node"):
            operation.fx_node = node
        if in_python and getattr(operation, "python_kernel_name", None) == f"torch.ops.{overload}":
            operation.python_kernel_name += ".run"
    return result


def as_dispatched(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments as the dispatcher gives them to a Python kernel: by position where the schema has a position, floats as
    floats, and without those at their defaults, which a kernel need not know."""
    given = list(zip(op.spec.args, values(op.call(*args, **kwargs)), strict=True))
    given = [(a, float(x) if a.kind == "float" and type(x) is int else x) for a, x in given]
    by_position = [(a, x) for a, x in given if not a.keyword]
    while by_position and same(by_position[-1][1], by_position[-1][0].default):
        by_position.pop()
    return tuple(x for _, x in by_position), {a.name: x for a, x in given if a.keyword and not same(x, a.default)}


def _inline(op: Op, kernel: Kernel, call: Any, lowered: Any) -> Any:
    """Lower the kernel's own torch ops in place of a call, so that they fuse with their neighbours. lowered: the call with IR nodes."""
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import NodeSource

    answers = answering(kernel)
    dynamic = [n for n, x in zip(op.spec.names, values(call), strict=True) if isinstance(x, (torch.Tensor, torch.SymInt))]

    def run(*traced: Any) -> Any:
        # torch 2.11 takes an output of None for a missing output node.
        return () if (out := answers(changed(call, **dict(zip(dynamic, traced, strict=True))))) is None else out

    # The comments of the generated code name the kernel.
    source = NodeSource(V.graph.current_node, "attnops")
    source.node_info = NodeSource.NodeInfo(f"attnops.{kernel.op}.{kernel.name}", str(op.packet), id(V.graph.current_node.graph))
    with V.fake_mode:
        graph = make_fx(run, decomposition_table=select_decomp_table())(*[getattr(call, n) for n in dynamic])
    for node in graph.graph.nodes:
        node.meta["from_node"] = [source]
    given = [getattr(lowered, n) for n in dynamic]
    outputs = remove_output_copies_pass(graph.graph, given)
    last = graph.graph.output_node()
    last.args = ((last.args[0], *(result for _, result in outputs)),)
    graph.recompile()
    out, *results = inline_subgraph_to_ir_nodes(graph, given, f"attnops_{kernel.op}")
    for (output, _), result in zip(outputs, results, strict=True):
        become(output, result)
    return None if out == () else out


def install() -> None:
    """Register the lowerings and the cache key, when a compiler first traces an op. Idempotent; leaves lowerings of users as they are."""
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering

    with _LOCK:
        for op in OPS.values():
            if op.name not in _REGISTERED:
                add_needs_realized_inputs(op.packet.default)
                register_lowering(op.packet.default, type_promotion_kind=None)(lowering_of(op))
                _REGISTERED.add(op.name)
        cache_key.install()
        written_views.install()
