"""Splits a traced model into parts, at calls that may not be captured, where a graph ends, and at
calls of attention."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..core.errors import NotCapturable, fail
from ..core.fx_effects import comparable, equal_calls, may_write, storages
from ..core.kernel import Kernel
from ..core.precompile import begin
from ..core.private_torch import OpOverloadPacket
from ..core.select import parse_policy
from ..ops import OPS
from .graph_breaks import DATA, Break, break_of, depends_on_data, kernel_of

# Nodes that launch no kernel may go to either side of a break, and allocations before it.
_ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided}
_ALLOCATING = {"new_empty", "new_empty_strided"}
_FREE = {operator.getitem, torch.sym_max, torch.sym_min, torch.sym_not, torch._check}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_VIEWING = {
    "size",
    "view",
    "narrow",
    "reshape",
    "unflatten",
    "flatten",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "stride",
    "dim",
    "numel",
}


Cut = Break | str
"""A call that ends a graph, or one of attention, `op.kernel`, that only bounds compiled pieces."""


@dataclass(frozen=True)
class Part:
    """A part of the model: an attention call or several, which are captured but not compiled; calls
    that may not be captured; or a piece.

    module: a submodule of the split model. It returns a tuple, also of one value, where the split
    model reads the value itself.
    """

    name: str
    module: fx.GraphModule
    breaks: tuple[Break, ...]
    calls: tuple[str, ...] = ()

    @property
    def captured(self) -> bool:
        return not self.breaks

    @property
    def compiled(self) -> bool:
        return not self.breaks and not self.calls


@dataclass(frozen=True)
class Split:
    """A model in parts. module: calls the parts, which are its submodules, in order."""

    module: fx.GraphModule
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        lines = []
        for part in self.parts:
            what = (
                f"{len(operations(part.module))} operations"
                if part.compiled
                else ", ".join(map(str, part.breaks or part.calls))
            )
            lines.append(f"{part.name}: {'captured, ' if part.captured else ''}{what}")
        return "\n".join(lines)


def value_of(x: Any) -> Any:
    """The fake value of a node; any other `x` itself."""
    return x.meta.get("example_value", x.meta.get("val")) if isinstance(x, fx.Node) else x


def operations(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that launch kernels or allocate."""
    return [
        n
        for n in module.graph.nodes
        if n.op not in ("placeholder", "output", "get_attr") and not _free(n)
    ]


def fusible(module: fx.GraphModule) -> bool:
    """Has a compiler anything to do: is there an operation of torch's own? Views, sizes,
    allocations and calls of kernels are none."""
    return not all(
        _allocates(node) or _views(node) or _calls_kernel(node) for node in operations(module)
    )


def _views(node: fx.Node) -> bool:
    """Is the result a part of the memory of an argument, of which the operation writes nothing?"""
    made = {*storages(value_of(node))}
    return (
        bool(made)
        and not may_write(node)
        and made <= {s for x in node.all_input_nodes for s in storages(value_of(x))}
    )


def _kernel_call(node: fx.Node) -> tuple[Kernel | None, Any, Any]:
    """The kernel that a node calls, if any, and the values of its arguments."""
    args, kwargs = pytree.tree_map_only(fx.Node, value_of, (node.args, dict(node.kwargs)))
    kernel = kernel_of(node.target, args, kwargs) if node.op == "call_function" else None
    return kernel, args, kwargs


def _calls_kernel(node: fx.Node) -> bool:
    kernel, *_ = _kernel_call(node)
    return kernel is not None and kernel.inline is None


