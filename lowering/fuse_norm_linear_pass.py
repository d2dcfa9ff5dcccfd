"""`fuse_norm_linear_pass`: a linear with its norm, activation and residual becomes one call."""

from __future__ import annotations

from torch import fx
from torch.nn.functional import linear

from .fused_call import against_calls, finish_calls, fuse
from .graph_tools import graph_of, log
from .linear_parts import match_linear, name_of
from .products import Product as Product


def fuse_norm_linear_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Product, ...]:
    """Replace linears by calls of `attnops::linear`, which take in the parts beside them.

    The parts are the RMS norm before a linear, and the gated activation and the residual after it.
    Where torch's own operations are the fastest kernel, as on a CPU and for long prompts that a
    compiler fuses, the graph does not change. Where another kernel is faster for few rows, a graph
    of any number of rows is guarded on their number. The policy in force is guarded, too.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, after
            `merge_linears_pass`. Changed in place.

    Returns:
        Every linear of the graph, in order. It does not change in grad mode and under autocast;
        where its weight is no parameter, of a tensor subclass, or in an adapter; where dtypes
        differ; and where the graph writes one of its inputs in between. A part is left where its
        value has another user, and the rounding of a norm must be that of float32.
    """
    graph = graph_of(graph)
    linears = graph.find_nodes(op="call_function", target=linear)
    against = against_calls(graph) if linears else ""
    found: list[Product] = []
    for node in linears:
        name = name_of(node)
        found.append(Product(name, refusal=against) if against else _fuse(name, node))
        log.info("%s", found[-1])
    if any(p.parts for p in found):
        finish_calls(graph, "kernels of linears")
    return tuple(found)


def _fuse(name: str, node: fx.Node) -> Product:
    match = match_linear(node)
    if isinstance(match, str):
        return Product(name, refusal=match)
    return Product(name, match.parts, *fuse(match))
