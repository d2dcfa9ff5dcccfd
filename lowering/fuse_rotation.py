"""`fuse_rotation`: norm and rotation of query and key become arguments of the `decode_attention` that they feed."""

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..call import changed, split
from ..ops import OPS
from ..problem import surely
from ..traced import writer
from .fuse_linears import fake_of, finish, give_value
from .norms import Norm, call_of, norm_of, pairs

log = logging.getLogger("attnops.lowering")
OP = "decode_attention"


@dataclass(frozen=True)
class Rotated:
    """A call of `decode_attention`. norms: are the norms of query and key fused, too? refusal: why nothing was fused; "" where it was."""

    call: str
    norms: bool = False
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.call}: {f'not fused, {self.refusal}' if self.refusal else 'norms and rotation' if self.norms else 'rotation'}"


class _Turn(NamedTuple):
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


@dataclass
class _Side:
    """The way back from an argument, query or key, to its input. inside: nodes that no other code may use. path: those to repeat."""

    inside: dict[fx.Node, None] = field(default_factory=dict)
    path: list[fx.Node] = field(default_factory=list)

    def take(self, node: Any, *names: str) -> fx.Node | None:
        """`node`, if it is a call of a torch function or method of one of these names."""
        if call_of(node)[0] not in names:
            return None
        self.inside[node] = None
        return node  # type: ignore[no-any-return]

    def back(self, node: fx.Node) -> fx.Node:
        """The first node behind `node` that does more than move whole vectors along the last dim."""
        while True:
            inner: Any = node.args[0] if node.args else None
            if _moves_vectors(node):
                self.path.append(node)
            elif _is_getitem(node, 0) and isinstance(inner, fx.Node) and _is_getitem(inner, None):
                self.path += [node, inner]
                self.inside[inner] = None
                inner = inner.args[0]
            else:
                return node
            self.inside[node] = None
            node = inner


