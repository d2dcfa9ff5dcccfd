"""`fuse_norm_pass`: an RMS norm that no linear takes in becomes one call, with its gate and its
residual."""

from __future__ import annotations

from torch import fx

from .fused_call import against_calls, finish_calls, fuse
from .graph_tools import graph_of, log
from .norm_parts import match_norm
from .products import NormCall as NormCall


def fuse_norm_pass(graph: fx.Graph | fx.GraphModule) -> tuple[NormCall, ...]:
    """Replace RMS norms by calls of `attnops::rms_norm`, which take in the gate and the residual
    after them.

    They are the norms that `fuse_norm_linear_pass` has left, such as those after attention and MLP
    (Gemma 2 and 3, OLMo 2, GLM-4), those with a gate after linear attention (Qwen3-Next), and the
    last one of a model. Where torch's own operations are the fastest kernel, as on a CPU and where
    a compiler fuses them, the graph does not change; a deterministic policy does not take them. The
    policy in force is guarded.

    Args:
        graph: as `fuse_norm_linear_pass` leaves it. Changed in place.

    Returns:
        Every norm of the graph whose gain is a parameter, in order. None is looked at in grad mode
        and under autocast. A norm does not change where a node beside it reads what lies between
        its input and its result; where it is not computed in float32 at least; where dtypes differ;
        and where the graph writes one of its inputs in between. The gate and the residual are left
        where the norm's value has another reader.
    """
    graph = graph_of(graph)
    if against := against_calls(graph):
        log.info("norms are left as they are: %s", against)
        return ()
    found: list[NormCall] = []
    for node in list(graph.nodes):
        if (match := match_norm(node)) is None:
            continue
        if isinstance(match, tuple):
            name, why = match
            found.append(NormCall(name, refusal=why))
        else:
            found.append(NormCall(match.gain.name, match.parts, *fuse(match)))
        log.info("%s", found[-1])
    if any(norm.parts for norm in found):
        finish_calls(graph, "kernels of norms")
    return tuple(found)
