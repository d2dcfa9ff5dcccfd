"""`fuse_linears`: linears that share an input and whose weights are adjacent in memory become one matrix product."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import Guard, TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from ..traced import may_write, storages

log = logging.getLogger("attnops.lowering")

VALUE = "example_value"

ALIGNED = 16
"""Bytes. Inductor clones an input that is less aligned, and the clone ends where that input ends."""


@dataclass(frozen=True)
class Fused:
    """A group of linears with one input and adjacent weights.

    weights: the names of the graph inputs, in the order of their addresses.
    rows: of each weight.
    refusal: why the group was not fused; "" where it was.
    """

    weights: tuple[str, ...]
    rows: tuple[int, ...]
    refusal: str = ""

    def __str__(self) -> str:
        weights = " + ".join(f"{w} [{n}]" for w, n in zip(self.weights, self.rows, strict=True))
        return f"{weights}: not fused, {self.refusal}" if self.refusal else weights


class _Call(NamedTuple):
    node: fx.Node
    x: fx.Node
    parameters: tuple[fx.Node, ...]
    """The weight and, if any, the bias."""


def fuse_linears(graph: fx.Graph | fx.GraphModule) -> tuple[Fused, ...]:
    """Replace linears with one input and adjacent weights by one linear, and each by a slice of its result.

    `attnops.nn.pack_linears` makes weights adjacent. Nothing is copied: an as_strided of the first weight reads all of them. The compiled
    code is guarded on the adjacency.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, with fake values and sources. Changed in place.

    Returns:
        Every group found, in the order of the graph. A group is not fused where its weights need a gradient or may be written, where
        the graph's results or views would get other strides, and where no guard can be added (outside of torch.compile).
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    found: list[Fused] = []
    adjacent: list[tuple[fx.Node, ...]] = []
    # Facts of the whole graph, collected once, because there are as many groups as layers.
    switches_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in graph.nodes)
    inputs_in: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(fake := fake_of(node), Tensor):
            inputs_in.setdefault(fake.untyped_storage()._cdata, []).append(node)
    for calls in _groups(graph):
        parameters = list(zip(*(c.parameters for c in calls), strict=True))
        refusal = _refusal(parameters, switches_grad, inputs_in) or _fuse(graph, calls)
        if not refusal:
            adjacent += parameters
        found.append(Fused(tuple(n.name for n in parameters[0]), tuple(fake_of(n).shape[0] for n in parameters[0]), refusal))
        log.info("%s", found[-1])
    if adjacent:
        finish(graph)
        _guard(adjacent)
    return tuple(found)


def fake_of(node: fx.Node) -> Any:
    return node.meta.get(VALUE)


def give_value(node: fx.Node, like: fx.Node) -> fx.Node:
    """Give a new node the metadata of another, and its own fake value."""
    node.meta = {k: v for k, v in like.meta.items() if k != VALUE}
    args, kwargs = pytree.tree_map_only(fx.Node, fake_of, (node.args, node.kwargs))
    mode = next(t.fake_mode for t in pytree.tree_leaves((args, fake_of(like))) if isinstance(t, FakeTensor))
    # As Dynamo does: the C++ of some ops specialises symbolic sizes.
    with mode, enable_python_dispatcher():
        target: Any = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        node.meta[VALUE] = target(*args[1:] if isinstance(node.target, str) else args, **kwargs)
    return node


def finish(graph: fx.Graph) -> None:
    """Check a graph that was changed, and compile its module again."""
    graph.lint()
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _call(node: fx.Node) -> _Call | None:
    """The call of a linear over static parameters, or None."""
    if node.op != "call_function" or node.target is not linear:
        return None
    x, *parameters = linear_arguments(*node.args, **node.kwargs)
    if parameters[-1] is None:
        parameters.pop()
    static = isinstance(x, fx.Node) and isinstance(fake_of(x), Tensor) and all(map(is_static, parameters))
    return _Call(node, x, tuple(parameters)) if static else None


