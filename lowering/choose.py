"""Lowering of an op to the kernel chosen for it: `attnops.<op>.default` becomes a call of `attnops.<op>.<kernel>`."""

if __name__ != "attnops.lowering.choose":
    raise ImportError("import attnops.lowering.choose, not lowering.choose")

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attnops.kernel import Kernel
from attnops.ops import Op
from attnops.select import choose, select

log = logging.getLogger("attnops.lowering")


def lowering_of(op: Op) -> Callable[..., Any]:
    """The Inductor lowering of `op.default`."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        values = node_values(V.graph.current_node)
        kernel = decide(op, *values)
        if kernel.inline:
            return _inline(kernel, values, args, kwargs)
        return _call(op, kernel, args, kwargs)

    return lower


def decide(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel:
    """The kernel for a call whose arguments are fake tensors. Heads, head dims and page size are made static: each is a guard."""
    given = dict(kwargs)
    policy = given.pop("policy", "")
    problem = op.problem(*args, **given)
    kernel = choose(problem, policy)
    if log.isEnabledFor(logging.INFO):
        log.info("%s", select(problem, policy))
    return kernel


def node_values(node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an FX node with the fake tensors and symbolic sizes that its input nodes stand for."""

    def value(x: Any) -> Any:
        return x.meta["val"] if isinstance(x, torch.fx.Node) else x

    args, kwargs = pytree.tree_map_only(torch.fx.Node, value, (node.args, node.kwargs))
    return args, kwargs


def _call(op: Op, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    overload = getattr(op.packet, kernel.name)
    before = len(V.graph.operations)
    result = fallback_handler(overload, add_to_fallback_set=False)(*args, **kwargs)
    # The partitioner asks the FX node's target whether it may lie in a CUDA graph, so the node must be the kernel's, not the op's.
    node = torch.fx.Graph().call_function(overload)
    node.meta = dict(V.graph.current_node.meta)
    for operation in V.graph.operations[before:]:
        if hasattr(operation, "fx_node"):
            operation.fx_node = node
    return result


def _inline(kernel: Kernel, values: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower the kernel's own torch ops in place of a call, so that they fuse with their neighbours."""
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, spec = pytree.tree_flatten(values)
    dynamic = [i for i, x in enumerate(flat) if isinstance(x, (torch.Tensor, torch.SymInt))]

    def run(*given: Any) -> Any:
        filled = list(flat)
        for i, x in zip(dynamic, given, strict=True):
            filled[i] = x
        run_args, run_kwargs = pytree.tree_unflatten(filled, spec)
        # torch 2.11 takes an output of None for a missing output node.
        return () if (out := kernel.run(*run_args, **run_kwargs)) is None else out

    with V.fake_mode:
        graph = make_fx(run, decomposition_table=select_decomp_table())(*[flat[i] for i in dynamic])
    lowered = pytree.tree_leaves((args, kwargs), is_leaf=lambda x: x is None)
    out = inline_subgraph_to_ir_nodes(graph, [lowered[i] for i in dynamic], f"attnops_{kernel.op}")
    return None if out == () else out
