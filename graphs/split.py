"""Cuts a traced model at the calls that may not be captured, and at those of attention. What it gives is data: parts in order, each named
by what goes in and out.

The first kind of cut is for the device: a graph ends there. The second is for the compiler, to which the stretches between are alike; a
graph goes on over it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..kernel import Kernel
from .boundary import DATA, Break, break_of, is_cut, kernel_of, pinned
from .once import make_once

# What starts no kernel may stand on either side of a boundary, and an allocation before it.
_ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided}
_ALLOCATING = {"new_empty", "new_empty_strided"}
_FREE = {operator.getitem, torch.sym_max, torch.sym_min, torch.sym_not, torch._check}
_VIEWING = {"size", "view", "reshape", "unflatten", "flatten", "transpose", "unsqueeze", "squeeze", "expand", "stride", "dim", "numel"}


@dataclass(frozen=True)
class Part:
    """A stretch of the model. module: takes the values named `inputs` and returns a tuple of those named `outputs`.

    breaks: the calls in it that may not be captured; `()` says that it is captured.
    calls: those in it that are captured as they are, `op.kernel`; `()` says that it is compiled, unless it is not captured.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    breaks: tuple[Break, ...]
    calls: tuple[str, ...] = ()

    @property
    def captured(self) -> bool:
        """Does it lie in a graph?"""
        return not self.breaks

    @property
    def compiled(self) -> bool:
        """Is it a piece, for the compiler?"""
        return not self.breaks and not self.calls

    @property
    def examples(self) -> list[Any]:
        """The fake tensors and symbolic sizes that stand for its inputs."""
        return [value_of(n) for n in self.module.graph.nodes if n.op == "placeholder"]