def split(gm: fx.GraphModule, eager: Collection[str] = ()) -> Split:
    """Split a graph as Dynamo gives it to a backend, in place. Neighbouring parts are of different
    kinds. eager: ops to keep out of graphs.

    Calls get the policy that forces the chosen kernel, equal metadata calls are merged, and
    allocations move before breaks. Raises NoKernel, and NotCapturable if the size or value of a
    result depends on data: a replay would return that of the capture.
    """
    _check_results(gm.graph)
    begun: set[Any] = set()
    cuts = {node: cut for node in gm.graph.nodes if (cut := _cut(node, eager, begun)) is not None}
    # A compiler of one layer's piece cannot see that other layers compute the same metadata.
    for node, earlier in reversed(equal_calls(gm.graph, value_of).items()):
        node.replace_all_uses_with(earlier)
        cuts.pop(node, None)
        gm.graph.erase_node(node)
    _hoist_allocations(gm.graph, cuts)
    where = _partition(gm.graph, cuts)
    _repeat_sizes(gm.graph, where)
    from torch.fx.passes.split_module import split_module

    whole = split_module(gm, gm, lambda node: where[node], keep_original_order=True)
    listed: defaultdict[str, list[Cut]] = defaultdict(list)
    for node, cut in cuts.items():
        by_part = listed[f"submod_{where[node]}"]
        # Sizes, and assertions about them, belong to the call that makes them.
        is_call = isinstance(cut, str) or cut.why != DATA or isinstance(value_of(node), Tensor)
        if is_call or not by_part:
            by_part.append(cut)
    calls = whole.graph.find_nodes(op="call_module")
    parts = (_part(node.target, getattr(whole, node.target), listed[node.target]) for node in calls)
    return Split(whole, tuple(parts))


def _check_results(graph: fx.Graph) -> None:
    """Raise NotCapturable where the graph returns what depends on data."""
    for node in graph.output_node().all_input_nodes:
        # A returned float leaves the trace as a tensor, from which Dynamo reads it after the graph.
        read = node.all_input_nodes if node.target is torch.scalar_tensor else []
        if any(depends_on_data(value_of(n)) for n in (node, *read)):
            why = "its size or value depends on data; return tensors of fixed sizes"
            fail(NotCapturable, str(node), f"the model returns it, and {why}")


def _part(name: str, module: fx.GraphModule, cuts: list[Cut]) -> Part:
    end = module.graph.output_node()
    if not isinstance(end.args[0], tuple):
        end.args = (end.args,)
        module.recompile()
    breaks = tuple(cut for cut in cuts if isinstance(cut, Break))
    return Part(name, module, breaks, tuple(cut for cut in cuts if isinstance(cut, str)))


def _hoist_allocations(graph: fx.Graph, cuts: Mapping[fx.Node, Cut]) -> None:
    # A buffer that a break writes must be allocated in the graph before it, which fixes its
    # address. Between two breaks an allocation would make an empty graph.
    for node in list(graph.nodes):
        if not _allocates(node):
            continue
        before, at, first = set(node.all_input_nodes), node.prev, None
        while at not in before and (isinstance(cuts.get(at), Break) or _free(at) or _allocates(at)):
            first = at if at in cuts else first
            at = at.prev
        if first is not None:
            first.prepend(node)


def _allocates(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _ALLOCATIONS) or (
        node.op == "call_method" and node.target in _ALLOCATING
    )


def _cut(node: fx.Node, eager: Collection[str], begun: set[Any]) -> Cut | None:
    """The cut at a node, if any.

    A call of an attnops op gets the policy that forces the chosen kernel, for all sizes of the
    trace. The kernel begins to build what it will wait for. begun: calls of which it has.
    """
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    _name_overload(node)
    kernel, args, kwargs = _kernel_call(node)
    if kernel is not None:
        _build(kernel, args, kwargs, begun)
        if getattr(node.target, "_overloadname", "") == "default":
            forced = (f"{kernel.op}:{kernel.name}",)
            policy = replace(parse_policy(kwargs.get("policy", "")), kernel=forced)
            node.kwargs = {**node.kwargs, "policy": policy.key}
    if (found := break_of(node.target, kernel, eager)) is not None:
        return found
    if any(depends_on_data(value_of(n)) for n in (*node.all_input_nodes, node)):
        target = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        return Break(name, "", DATA)
    return None if kernel is None or _fuses(kernel) else f"{kernel.op}.{kernel.name}"


