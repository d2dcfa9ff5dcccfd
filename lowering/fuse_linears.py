"""`fuse_linears`: linears that share an input and whose weights are adjacent in memory become one matrix product."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import Guard, TracingContext
from torch.nn.functional import linear

from ..traced import may_write
from .propagate_strides import VALUE, propagate

log = logging.getLogger("attnops.lowering")

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


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def fuse_linears(graph: fx.Graph | fx.GraphModule) -> tuple[Fused, ...]:
    """Replace linears with one input and adjacent weights by one linear, and each by a slice of its result.

    `attnops.nn.pack_linears` makes weights adjacent. Nothing is copied: an as_strided of the first weight reads all of them. The compiled
    code is guarded on the adjacency.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, with fake values and sources. Changed in place.

    Returns:
        Every group found, in the order of the graph, fused or with the reason against it: its weights need a gradient or may be
        written, the graph's results or views would get other strides, or no guard can be added (outside of torch.compile).
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    found: list[Fused] = []
    adjacent: list[Sequence[fx.Node]] = []
    # Facts of the whole graph, collected once, because there are as many groups as layers.
    switches_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in graph.nodes)
    inputs_in: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(fake := _fake(node), Tensor):
            inputs_in.setdefault(fake.untyped_storage()._cdata, []).append(node)
    for calls in _groups(graph):
        parameters = list(zip(*map(_parameters, calls), strict=True))
        refusal = _refusal(parameters, switches_grad, inputs_in) or _fuse(graph, calls)
        if not refusal:
            adjacent += parameters
        found.append(Fused(tuple(c.weight.name for c in calls), tuple(_fake(c.weight).shape[0] for c in calls), refusal))
        log.info("%s", found[-1])
    if adjacent:
        graph.lint()
        if graph.owning_module is not None:
            graph.owning_module.recompile()
        _guard(adjacent)
    return tuple(found)


def _fake(node: fx.Node) -> Any:
    return node.meta.get(VALUE)


def _calls(graph: fx.Graph) -> Iterator[_Call]:
    names = ("input", "weight", "bias")
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not linear:
            continue
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        x, weight, bias = (given.get(n) for n in names)
        if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(_fake(x), Tensor):
            continue
        if _is_static(weight) and (bias is None or (isinstance(bias, fx.Node) and _is_static(bias))):
            yield _Call(node, x, weight, bias)


def _is_static(node: fx.Node) -> bool:
    fake = _fake(node)
    # Inductor may clone any other input before a CUDA graph, and a clone ends where its input ends.
    static = node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return (
        static and isinstance(fake, torch.nn.Parameter) and fake.layout == torch.strided and fake.is_contiguous()
        and all(isinstance(n, int) for n in (*fake.shape, fake.storage_offset()))
    )  # fmt: skip


def _groups(graph: fx.Graph) -> list[list[_Call]]:
    """Groups of linears with one input, adjacent weights and biases, in that order, and no write between them."""
    writes, before = 0, {}
    for node in graph.nodes:
        writes += may_write(node)
        before[node] = writes
    candidates: dict[Any, dict[fx.Node, _Call]] = {}
    for call in _calls(graph):
        weight = _fake(call.weight)
        shared = (call.x, before[call.node], weight.untyped_storage()._cdata, weight.shape[1:], weight.dtype, call.bias is None)
        candidates.setdefault(shared, {}).setdefault(call.weight, call)
    found: list[list[_Call]] = []
    for calls in candidates.values():
        found.append([])
        for call in sorted(calls.values(), key=lambda c: int(_fake(c.weight).storage_offset())):
            if found[-1] and not all(map(_follows, *(_parameters(c) for c in (found[-1][-1], call)))):
                found.append([])
            found[-1].append(call)
    return [group for group in found if len(group) > 1]


def _parameters(call: _Call) -> list[fx.Node]:
    return [call.weight] if call.bias is None else [call.weight, call.bias]


def _follows(one: fx.Node, other: fx.Node) -> bool:
    a, b = _fake(one), _fake(other)
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.dtype == b.dtype
    return bool(same and a.storage_offset() + a.numel() == b.storage_offset())