def is_static(node: Any) -> bool:
    # Inductor may clone any other input before a CUDA graph, and a clone ends where its input ends.
    if not isinstance(node, fx.Node) or node.op != "placeholder" or "_dynamo_static_input_type" not in node.meta.get("tensor_dict", {}):
        return False
    fake = fake_of(node)
    plain = isinstance(fake, torch.nn.Parameter) and fake.layout == torch.strided and fake.is_contiguous()
    return plain and all(isinstance(n, int) for n in (*fake.shape, fake.storage_offset()))


def _groups(graph: fx.Graph) -> list[list[_Call]]:
    """Groups of linears with one input, adjacent weights and biases, in that order, and no write between them."""
    writes = 0
    candidates: dict[Any, dict[fx.Node, _Call]] = {}
    for node in graph.nodes:
        writes += may_write(node)
        if (call := _call(node)) is not None:
            weight = fake_of(call.parameters[0])
            shared = (call.x, writes, weight.untyped_storage()._cdata, weight.shape[1:], weight.dtype, len(call.parameters))
            candidates.setdefault(shared, {}).setdefault(call.parameters[0], call)
    found: list[list[_Call]] = []
    for calls in candidates.values():
        found.append([])
        for call in sorted(calls.values(), key=lambda c: int(fake_of(c.parameters[0]).storage_offset())):
            if found[-1] and not all(map(_follows, found[-1][-1].parameters, call.parameters)):
                found.append([])
            found[-1].append(call)
    return [group for group in found if len(group) > 1]


def _follows(one: fx.Node, other: fx.Node) -> bool:
    a, b = fake_of(one), fake_of(other)
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.dtype == b.dtype
    return bool(same and a.storage_offset() + a.numel() == b.storage_offset())


def source_of(node: fx.Node) -> Any:
    return getattr(node, "_dynamo_source", None)


def _guard(rows: Sequence[Sequence[fx.Node]]) -> None:
    """Guard the frame that Dynamo is compiling: the parameters of every row are adjacent in memory.

    Dynamo does not guard a parameter's address: `module.weight.data = other` passes all of its guards. This guard compares addresses with
    each other, not with constants, so layers keep sharing compiled code. It is a guard of the frame and runs last, because Dynamo skips
    the guards of a single input while the module dicts that lead to it are unchanged.
    """
    code = []
    for row in rows:
        # A method with torch 2.11, a property with 2.13.
        at = [f"{s.name() if callable(s.name) else s.name}.data_ptr()" for s in map(source_of, row)]
        follows = (f"{a} + {fake_of(node).nbytes} == {b}" for node, a, b in zip(row, at, at[1:], strict=False))
        code += [f"{at[0]} % {ALIGNED} == 0", *follows]
    # A guard has one source. The first weight's names this one; the check itself looks up all of them.
    TracingContext.get().guards_context.dynamo_guards.add(Guard(source_of(rows[0][0]), partial(_create, code=code)))


def _create(builder: Any, guard: Any, *, code: list[str]) -> None:
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{line}  # weights that are read as one" for line in code])


def _refusal(parameters: Sequence[Sequence[fx.Node]], switches_grad: bool, inputs_in: Mapping[int, list[fx.Node]]) -> str:
    """The reason why these may not be read as one, or "". inputs_in: the graph's inputs by storage."""
    nodes = [n for row in parameters for n in row]
    if TracingContext.try_get() is None or any(n.op != "placeholder" or source_of(n) is None for n in nodes):
        return "no guard can be added here"
    if any(fake_of(n).requires_grad for n in nodes) and (torch.is_grad_enabled() or switches_grad):
        return "the weights need a gradient"
    if any(fake_of(row[0]).storage_offset() * fake_of(row[0]).element_size() % ALIGNED for row in parameters):
        return f"the first is not aligned to {ALIGNED} bytes"
    for storage in dict.fromkeys(fake_of(n).untyped_storage()._cdata for n in nodes):
        for node in inputs_in[storage]:
            # A write through one input is visible through another only if the two overlap, which linears' weights do not.
            if not all(_only_multiplies(user, node) for user in node.users):
                return f"{node.name} shares their storage and has users other than linears"
    return ""


