"""`fuse_rotation_pass`: norms and rotation become arguments of the `decode_attention` they feed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..core.problem import surely
from ..core.record import changed, split
from ..ops import OPS
from .graph_tools import NewNodes, fake_of, finish, graph_of, log
from .rotations import Side, turned

OP = "decode_attention"


@dataclass(frozen=True)
class Rotated:
    """A call of `decode_attention`, or of `write_kv` before attention.

    norms: are the norms of query and key fused, too?
    refusal: why nothing was fused; "" where it was.
    """

    call: str
    norms: bool = False
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.call}: not fused, {self.refusal}"
        return f"{self.call}: {'norms and rotation' if self.norms else 'rotation'}"


def fuse_rotation_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Rotated, ...]:
    """Hand `decode_attention` its query and key as they were before RMS norms and rotation.

    The weights and angles become arguments, too. The rotation is one by halves. The op computes in
    float32 and rounds once, where the model's code rounds after each step. Nothing else may use the
    numbers in between, and none of the inputs may be written between their first use and the call.

    Args:
        graph: as Dynamo gives it to a backend, with fake values. Changed in place.

    Returns:
        Every call found that has no angles yet, in the order of the graph.
    """
    graph = graph_of(graph)
    found = []
    for node in graph.find_nodes(op="call_function", target=OPS[OP].packet.default):
        call: Any = OPS[OP].call(*node.args, **node.kwargs)
        if call.cos is None and call.q_norm is None and call.k_norm is None:
            found.append(_fuse(node, call))
            log.info("%s", found[-1])
    if any(not f.refusal for f in found):
        finish(graph)
    return tuple(found)


def _fuse(node: fx.Node, call: Any) -> Rotated:
    sides = [Side(fake_of(x), x) for x in (call.query, call.key)]
    found = turned((node,), sides, (call.value,), _one_token)
    if isinstance(found, str):
        return Rotated(node.name, refusal=found)
    node.args, node.kwargs = split(changed(call, **found.arguments(NewNodes(node))))
    found.erase()
    return Rotated(node.name, bool(found.norms))


def _one_token(given: Any, x: Any, cos: Any, sin: Any) -> bool:
    """Is x `[B, H, 1, D]` or `[B, 1, H, D]`, and are the angles `[B, 1, 1, D or D / 2]`?"""
    rows, heads, dim = given.shape
    for t in (x, cos, sin):
        if not isinstance(t, Tensor) or t.dim() != 4 or not surely(t.shape[0] == rows):
            return False
    middle = [n for n in x.shape[1:3] if isinstance(n, int)]
    if x.dtype != given.dtype or x.shape[3] != dim or sorted(middle) != sorted([1, heads]):
        return False
    if cos.dtype != sin.dtype or cos.shape[3] not in (dim, dim // 2):
        return False
    return all(t.shape[1:] == (1, 1, cos.shape[3]) for t in (cos, sin))
