"""`fuse_linears`: linears that share an input and whose weights lie one behind the other become one matrix product."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.nn.functional import linear

from ..traced import may_write
from .beside import ALIGNED, Row, can_guard, guard, source_of
from .restride import VALUE, follow

log = logging.getLogger("attnops.lowering")


@dataclass(frozen=True)
class Fused:
    """Linears that could be one. weights: the names of the graph's inputs, in the order they lie; rows: of each.

    left: why they were left alone; empty: they were not.
    """

    weights: tuple[str, ...]
    rows: tuple[int, ...]
    left: str = ""

    def __str__(self) -> str:
        return f"{' + '.join(f'{w} [{n}]' for w, n in zip(self.weights, self.rows, strict=True))}{': left, ' * bool(self.left)}{self.left}"


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def fuse_linears(graph: fx.Graph | fx.GraphModule) -> tuple[Fused, ...]:
    """Replace linears of one input by one over their weights together, and them by slices of its result.

    `attnops.nn.pack_linears` lays weights so that there is something to find. Nothing is copied: the weights are read as one tensor
    through the first. This holds while they lie so; the code that is being compiled is guarded by it, and is compiled anew where it fails.

    Args:
        graph: as Dynamo hands it to a backend or to Inductor's `pre_grad_custom_pass`, with fake values and sources. Changed in place.

    Returns:
        What was fused, and what was found and left alone with the reason, in the order of the graph.

    Groups are left alone whose weights need a gradient, may be written by the graph or are no parameters; whose results would come with
    other strides out of the graph, or be copied where a view was; and all where nothing can be guarded, as outside of torch.compile.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    told: list[Fused] = []
    rows: list[Row] = []
    there = _Graph(graph)
    for calls in _groups(graph):
        parameters = [[c.weight for c in calls], *([[c.bias for c in calls if c.bias is not None]] if calls[0].bias is not None else [])]
        left = _against(there, parameters) or _fuse(graph, calls)
        if not left:
            rows += [Row(tuple(map(source_of, nodes)), tuple(_fake(n).nbytes for n in nodes)) for nodes in parameters]
        told.append(Fused(tuple(c.weight.name for c in calls), tuple(_fake(c.weight).shape[0] for c in calls), left))
        log.info("%s", told[-1])
    if rows:
        graph.lint()
        if graph.owning_module is not None:
            graph.owning_module.recompile()
        guard(rows)
    return tuple(told)


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
        if _is_plain(weight) and (bias is None or (isinstance(bias, fx.Node) and _is_plain(bias))):
            yield _Call(node, x, weight, bias)


def _is_plain(node: fx.Node) -> bool:
    fake = _fake(node)
    # Inductor may copy any other input before a CUDA graph, and behind the copy lies nothing.
    static = node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return (
        static and isinstance(fake, torch.nn.Parameter) and fake.layout == torch.strided and fake.is_contiguous()
        and all(isinstance(n, int) for n in (*fake.shape, fake.storage_offset()))
    )  # fmt: skip


def _groups(graph: fx.Graph) -> list[list[_Call]]:
    """Calls of one input between which nothing is written, whose weights, and biases if any, lie one behind the other, in that order."""
    writes, before = 0, {}
    for node in graph.nodes:
        writes += may_write(node)
        before[node] = writes
    alike: dict[Any, dict[fx.Node, _Call]] = {}
    for call in _calls(graph):
        weight = _fake(call.weight)
        key = (call.x, before[call.node], weight.untyped_storage()._cdata, weight.shape[1:], weight.dtype, call.bias is None)
        alike.setdefault(key, {}).setdefault(call.weight, call)
    found = []
    for calls in alike.values():
        row: list[_Call] = []
        for call in sorted(calls.values(), key=lambda c: int(_fake(c.weight).storage_offset())):
            if row and not _beside(row[-1], call):
                found.append(row)
                row = []
            row.append(call)
        found.append(row)
    return [row for row in found if len(row) > 1]


def _beside(a: _Call, b: _Call) -> bool:
    pairs = [(a.weight, b.weight)] if a.bias is None or b.bias is None else [(a.weight, b.weight), (a.bias, b.bias)]
    return all(_follows(_fake(one), _fake(other)) for one, other in pairs)


def _follows(a: Tensor, b: Tensor) -> bool:
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.dtype == b.dtype
    return same and a.storage_offset() + a.numel() == b.storage_offset()


class _Graph:
    """What is asked of the whole graph for every group: looked up once, as there are as many groups as layers."""

    def __init__(self, graph: fx.Graph) -> None:
        self.switches_grad = any(n.target is torch._C._set_grad_enabled and n.args[0] for n in graph.nodes)
        self.inputs_in: dict[int, list[fx.Node]] = {}
        for node in graph.find_nodes(op="placeholder"):
            if isinstance(fake := _fake(node), Tensor):
                self.inputs_in.setdefault(fake.untyped_storage()._cdata, []).append(node)


def _against(graph: _Graph, parameters: Sequence[Sequence[fx.Node]]) -> str:
    """Why these may not be read as one; empty: nothing is against it."""
    nodes = [n for row in parameters for n in row]
    if not can_guard() or any(source_of(n) is None for n in nodes):
        return "nothing can be guarded here"
    if any(_fake(n).requires_grad for n in nodes) and (torch.is_grad_enabled() or graph.switches_grad):
        return "the weights need a gradient"
    if any(_fake(row[0]).storage_offset() * _fake(row[0]).element_size() % ALIGNED for row in parameters):
        return f"the first does not begin at {ALIGNED} bytes"
    for storage in dict.fromkeys(_fake(n).untyped_storage()._cdata for n in nodes):
        for node in graph.inputs_in[storage]:
            # What is written through one input is seen through the others only if they overlap, which these do not.
            if not all(_only_multiplies(user, node) for user in node.users):
                return f"{node.name} lies there too, and is used by more than linears"
    return ""


def _only_multiplies(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is torch.as_strided:  # of an earlier group
        return all(_only_multiplies(n, user) for n in user.users)
    return user.target is linear and weight is not user.kwargs.get("input", user.args[0] if user.args else None)


def _fuse(graph: fx.Graph, calls: list[_Call]) -> str:
    """Why this would not do; empty: it is done."""
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
        # As Dynamo does: the C++ of some ops would ask symbolic sizes for their values.
        with mode, enable_python_dispatcher():
            args = [_fake(a) if isinstance(a, fx.Node) else a for a in node.args]
            node.meta[VALUE] = getattr(args[0], node.target)(*args[1:]) if isinstance(node.target, str) else node.target(*args)
    after = follow({c.node: _fake(s) for c, s in zip(calls, slices, strict=True)})
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
