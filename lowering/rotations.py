"""What lies between an argument of an op and the tensors that a model norms and rotates for it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..core.fx_effects import writer
from .graph_tools import NewNodes, fake_of
from .patterns import Norm, Pattern, norm_of, number, readings

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


@dataclass
class Side:
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

    def copy(self) -> "Side":
        return Side(self.given, self.x, dict(self.inside), list(self.path))

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


def _turn(side: Side) -> Any:
    """The angles (cos, sin) of a rotation, to whose input the side goes back; None for other
    code."""
    node = side.back()
    for found in (found for pattern in ROTATIONS for found in readings(pattern, node)):
        side.inside |= dict.fromkeys(found["nodes"])
        side.x = found["x"]
        return found["cos"], found["sin"]
    return None


@dataclass(frozen=True)
class Turned:
    """Query and key as they were before their rotation.

    sides: of query and key. angles: the nodes of the cosines and sines. norms: those of query and
    key before the rotation, where they are fused, too.
    """

    sides: Sequence[Side]
    angles: tuple[fx.Node, fx.Node]
    norms: Sequence[Norm] = ()

    def arguments(self, new: NewNodes) -> dict[str, Any]:
        """Those of an op that norms and rotates query and key itself."""
        cos, sin = self.angles
        query, key = (_again(new, side) for side in self.sides)
        given: dict[str, Any] = {"query": query, "key": key}
        # The angles of each row have two dims between them and the rows that are 1.
        given |= {"cos": new.add("flatten", cos, 0, 2), "sin": new.add("flatten", sin, 0, 2)}
        if self.norms:
            of_query, of_key = self.norms
            given |= {"q_norm": of_query.gain, "k_norm": of_key.gain, "eps": of_query.eps}
        return given

    def erase(self) -> None:
        """Remove the nodes between, which nothing uses any more."""
        inside = {node for side in self.sides for node in side.inside}
        for old in sorted(inside, reverse=True):
            old.graph.erase_node(old)


def turned(
    calls: Collection[fx.Node],
    sides: Sequence[Side],
    values: Collection[Any],
    fits: Callable[..., bool],
) -> Turned | str:
    """How query and key came to a call, or why that may not be fused.

    calls: what may use the numbers in between, the one that takes the inputs first. values: their
    other arguments, which stay.
    fits: takes the value of an argument `[T, H, D]`, that of the tensor before its rotation, and
    those of the angles, which the two ways to fuse want in different shapes.
    """
    angles = [_turn(side) for side in sides]
    if None in angles:
        return "query and key are not both rotated by halves"
    if angles[0] != angles[1]:
        return "query and key are rotated by different angles"
    for side in sides:
        if not fits(side.given, fake_of(side.x), *map(number, angles[0])):
            return "its angles have another shape, or its dtypes differ"
    if any(value in side.inside for side in sides for value in values):
        return "a value is rotated, too"
    if why := _kept(calls, sides):
        return why
    before, norms = _norms(calls, sides)
    return Turned(before, angles[0], norms)


def _norms(
    calls: Collection[fx.Node], sides: Sequence[Side]
) -> tuple[Sequence[Side], Sequence[Norm]]:
    """The sides with the norms before the rotations, and the norms; none where they must stay."""
    # On copies, so that a rotation without norms is fused all the same.
    behind, norms = [side.copy() for side in sides], list[Norm]()
    for side in behind:
        norm = norm_of(side.back())
        if norm is None or not _alike(norm, side.given):
            return sides, ()
        side.inside |= dict.fromkeys(norm.nodes)
        side.x = norm.x
        norms.append(norm)
    if norms[0].eps != norms[1].eps or _kept(calls, behind):
        return sides, ()
    return behind, norms


def _alike(norm: Norm, given: Any) -> bool:
    """Is it computed in float32, from the call's dtype, with a gain for every number of a head?"""
    gain, x = fake_of(norm.gain), fake_of(norm.x)
    return norm.is_wide and x.dtype == given.dtype and tuple(gain.shape) == tuple(given.shape[2:])


def _kept(calls: Collection[fx.Node], sides: Sequence[Side]) -> str:
    """Why the nodes inside may not leave, or ""."""
    inside = {node for side in sides for node in side.inside}
    for node in inside:
        for user in node.users:
            if user not in inside and user not in calls:
                return f"{user.name} uses {node.name}, too"
    inputs, first = {n for node in inside for n in node.all_input_nodes} - inside, min(calls)
    if late := [node for node in inputs if node > first]:
        return f"{late[0].name} is made after {first.name}"
    return writer(min(inside), max(*inside, first), inputs, fake_of)


def _again(new: NewNodes, side: Side) -> fx.Node:
    """What the path of a side makes of its input."""
    node: fx.Node = side.x
    for step in reversed(side.path):
        node = new.add(step.target, node, *step.args[1:], **step.kwargs)
    return node
