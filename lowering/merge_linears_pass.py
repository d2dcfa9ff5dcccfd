"""`merge_linears_pass`: linears of one input, over adjacent weights, become one matrix product."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from ..core.fx_effects import may_write, storages
from ..core.private_torch import HigherOrderOperator, tracing_context
from .graph_tools import (
    VALUE,
    NewNodes,
    add_guard,
    evaluate,
    facts_of,
    fake_of,
    finish,
    graph_of,
    is_parameter,
    linear_arguments,
    log,
    records_gradients,
    source_of,
)

ALIGNED = 16
"""Bytes. Inductor clones an input that is less aligned, and the clone ends where the input ends."""


@dataclass(frozen=True)
class Merged:
    """A group of linears with one input and adjacent weights.

    weights: the names of the graph inputs, in the order of their addresses.
    rows: of each weight.
    refusal: why the group was not merged; "" where it was.
    """

    weights: tuple[str, ...]
    rows: tuple[int, ...]
    refusal: str = ""

    def __str__(self) -> str:
        weights = " + ".join(f"{w} [{n}]" for w, n in zip(self.weights, self.rows, strict=True))
        return f"{weights}: not merged, {self.refusal}" if self.refusal else weights


class _Call(NamedTuple):
    node: fx.Node
    x: fx.Node
    parameters: tuple[fx.Node, ...]
    """The weight and, if any, the bias."""


def merge_linears_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Merged, ...]:
    """Replace linears of one input over adjacent weights by one linear, and each by a slice of it.

    `attnops.nn.pack_linears` makes weights adjacent. Nothing is copied: an as_strided of the first
    weight reads all of them. The compiled code is guarded on the adjacency.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, with fake
            values and sources. Changed in place.

    Returns:
        Every group found, in the order of the graph. A group is not merged where its weights need a
        gradient or may be written, where the graph's results or views would get other strides, and
        where no guard can be added (outside of torch.compile).
    """
    graph = graph_of(graph)
    found: list[Merged] = []
    adjacent: list[tuple[fx.Node, ...]] = []
    # Collected once, because there are as many groups as layers.
    grad, others = records_gradients(graph), _other_users(graph)
    for calls in _groups(graph):
        parameters = list(zip(*(c.parameters for c in calls), strict=True))
        refusal = _refusal(parameters, grad, others) or _merge(calls)
        if not refusal:
            adjacent += parameters
        weights = parameters[0]
        rows = tuple(fake_of(n).shape[0] for n in weights)
        found.append(Merged(tuple(n.name for n in weights), rows, refusal))
        log.info("%s", found[-1])
    if adjacent:
        finish(graph)
        _guard(adjacent)
    return tuple(found)


# Which linears belong together ------------------------------------------------------------------


def _groups(graph: fx.Graph) -> list[list[_Call]]:
    """Linears of one input over adjacent parameters, in their order, without a write between."""
    writes = 0
    candidates: dict[Any, dict[fx.Node, _Call]] = {}
    for node in graph.nodes:
        writes += may_write(node)
        if (call := _call(node)) is not None:
            weight = call.parameters[0]
            columns, dtype = fake_of(weight).shape[1:], fake_of(weight).dtype
            shared = call.x, writes, _storage(weight), columns, dtype, len(call.parameters)
            candidates.setdefault(shared, {}).setdefault(weight, call)
    found: list[list[_Call]] = []
    for calls in candidates.values():
        found.append([])
        for call in sorted(calls.values(), key=lambda c: int(_start(c.parameters[0]))):
            if found[-1] and not all(map(_follows, found[-1][-1].parameters, call.parameters)):
                found.append([])
            found[-1].append(call)
    return [group for group in found if len(group) > 1]


def _call(node: fx.Node) -> _Call | None:
    """The call of a linear over parameters of a module, or None."""
    if node.op != "call_function" or node.target is not linear:
        return None
    x, *parameters = linear_arguments(node)
    if parameters[-1] is None:
        parameters.pop()
    if not isinstance(x, fx.Node) or not isinstance(fake_of(x), Tensor):
        return None
    return _Call(node, x, tuple(parameters)) if all(map(is_parameter, parameters)) else None


def _storage(node: fx.Node) -> int:
    return int(fake_of(node).untyped_storage()._cdata)


def _start(node: fx.Node) -> Any:
    return fake_of(node).storage_offset()


def _follows(one: fx.Node, other: fx.Node) -> bool:
    a, b = fake_of(one), fake_of(other)
    same = _storage(one) == _storage(other) and a.dtype == b.dtype
    return bool(same and _start(one) + a.numel() == _start(other))


# Whether they may be merged ---------------------------------------------------------------------


def _other_users(graph: fx.Graph) -> dict[int, str]:
    """By storage, the first input that is more than the weight or bias of linears."""
    found: dict[int, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        # A write through one input shows in another only if they overlap; linears' weights do not.
        multiplied = all(_only_multiplies(user, node) for user in node.users)
        if isinstance(fake_of(node), Tensor) and not multiplied:
            found.setdefault(_storage(node), node.name)
    return found


def _only_multiplies(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is torch.as_strided:  # of a group that was merged before
        return all(_only_multiplies(n, user) for n in user.users)
    return user.target is linear and weight is not linear_arguments(user)[0]


def _refusal(rows: Sequence[Sequence[fx.Node]], grad: bool, others: dict[int, str]) -> str:
    """The reason why the parameters of each row may not be read as one, or ""."""
    nodes = [n for row in rows for n in row]
    if tracing_context() is None or None in map(source_of, nodes):
        return "no guard can be added here"
    if grad and any(fake_of(n).requires_grad for n in nodes):
        return "the weights need a gradient"
    if any(_start(row[0]) * fake_of(row[0]).element_size() % ALIGNED for row in rows):
        return f"the first is not aligned to {ALIGNED} bytes"
    name = next((others[s] for s in map(_storage, nodes) if s in others), "")
    return name and f"{name} shares their storage and has users other than linears"


def _guard(rows: Sequence[Sequence[fx.Node]]) -> None:
    """Guard the frame that Dynamo is compiling: the parameters of every row are adjacent in memory.

    Dynamo does not guard a parameter's address: `module.weight.data = other` passes all of its
    guards. This guard compares addresses with each other, not with constants, so layers keep
    sharing compiled code. It is a guard of the frame and runs last, because Dynamo skips the guards
    of a single input while the module dicts that lead to it are unchanged.
    """
    code = []
    for row in rows:
        # A method with torch 2.11, a property with 2.13.
        sources = [s.name() if callable(s.name) else s.name for s in map(source_of, row)]
        at = [f"{source}.data_ptr()" for source in sources]
        code.append(f"{at[0]} % {ALIGNED} == 0")
        ends = [f"{a} + {fake_of(node).nbytes}" for node, a in zip(row, at, strict=True)]
        code += [f"{end} == {start}" for end, start in zip(ends, at[1:], strict=False)]
    add_guard(rows[0][0], code, "weights that are read as one")


# How they are merged ----------------------------------------------------------------------------


def _merge(calls: list[_Call]) -> str:
    """Merge the calls. Returns the reason where the graph does not allow it, or ""."""
    new, parameters = NewNodes(min(c.node for c in calls)), calls[0].parameters
    rows = [int(fake_of(c.parameters[0]).shape[0]) for c in calls]
    width = int(fake_of(parameters[0]).shape[1])
    shapes = ((sum(rows), width), (width, 1)), ((sum(rows),), (1,))
    given = zip(parameters, shapes, strict=False)
    whole = [new.add(torch.as_strided, node, *shape) for node, shape in given]
    product = new.add(linear, calls[0].x, *whole)
    parts = zip(accumulate(rows, initial=0), rows, strict=False)
    slices = [new.add("narrow", product, -1, start, n) for start, n in parts]
    values = {c.node: fake_of(part) for c, part in zip(calls, slices, strict=True)}
    if why := _propagate(values):
        new.erase()
        return why
    for node, value in values.items():
        node.meta[VALUE] = value
    for call, part in zip(calls, slices, strict=True):
        call.node.replace_all_uses_with(part)
        call.node.graph.erase_node(call.node)
    return ""


def _propagate(values: dict[fx.Node, Any]) -> str:
    """Add the values of nodes whose strides follow from `values`, new fake values of linears.

    Returns a reason against the change, or "": a view becomes a copy or an error, a graph output
    gets other strides than in the model's own code, or a node cannot be evaluated again.
    """
    # An autocast region inside the graph changes dtypes.
    if any(facts_of(fake_of(node))[0] != facts_of(x)[0] for node, x in values.items()):
        return "its shape or dtype would differ"
    pending = {user for node in values for user in node.users}
    while pending:
        node = min(pending)
        pending.remove(node)
        if why := _unlike(node, values):
            return why
        if node in values:
            pending.update(node.users)
    return ""


def _unlike(node: fx.Node, values: dict[fx.Node, Any]) -> str:
    """Add the new value of a node where its strides change. Returns a reason against it, or ""."""
    if node.op == "output":
        return "it is returned, or a view of it is"
    before, inputs = fake_of(node), [*map(fake_of, node.all_input_nodes)]
    if _unbacked(before) - _unbacked(inputs):
        return f"{node.name} creates an unbacked size"
    known = node.op in ("call_function", "call_method")
    if not known or isinstance(node.target, HigherOrderOperator):
        return f"{node.name} is not a function or method call"

    def value_of(x: fx.Node) -> Any:
        return values.get(x, fake_of(x))

    try:
        value = evaluate(node, next(iter(values.values())).fake_mode, value_of)
    except Exception as e:
        said = str(e).strip() or type(e).__name__
        return f"{node.name} fails with the new strides: {said.splitlines()[0]}"
    given = storages([*map(value_of, node.all_input_nodes)])
    if {*storages(before)} & {*storages(inputs)} and {*storages(value)}.isdisjoint(given):
        return f"{node.name} would copy it"
    (old, old_strides), (new, new_strides) = facts_of(before), facts_of(value)
    if old != new:
        return f"{node.name} would get another shape or dtype"
    if old_strides != new_strides:
        values[node] = value
    return ""


def _unbacked(value: Any) -> set[Any]:
    sizes = [x for x in pytree.tree_leaves(value) if isinstance(x, (Tensor, torch.SymInt))]
    return {s for x in sizes for s in free_unbacked_symbols(x)}