@dataclass(frozen=True)
class Split:
    """A model in parts. inputs: names of the flat arguments in order. results: the structure returned, of names' placeholders."""

    inputs: tuple[str, ...]
    parts: tuple[Part, ...]
    constants: dict[str, Any]
    results: Any

    def __str__(self) -> str:
        lines = []
        for part in self.parts:
            what = f"{operations(part.module)} operations" if part.compiled else ", ".join(map(str, part.breaks or part.calls))
            lines.append(f"{part.name}: {'captured, ' if part.captured else ''}{what}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Name:
    """Stands for a value of this name."""

    name: str


def value_of(x: Any) -> Any:
    """The fake value that a node stands for, or `x` itself."""
    return x.meta.get("example_value", x.meta.get("val")) if isinstance(x, fx.Node) else x


def operations(module: fx.GraphModule) -> int:
    """Nodes that are neither inputs nor outputs nor free."""
    return sum(n.op not in ("placeholder", "output", "get_attr") and not _free(n) for n in module.graph.nodes)


def starts_work(module: fx.GraphModule) -> bool:
    """Is there anything to compile: more than views, sizes and allocations?"""
    return any(n.op not in ("placeholder", "output", "get_attr") and not _free(n) and not _allocates(n) for n in module.graph.nodes)


def split(gm: fx.GraphModule, eager: Collection[str] = ()) -> Split:
    """Cut `gm`, which is changed: kernels decided for here are forced on their calls, metadata are made once, and allocations move before
    the boundaries.

    Args:
        gm: a graph as Dynamo hands it to a backend, with fake values.
        eager: names of further ops that shall not be captured.

    Returns:
        Parts, of which neighbours are never both compiled, both calls, or both not captured.

    Raises:
        NoKernel: an op that no kernel can run.
    """
    breaks: dict[fx.Node, Break] = {}
    calls: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        kernel, found = _decided(node, eager)
        if found is not None:
            breaks[node] = found
        elif kernel is not None and is_cut(kernel):
            calls[node] = f"{kernel.op}.{kernel.name}"
    for node in reversed(make_once(gm.graph, value_of)):
        breaks.pop(node, None)
        gm.graph.erase_node(node)
    _raise_allocations(gm.graph, breaks)
    where = _partition(gm.graph, breaks, calls)
    _repeat_numbers(gm.graph, where)
    from torch.fx.passes.split_module import split_module

    whole = split_module(gm, gm, lambda node: where[node], keep_original_order=True)
    by_part: dict[str, list[Break]] = {}
    for node, found in breaks.items():
        told = by_part.setdefault(f"submod_{where[node]}", [])
        # Sizes and assertions about them go with the call that they are of.
        if not told or found.kernel or found.why != DATA or isinstance(value_of(node), Tensor):
            told.append(found)
    called: dict[str, list[str]] = {}
    for node, name in calls.items():
        called.setdefault(f"submod_{where[node]}", []).append(name)
    return _described(whole, by_part, called)


def _raise_allocations(graph: fx.Graph, breaks: dict[fx.Node, Break]) -> None:
    # A buffer that a boundary op writes has to be of the graph before it, where its address is fixed; and it may not stand between two
    # boundaries, where it would make a graph of nothing.
    for node in list(graph.nodes):
        if not _allocates(node):
            continue
        before, at, first = set(node.all_input_nodes), node.prev, None
        while at not in before and (at in breaks or _free(at) or _allocates(at)):
            first = at if at in breaks else first
            at = at.prev
        if first is not None:
            first.prepend(node)


def _allocates(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _ALLOCATIONS) or (node.op == "call_method" and node.target in _ALLOCATING)


def _decided(node: fx.Node, eager: Collection[str]) -> tuple[Kernel | None, Break | None]:
    """The kernel that a call of ours runs, which is forced on it; and why a call may not be captured, if so."""
    if node.op in ("placeholder", "output", "get_attr"):
        return None, None
    if isinstance(node.target, torch._ops.OpOverloadPacket) and (node.target.overloads() == ["default"] or _is_ours(node.target)):
        # A call by the op's name alone. Ours have an overload a kernel, all of one schema.
        node.target = node.target.default
    args, kwargs = pytree.tree_map_only(fx.Node, value_of, (node.args, dict(node.kwargs)))
    kernel = kernel_of(node.target, args, kwargs) if node.op == "call_function" else None
    if kernel is not None and getattr(node.target, "_overloadname", "") == "default":
        node.kwargs = {**node.kwargs, "policy": pinned(kernel, kwargs.get("policy", ""))}
    if (found := break_of(node.target, kernel, eager)) is not None:
        return kernel, found
    if any(map(_depends_on_data, (*node.all_input_nodes, node))):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return kernel, Break(name, "", DATA)
    return kernel, None


def _is_ours(packet: Any) -> bool:
    return bool(packet._qualified_op_name.startswith("attnops::"))


def _depends_on_data(node: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    found = pytree.tree_leaves(value_of(node))
    return any(bool(free_unbacked_symbols(v)) for v in found if isinstance(v, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)))


def _free(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWING
    if node.op != "call_function":
        return node.op == "get_attr"
    if node.target is operator.getitem and isinstance(value_of(node.args[0]), Tensor):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(i is None or i is ... or isinstance(i, (int, slice)) for i in index)
    return node.target in _FREE or isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _partition(graph: fx.Graph, breaks: Collection[fx.Node], calls: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The part of every node. What is free between two calls joins them, and what else is free goes where it is."""
    where: dict[fx.Node, int] = {}
    part = 0
    kind: Literal["compiled", "call", "break"] | None = None
    waiting: list[fx.Node] = []

    def put(nodes: list[fx.Node]) -> None:
        where.update(dict.fromkeys(nodes, part))
        waiting.clear()

    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and isinstance(value_of(node.args[0]), (tuple, list)):
            # What crosses between parts are tensors, whose addresses can be fixed, and no tuples of them.
            if node.args[0] in where:
                where[node] = where[node.args[0]]
            else:
                waiting.append(node)
            continue
        if node not in breaks and node not in calls and _joins(node, kind):
            waiting.append(node)
            continue
        found: Literal["compiled", "call", "break"] = "break" if node in breaks else "call" if node in calls else "compiled"
        if found != kind:
            if kind == "call" and found == "break":
                # An allocation among them has to be of the graph.
                put(waiting)
            part += kind is not None
            kind = found
        put([*waiting, node])
    put(waiting)
    return where


def _joins(node: fx.Node, kind: str | None) -> bool:
    """May it belong to the part that follows? In a compiled part the compiler is given all there is."""
    return kind != "compiled" and (_free(node) or (kind == "call" and _allocates(node)))


def _repeat_numbers(graph: fx.Graph, where: dict[fx.Node, int]) -> None:
    """Sizes that follow from sizes are worked out by every part that asks for them, where it first does.

    Handed on, or in the place where the whole model first does, they would tell one layer from others that are like it.
    """
    copies: dict[tuple[fx.Node, int], fx.Node] = {}
    numbers = {node for node in where if _is_size(node)}

    def of_its_part(user: fx.Node) -> None:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), functools.partial(copied, user))

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


def _is_size(node: fx.Node) -> bool:
    """A number made of numbers that are known on the host."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    made = node.op == "call_function" and isinstance(value_of(node), numbers) and not _depends_on_data(node)
    return made and all(isinstance(value_of(n), numbers) for n in node.all_input_nodes)


def _described(whole: fx.GraphModule, breaks: dict[str, list[Break]], calls: dict[str, list[str]]) -> Split:
    inputs: list[str] = []
    parts: list[Part] = []
    constants: dict[str, Any] = {}
    results: Any = ()
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr":
            constants[node.name] = operator.attrgetter(node.target)(whole)
        elif node.op == "call_module":
            module = getattr(whole, node.target)
            given, made = tuple(a.name for a in node.args), _outputs(node, module)
            parts.append(Part(node.target, module, given, made, tuple(breaks.get(node.target, ())), tuple(calls.get(node.target, ()))))
        elif node.op == "output":
            results = pytree.tree_map_only(fx.Node, lambda n: Name(n.name), node.args[0])
    return Split(tuple(inputs), tuple(parts), constants, results)


def _outputs(node: fx.Node, module: fx.GraphModule) -> tuple[str, ...]:
    """The names of what a part returns; the part is made to return a tuple."""
    [end] = [n for n in module.graph.nodes if n.op == "output"]
    if end.args[0] is None:
        end.args = ((),)
    elif not isinstance(end.args[0], (tuple, list)):
        end.args = ((end.args[0],),)
        module.recompile()
        return (node.name,)
    module.recompile()
    named = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
    return tuple(named.get(i, f"{node.name}_unused_{i}") for i in range(len(end.args[0])))