def _source(node: fx.Node) -> Any:
    return getattr(node, "_dynamo_source", None)


def _guard(rows: Sequence[Sequence[fx.Node]]) -> None:
    """Guard the frame that Dynamo is compiling: the parameters of every row are adjacent in memory.

    Dynamo guards a parameter's dtype, shape and strides, but not its address: `module.weight.data = other` passes all of its guards.
    This guard compares addresses with each other, not with constants, so layers that share compiled code keep sharing it. It is a guard
    of the frame and runs last: Dynamo skips the guards of a single input while the module dicts that lead to it are unchanged.
    """
    code = []
    for row in rows:
        # A method with torch 2.11, a property with 2.13.
        at = [f"{s.name() if callable(s.name) else s.name}.data_ptr()" for s in map(_source, row)]
        follows = (f"{a} + {_fake(node).nbytes} == {b}" for node, a, b in zip(row, at, at[1:], strict=False))
        code += [f"{at[0]} % {ALIGNED} == 0", *follows]
    # A guard has one source. The first weight's names this one; the check itself looks up all of them.
    TracingContext.get().guards_context.dynamo_guards.add(Guard(_source(rows[0][0]), partial(_create, code=code)))


def _create(builder: Any, guard: Any, *, code: list[str]) -> None:
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{line}  # weights that are read as one" for line in code])


def _refusal(parameters: Sequence[Sequence[fx.Node]], switches_grad: bool, inputs_in: Mapping[int, list[fx.Node]]) -> str:
    """The reason why these may not be read as one, or "". inputs_in: the graph's inputs by storage."""
    nodes = [n for row in parameters for n in row]
    if TracingContext.try_get() is None or any(n.op != "placeholder" or _source(n) is None for n in nodes):
        return "no guard can be added here"
    if any(_fake(n).requires_grad for n in nodes) and (torch.is_grad_enabled() or switches_grad):
        return "the weights need a gradient"
    if any(_fake(row[0]).storage_offset() * _fake(row[0]).element_size() % ALIGNED for row in parameters):
        return f"the first is not aligned to {ALIGNED} bytes"
    for storage in dict.fromkeys(_fake(n).untyped_storage()._cdata for n in nodes):
        for node in inputs_in[storage]:
            # A write through one input is visible through another only if the two overlap, which linears' weights do not.
            if not all(_only_multiplies(user, node) for user in node.users):
                return f"{node.name} shares their storage and has users other than linears"
    return ""


def _only_multiplies(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is torch.as_strided:  # of an earlier group
        return all(_only_multiplies(n, user) for n in user.users)
    return user.target is linear and weight is not user.kwargs.get("input", user.args[0] if user.args else None)


def _fuse(graph: fx.Graph, calls: list[_Call]) -> str:
    """Fuse the calls. Returns the reason where the graph does not allow it, or ""."""
    first = min(c.node for c in calls)
    rows = [int(_fake(c.weight).shape[0]) for c in calls]
    width = int(_fake(calls[0].weight).shape[1])
    with graph.inserting_before(first):
        weight = graph.call_function(torch.as_strided, (calls[0].weight, (sum(rows), width), (width, 1)))
        bias = graph.call_function(torch.as_strided, (calls[0].bias, (sum(rows),), (1,))) if calls[0].bias is not None else None
        product = graph.call_function(linear, (calls[0].x, weight, bias))
        starts = [sum(rows[:i]) for i in range(len(rows))]
        slices = [graph.call_method("narrow", (product, -1, s, n)) for s, n in zip(starts, rows, strict=True)]
    made = [n for n in (weight, bias, product, *slices) if n is not None]
    mode = _fake(calls[0].x).fake_mode
    for node in made:
        node.meta = {k: v for k, v in first.meta.items() if k != VALUE}
        # As Dynamo does: the C++ of some ops specialises symbolic sizes.
        with mode, enable_python_dispatcher():
            args = [_fake(a) if isinstance(a, fx.Node) else a for a in node.args]
            node.meta[VALUE] = getattr(args[0], node.target)(*args[1:]) if isinstance(node.target, str) else node.target(*args)
    after = propagate({c.node: _fake(s) for c, s in zip(calls, slices, strict=True)})
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
