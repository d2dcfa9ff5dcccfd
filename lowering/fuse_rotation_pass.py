"""`fuse_rotation_pass`: norms and rotation become arguments of the `decode_attention` they feed."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..core.fx_effects import writer
from ..core.problem import surely
from ..core.record import changed, split
from ..ops import OPS
from .graph_tools import NewNodes, fake_of, finish, graph_of, log
from .patterns import Norm, Pattern, norm_of, number, readings

OP = "decode_attention"

_FIRST, _SECOND = ("first", "x"), ("second", "x")
ROTATIONS: tuple[Pattern, ...] = (
    ("add", ("mul", "x", "cos"), ("mul", ("cat", ("neg", _SECOND), _FIRST), "sin")),
    (
        "cat",
        ("sub", ("mul", _FIRST, "cos"), ("mul", _SECOND, "sin")),
        ("add", ("mul", _SECOND, "cos"), ("mul", _FIRST, "sin")),
    ),
)
"""Of x by the angles cos and sin: the two ways in which transformers writes it."""


@dataclass(frozen=True)
class Rotated:
    """A call of `decode_attention`.

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


@dataclass
class _Side:
    """The way back from an argument, query or key, to its input.

    given: the value of the argument.
    x: how far back the way has come.
    inside: the nodes on it, which no other code may use.
    path: those to repeat.
    """

    given: Any
    x: Any
    inside: dict[fx.Node, None] = field(default_factory=dict)
    path: list[fx.Node] = field(default_factory=list)

    def copy(self) -> "_Side":
        return _Side(self.given, self.x, dict(self.inside), list(self.path))

    def back(self) -> Any:
        """Go back behind nodes that only move vectors along the last dim."""
        while True:
            node = self.x
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
            self.x = inner


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
    sides = [_Side(fake_of(x), x) for x in (call.query, call.key)]
    angles = [_turn(side) for side in sides]
    if refusal := _refusal(angles, sides) or _kept(node, sides):
        return Rotated(node.name, refusal=refusal)
    new, (cos, sin) = NewNodes(node), angles[0]
    # `[B, 1, 1, W]` becomes `[B, W]`.
    fused = {"cos": new.add("flatten", cos, 0, 2), "sin": new.add("flatten", sin, 0, 2)}
    if found := _norms(node, sides):
        sides, (of_query, of_key) = found
        fused |= {"q_norm": of_query.gain, "k_norm": of_key.gain, "eps": of_query.eps}
    query, key = (_again(new, side) for side in sides)
    node.args, node.kwargs = split(changed(call, query=query, key=key, **fused))
    for old in sorted({**sides[0].inside, **sides[1].inside}, reverse=True):
        old.graph.erase_node(old)
    return Rotated(node.name, found is not None)


# What is matched --------------------------------------------------------------------------------


def _moves_vectors(node: fx.Node) -> bool:
    """Does it leave the vectors along the last dim of `[B, H, S, D]` as they are, and their place?

    The order of H and S may change.
    """
    source, *more = node.args or (None,)
    x, out = number(source), fake_of(node)
    if node.op != "call_method" or node.kwargs or not isinstance(x, Tensor):
        return False
    match node.target, x.dim():
        case "transpose", 4:
            return {int(d) % 4 for d in more} == {1, 2}  # type: ignore[arg-type]
        case "flatten", 4:
            return more == [0, 1]
        case "to", _:
            return bool(x.device == out.device and out.is_floating_point())
        case target, _:
            return target == "contiguous"


def _is_getitem(node: fx.Node, index: int | None) -> bool:
    name = getattr(node.target, "__name__", "")
    called = node.op == "call_function" and name == "getitem" and node.args[1] is index
    return called and isinstance(fake_of(node), Tensor)


def _turn(side: _Side) -> Any:
    """The angles (cos, sin) of a rotation, to whose input the side goes back; None for other
    code."""
    node = side.back()
    for found in (found for pattern in ROTATIONS for found in readings(pattern, node)):
        side.inside |= dict.fromkeys(found["nodes"])
        side.x = found["x"]
        return found["cos"], found["sin"]
    return None


# Whether it may be fused, and how ---------------------------------------------------------------


def _refusal(angles: list[Any], sides: list[_Side]) -> str:
    """The reason why these rotations may not be fused, or ""."""
    if None in angles:
        return "query and key are not both rotated by halves"
    if angles[0] != angles[1]:
        return "query and key are rotated by different angles"
    for side in sides:
        if not _one_token(side.given, fake_of(side.x), *map(number, angles[0])):
            return "its angles are not one row a request, or its dtypes differ"
    return ""


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


def _norms(node: fx.Node, sides: list[_Side]) -> Any:
    """The sides with the norms before the rotations, and the norms; None where they must stay."""
    # On copies, so that a rotation without norms is fused all the same.
    sides, norms = [side.copy() for side in sides], []
    for side in sides:
        norm = norm_of(side.back())
        if norm is None or not _alike(norm, side.given):
            return None
        side.inside |= dict.fromkeys(norm.nodes)
        side.x = norm.x
        norms.append(norm)
    return None if norms[0].eps != norms[1].eps or _kept(node, sides) else (sides, norms)


def _alike(norm: Norm, given: Any) -> bool:
    """Is it computed in float32, from the call's dtype, with a gain for every number of a head?"""
    gain, x = fake_of(norm.gain), fake_of(norm.x)
    return norm.is_wide and x.dtype == given.dtype and tuple(gain.shape) == tuple(given.shape[2:])


def _kept(call: fx.Node, sides: list[_Side]) -> str:
    """Why the nodes inside may not leave, or ""."""
    inside = {node for side in sides for node in side.inside}
    for node in inside:
        for user in node.users:
            if user not in inside and user is not call:
                return f"{user.name} uses {node.name}, too"
    inputs = {n for node in inside for n in node.all_input_nodes} - inside
    return writer(min(inside), call, inputs, fake_of)


def _again(new: NewNodes, side: _Side) -> fx.Node:
    """What the path of a side makes of its input."""
    node: fx.Node = side.x
    for step in reversed(side.path):
        node = new.add(step.target, node, *step.args[1:], **step.kwargs)
    return node