def _name_overload(node: fx.Node) -> None:
    """Have the node call an overload in place of an op, where there is but one to call."""
    packet: Any = node.target
    if not isinstance(packet, OpOverloadPacket):
        return
    # All overloads of an attnops op have one schema.
    ours = packet._qualified_op_name.startswith("attnops::")
    if ours or packet.overloads() == ["default"]:
        node.target = packet.default


def _build(kernel: Kernel, args: Any, kwargs: Any, begun: set[Any]) -> None:
    """Begin to build what a call of the kernel will wait for, once for equal calls."""
    if (
        kernel.ahead is not None
        and (call := (kernel.op, comparable((args, kwargs), str))) not in begun
    ):
        begun.add(call)
        begin(kernel, OPS[kernel.op].call(*args, **kwargs))


def _fuses(kernel: Kernel) -> bool:
    """May its call be within a compiled piece? So may one whose torch ops are inlined."""
    inlined = kernel.inline is not None and kernel.inline.when is None
    return inlined or not OPS[kernel.op].per_layer


def _free(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWING
    if node.op != "call_function":
        return node.op == "get_attr"
    if node.target is operator.getitem and isinstance(value_of(node.args[0]), Tensor):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(i is None or i is ... or isinstance(i, (int, slice)) for i in index)
    return node.target in _FREE or isinstance(value_of(node), _NUMBERS)


def _takes_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(value_of(node.args[0]), (tuple, list))


def _partition(graph: fx.Graph, cuts: Mapping[fx.Node, Cut]) -> dict[fx.Node, int]:
    """The part of every node. A node that launches no kernel joins the two calls around it, or else
    the part that needs it."""
    where: dict[fx.Node, int] = {}
    part, kind = 0, ""
    pending: list[fx.Node] = []

    def put(nodes: list[fx.Node]) -> None:
        where.update(dict.fromkeys(nodes, part))
        pending.clear()

    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _takes_item(node):
            # Only tensors cross between parts, because their addresses can be static; tuples do
            # not.
            if node.args[0] in where:
                where[node] = where[node.args[0]]
            else:
                pending.append(node)
            continue
        # A node that launches no kernel may join the part after it. A compiled part keeps all of
        # its nodes.
        joins = kind != "compiled" and (_free(node) or (kind == "call" and _allocates(node)))
        if node not in cuts and joins:
            pending.append(node)
            continue
        found = {Break: "break", str: "call"}.get(type(cuts.get(node)), "compiled")
        if found != kind:
            if (kind, found) == ("call", "break"):
                # An allocation among the pending nodes must be captured.
                put(pending)
            part += bool(kind)
            kind = found
        put([*pending, node])
    put(pending)
    return where


def _repeat_sizes(graph: fx.Graph, where: dict[fx.Node, int]) -> None:
    """Compute sizes that follow from other sizes in every part that uses them: as inputs they would
    make pieces of equal layers differ."""
    copies: dict[tuple[fx.Node, int], fx.Node] = {}
    known = {
        node
        for node in where
        if isinstance(value_of(node), _NUMBERS) and not depends_on_data(value_of(node))
    }
    numbers = {
        n
        for n in known
        if n.op == "call_function"
        and all(isinstance(value_of(x), _NUMBERS) for x in n.all_input_nodes)
    }

    def of_its_part(user: fx.Node) -> None:
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), functools.partial(copied, user)
        )

    def copied(user: fx.Node, number: fx.Node) -> fx.Node:
        part = where[user]
        if number not in numbers:
            return number
        if (number, part) not in copies:
            with graph.inserting_before(user):
                copy = copies[number, part] = graph.node_copy(number)
            where[copy] = part
            of_its_part(copy)
        return copies[number, part]

    for node in list(graph.nodes):
        if node in where and node not in numbers:
            of_its_part(node)
    for node in reversed(graph.nodes):
        if node in numbers and not node.users:
            graph.erase_node(node)