def fuse_rotation(graph: fx.Graph | fx.GraphModule) -> tuple[Rotated, ...]:
    """Hand `decode_attention` its query and key as they were before RMS norms and a rotation by halves, with weights and angles.

    The op computes them in float32 and rounds once, where the model's code rounds after each step. Nothing else may use the numbers in
    between, and none of the inputs may be written between their first use and the call.

    Args:
        graph: as Dynamo gives it to a backend, with fake values. Changed in place.

    Returns:
        Every call found that has no angles yet, in the order of the graph.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    found = []
    for node in graph.find_nodes(op="call_function", target=OPS[OP].packet.default):
        call: Any = OPS[OP].call(*node.args, **node.kwargs)
        if call.cos is None and call.q_norm is None and call.k_norm is None:
            found.append(_fuse(graph, node, call))
            log.info("%s", found[-1])
    if any(not f.refusal for f in found):
        finish(graph)
    return tuple(found)


def _fuse(graph: fx.Graph, node: fx.Node, call: Any) -> Rotated:
    sides: tuple[_Side, ...] = (_Side(), _Side())
    turns = [_turn(side, side.back(x)) for side, x in zip(sides, (call.query, call.key), strict=True)]
    query, key = turns
    if query is None or key is None:
        return Rotated(node.name, refusal="query and key are not both rotated by halves")
    if (query.cos, query.sin) != (key.cos, key.sin):
        return Rotated(node.name, refusal="query and key are rotated by different angles")
    given = zip((query, key), (call.query, call.key), strict=True)
    if not all(_one_token(fake_of(turn.x), fake_of(x), fake_of(query.cos), fake_of(query.sin)) for turn, x in given):
        return Rotated(node.name, refusal="its angles are not one row a request, or its dtypes differ")
    if reason := _kept(node, sides):
        return Rotated(node.name, refusal=reason)
    fused: dict[str, Any] = {"cos": _rows(graph, node, query.cos), "sin": _rows(graph, node, query.sin)}
    inputs = [query.x, key.x]
    # Norms are looked for on copies, so that a rotation without them is fused all the same.
    wider = tuple(_Side(dict(side.inside), list(side.path)) for side in sides)
    norms = [n for side, x in zip(wider, inputs, strict=True) if (n := norm_of(side.back(x))) is not None]
    for side, norm in zip(wider, norms, strict=False):
        side.inside |= dict.fromkeys(norm.nodes)
    both = len(norms) == 2 and norms[0].eps == norms[1].eps and not _kept(node, wider)
    both = both and all(_alike(n, fake_of(x)) for n, x in zip(norms, (call.query, call.key), strict=True))
    if both:
        inputs, sides = [n.x for n in norms], wider
        fused |= {"q_norm": norms[0].gain, "k_norm": norms[1].gain, "eps": norms[0].eps}
    fused |= {name: _again(graph, node, side, x) for name, side, x in zip(("query", "key"), sides, inputs, strict=True)}
    args, kwargs = split(changed(call, **fused))
    node.args, node.kwargs = args, kwargs
    for old in sorted({**sides[0].inside, **sides[1].inside}, reverse=True):
        graph.erase_node(old)
    return Rotated(node.name, both)


# What is matched -------------------------------------------------------------------------------------------------------


def _moves_vectors(node: fx.Node) -> bool:
    """Does it leave the vectors along the last dim of `[B, H, S, D]` as they are, in place and order, but for the order of H and S?"""
    source: Any = node.args[0] if node.args else None
    x, out = (fake_of(n) if isinstance(n, fx.Node) else None for n in (source, node))
    if node.op != "call_method" or not isinstance(x, Tensor) or not isinstance(out, Tensor) or node.kwargs:
        return False
    if node.target == "transpose":
        return x.dim() == 4 and {int(d) % 4 for d in node.args[1:]} == {1, 2}  # type: ignore[arg-type]
    if node.target == "flatten":
        return x.dim() == 4 and node.args[1:] == (0, 1)
    return node.target == "contiguous" or (node.target == "to" and _to_dtype(node))


def _is_getitem(node: fx.Node, index: int | None) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name == "getitem" and node.args[1] is index and isinstance(fake_of(node), Tensor)


def _to_dtype(node: fx.Node) -> bool:
    """Does it change the dtype at most?"""
    source = node.args[0]
    x, out = fake_of(source) if isinstance(source, fx.Node) else None, fake_of(node)
    return isinstance(x, Tensor) and isinstance(out, Tensor) and x.device == out.device and out.is_floating_point()


def _half(side: _Side, node: Any) -> tuple[Any, int]:
    """(x, 0 for its first half along the last dim, 1 for its second), or (None, 0)."""
    item = side.take(node, "getitem")
    source: Any = item.args[0] if item is not None else None
    if item is None or not isinstance(source, fx.Node):
        return None, 0
    if (chunks := side.take(source, "chunk")) is not None:
        cut = (*chunks.args[1:], chunks.kwargs.get("dim")) if chunks.kwargs else chunks.args[1:]
        return (chunks.args[0], int(item.args[1])) if cut == (2, -1) else (None, 0)  # type: ignore[arg-type]
    half = fake_of(source).shape[-1] // 2 if isinstance(fake_of(source), Tensor) and fake_of(source).shape[-1] % 2 == 0 else 0
    for n, at in enumerate((slice(None, half, None), slice(half, None, None))):
        if half and item.args[1] == (Ellipsis, at):
            return source, n
    return None, 0


def _halves(side: _Side, node: Any) -> tuple[Any, Any]:
    """The two parts of a concatenation along the last dim, or (None, None)."""
    joined = side.take(node, "cat", "concat")
    if joined is None or (joined.args[1:] or (joined.kwargs.get("dim"),)) != (-1,):
        return None, None
    parts: Any = joined.args[0]
    return tuple(parts) if len(parts) == 2 else (None, None)


def _turn(side: _Side, node: fx.Node) -> _Turn | None:
    """The rotation whose result is `node`, in one of the two ways that transformers writes it."""
    for plain, crossed in pairs(node, "add"):
        for x, cos in pairs(plain, "mul"):
            for other, sin in pairs(crossed, "mul"):
                trial = _Side(dict(side.inside))
                second, first = _halves(trial, other)
                minus = trial.take(second, "neg")
                if minus is None or first is None:
                    continue
                if _half(trial, minus.args[0]) == (x, 1) and _half(trial, first) == (x, 0) and isinstance(x, fx.Node):
                    side.inside |= trial.inside | dict.fromkeys((node, plain, crossed))
                    return _Turn(x, cos, sin)
    trial = _Side(dict(side.inside))
    first, second = _halves(trial, node)
    less, more = trial.take(first, "sub"), trial.take(second, "add")
    if less is None or more is None or less.kwargs or more.kwargs:
        return None
    products = [trial.take(n, "mul") for n in (*less.args, *more.args)]
    if len(products) != 4 or any(p is None or len(p.args) != 2 for p in products):
        return None
    # x_1 cos - x_2 sin, x_2 cos + x_1 sin
    (a, cos), (b, sin), (c, again), (d, also) = ((p.args[0], p.args[1]) for p in products if p is not None)
    halves = [_half(trial, n) for n in (a, b, c, d)]
    x = halves[0][0]
    if x is None or halves != [(x, 0), (x, 1), (x, 1), (x, 0)] or again is not cos or also is not sin:
        return None
    side.inside |= trial.inside
    return _Turn(x, cos, sin)  # type: ignore[arg-type]


# Whether it may be fused, and how ---------------------------------------------------------------------------------------


def _one_token(x: Any, given: Any, cos: Any, sin: Any) -> bool:
    """Is x `[B, H, 1, D]` or `[B, 1, H, D]`, and are the angles `[B, 1, 1, D or D / 2]`?"""
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (x, cos, sin)) or x.dtype != given.dtype or cos.dtype != sin.dtype:
        return False
    (rows, heads, dim), one = given.shape, [n for n in x.shape[1:3] if isinstance(n, int)]
    shape = surely(x.shape[0] == rows) and sorted(one) == sorted([1, heads]) and x.shape[3] == dim
    angles = all(surely(t.shape[0] == rows) and t.shape[1:3] == (1, 1) for t in (cos, sin))
    return shape and angles and cos.shape[3] == sin.shape[3] and cos.shape[3] in (dim, dim // 2)


def _alike(norm: Norm, given: Any) -> bool:
    """Is the norm computed in float32, with a gain for every number of a head, of an input of the call's dtype?"""
    return norm.is_wide and fake_of(norm.x).dtype == given.dtype and tuple(fake_of(norm.gain).shape) == tuple(given.shape[2:])


def _kept(call: fx.Node, sides: tuple[_Side, ...]) -> str:
    """Why the nodes inside may not leave, or ""."""
    inside = {node for side in sides for node in side.inside}
    for node in inside:
        if other := next((user for user in node.users if user not in inside and user is not call), None):
            return f"{other.name} uses {node.name}, too"
    return writer(min(inside), call, {n for node in inside for n in node.all_input_nodes} - inside, fake_of)


def _rows(graph: fx.Graph, call: fx.Node, angles: fx.Node) -> fx.Node:
    """Angles `[B, 1, 1, W]` as `[B, W]`."""
    with graph.inserting_before(call):
        return give_value(graph.call_method("flatten", (angles, 0, 2)), call)


def _again(graph: fx.Graph, call: fx.Node, side: _Side, x: fx.Node) -> fx.Node:
    """What the path of a side makes of another input."""
    with graph.inserting_before(call):
        for step in reversed(side.path):
            x = give_value(graph.create_node(step.op, step.target, (x, *step.args[1:]), dict(step.kwargs)), call)
    return x