def _only_multiplies(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is torch.as_strided:  # of an earlier group
        return all(_only_multiplies(n, user) for n in user.users)
    return user.target is linear and weight is not linear_arguments(*user.args, **user.kwargs)[0]


def _fuse(graph: fx.Graph, calls: list[_Call]) -> str:
    """Fuse the calls. Returns the reason where the graph does not allow it, or ""."""
    first, parameters = min(c.node for c in calls), calls[0].parameters
    rows = [int(fake_of(c.parameters[0]).shape[0]) for c in calls]
    width = int(fake_of(parameters[0]).shape[1])
    with graph.inserting_before(first):
        shapes = ((sum(rows), width), (width, 1)), ((sum(rows),), (1,))
        whole = [graph.call_function(torch.as_strided, (node, *shape)) for node, shape in zip(parameters, shapes, strict=False)]
        product = graph.call_function(linear, (calls[0].x, *whole))
        starts = itertools.accumulate(rows, initial=0)
        slices = [graph.call_method("narrow", (product, -1, s, n)) for s, n in zip(starts, rows, strict=False)]
    made = [*whole, product, *slices]
    for node in made:
        give_value(node, first)
    after = _propagate({c.node: fake_of(s) for c, s in zip(calls, slices, strict=True)})
    if isinstance(after, str):
        for node in reversed(made):
            graph.erase_node(node)
        return after
    for call, part in zip(calls, slices, strict=True):
        call.node.replace_all_uses_with(part)
        graph.erase_node(call.node)
        del after[call.node]
    for node, value in after.items():
        node.meta[VALUE] = value
    return ""


def _propagate(changed: dict[fx.Node, Any]) -> dict[fx.Node, Any] | str:
    """The new fake values of `changed` and of the nodes whose strides follow; or a reason against the change: a view becomes a copy or
    an error, a graph output gets other strides than in the model's own code, or a node cannot be evaluated again."""
    found, mode = dict(changed), next(iter(changed.values())).fake_mode
    # An autocast region inside the graph changes dtypes.
    if any(facts_of(node.meta.get(VALUE))[0] != facts_of(value)[0] for node, value in changed.items()):
        return "its shape or dtype would differ"
    pending = [user for node in changed for user in node.users]
    heapify(pending)
    while pending:
        node = heappop(pending)
        if pending and pending[0] is node:
            continue
        if node.op == "output":
            return "it is returned, or a view of it is"
        try:
            with mode, enable_python_dispatcher():
                value = _run(node, found)
        except Exception as e:
            return f"{node.name} fails with the new strides: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        if isinstance(value, str):
            return value
        before, inputs = node.meta.get(VALUE), node.all_input_nodes
        aliased = set(storages(before)).intersection(storages([n.meta.get(VALUE) for n in inputs]))
        if aliased and set(storages(value)).isdisjoint(storages([found.get(n, n.meta.get(VALUE)) for n in inputs])):
            return f"{node.name} would copy it"
        (old, old_strides), (new, new_strides) = facts_of(before), facts_of(value)
        if old != new:
            return f"{node.name} would get another shape or dtype"
        if old_strides != new_strides:
            found[node] = value
            for user in node.users:
                heappush(pending, user)
    return found


def _run(node: fx.Node, found: dict[fx.Node, Any]) -> Any:
    if _unbacked(node.meta.get(VALUE)) - _unbacked([n.meta.get(VALUE) for n in node.all_input_nodes]):
        return f"{node.name} creates an unbacked size"
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: found.get(n, n.meta.get(VALUE)), (node.args, dict(node.kwargs)))
    if node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
        target: Any = node.target
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return f"{node.name} is not a function or method call"


def _unbacked(value: Any) -> set[Any]:
    return {s for x in pytree.tree_leaves(value) if isinstance(x, (Tensor, torch.SymInt)) for s in free_unbacked_symbols(x)}


def facts_of(value: Any) -> tuple[list[Any], list[Any]]:
    """Shapes, dtypes and devices of tensors, and other values; strides and offsets of tensors."""
    leaves = pytree.tree_leaves(value)
    metadata = [(tuple(map(str, x.shape)), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in leaves]
    return metadata, [(tuple(map(str, x.stride())), str(x.storage_offset())) for x in leaves if isinstance(x, Tensor)]
