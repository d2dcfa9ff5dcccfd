"""What the passes share that put one call of an op in place of several nodes: the choice of its
kernel, the call, and the guard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from ..core.errors import find, one_line
from ..core.op import is_lowered
from ..core.private_torch import autocasting, tracing_context
from ..core.problem import Extent, Problem, altered
from ..core.record import check, split
from ..core.select import Decision, active_policy, select
from .graph_tools import (
    NewNodes,
    add_guard,
    facts_of,
    fake_of,
    finish,
    records_gradients,
    source_of,
)
from .inductor import ENTER_AUTOCAST, enable_python_dispatcher
from .matches import BESIDE, Match

ROWS = 64
"""Rows up to which the kernel `triton` of linears serves. Others serve more."""


def against_calls(graph: fx.Graph) -> str:
    """The reason against calls in all of the graph, or ""."""
    if tracing_context() is None:
        return "no guard can be added here"
    if records_gradients(graph):
        return "grad mode is on"
    within = graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    return "autocast is on" if within or autocasting() else ""


def finish_calls(graph: fx.Graph, why: str) -> None:
    """Finish a graph whose calls follow from the policy, which is guarded. why: see `add_guard`."""
    finish(graph)
    # A graph without other calls of attnops does not read the policy.
    known = next(n for n in graph.find_nodes(op="placeholder") if source_of(n) is not None)
    code = [f"active_policy() == {active_policy()!r}"]
    add_guard(known, code, why, active_policy=active_policy)


def fuse(match: Match) -> tuple[str, str]:
    """Put one call in place of the match, unless torch's own operations are the fastest kernel.

    Returns (the kernel, why the nodes or a part beside them have not changed).
    """
    decision = _decide(match)
    if isinstance(decision, str):
        return "", decision
    kernel = decision.kernel
    if kernel is None:
        forced = decision.policy.forced(match.op.name)
        refused = decision.refused.get(forced or "")
        return "", f"{forced}: {refused[0]}" if refused else "no kernel can run it"
    if kernel.inline is None:
        policy = replace(decision.policy, kernel=(f"{match.op.name}:{kernel.name}",)).key
        if why := _replace(match, policy):
            return "", why
    return kernel.name, "; ".join(match.left)


def _decide(match: Match) -> Decision | str:
    """The kernel for the call, or the reason why the op does not take it."""
    x, policy = fake_of(match.x), active_policy()
    with x.fake_mode, enable_python_dispatcher():
        given = {name: None if n is None else fake_of(n) for name, n in match.inputs.items()}
        width = fake_of(match.last).shape[-1]
        order = _order(match)
        rows = given["x"] = x.permute(order).reshape(-1, x.shape[-1])
        for name in BESIDE:
            if (beside := given.get(name)) is not None:
                given[name] = beside.permute(order).reshape(-1, width)
        output = rows.new_empty((rows.shape[0], width))
        call = match.record(**match.arguments(**given), output=output, policy=policy)
        try:
            check(call)
        except Exception as error:
            if (ours := find(error)) is None:
                raise
            return one_line(ours)
        compiled = is_lowered()  # a compiler fuses torch's own ops
        problem = altered(match.op.problem(call), compiled=compiled)
        if _depends(problem, rows, policy):
            bool(rows.shape[0] <= ROWS)  # a guard, which bounds the symbol
            problem = altered(match.op.problem(call), compiled=compiled)
    return select(problem, policy)


def _depends(problem: Problem, rows: Any, policy: str) -> bool:
    """Does the kernel depend on the number of rows, which a guard can bound?"""
    tokens = problem.sizes.tokens
    # No guard bounds a product of two symbols, as of a batch of prompts.
    if tokens.hi is not None or free_unbacked_symbols(rows):
        return False
    if len(free_symbols(rows.shape[0])) != 1:
        return False
    few = Extent(tokens.lo, ROWS, min(tokens.hint, ROWS))
    many = Extent(ROWS + 1, None, max(tokens.hint, 2 * ROWS))
    one, other = (select(altered(problem, tokens=t), policy).kernel for t in (few, many))
    return one != other


def _replace(match: Match, policy: str) -> str:
    """Replace the nodes of the match by one call.

    Returns the reason where the result would differ in more than its numbers, or "".
    """
    last, value, new = match.last, fake_of(match.x), NewNodes(match.last)
    order = _order(match)
    moved = order != sorted(order)

    def rows(node: fx.Node | None) -> Any:
        if node is None or value.dim() == 2:
            return node
        if moved:
            node = new.add("permute", node, order)
        return new.add("reshape", node, -1, int(fake_of(node).shape[-1]))

    def size(node: fx.Node, dim: int) -> Any:
        known = fake_of(node).shape[dim]
        symbolic = isinstance(known, torch.SymInt) and known.node.maybe_as_int() is None
        return new.add("size", node, dim) if symbolic else int(known)

    x, width = rows(match.x), int(fake_of(last).shape[-1])
    # The buffer has two dims, as the op has it: the compiler would read a view that is written from
    # memory again.
    like = {"dtype": value.dtype, "device": value.device}
    output = new.add(torch.empty, (size(x, 0), width), **like)
    beside = {name: rows(match.inputs[name]) for name in BESIDE if name in match.inputs}
    given = match.arguments(x=x, **beside, output=output, policy=policy)
    args, kwargs = split(match.record(**given))
    new.add(match.op.packet.default, *args, **kwargs)
    if value.dim() != 2:
        sizes = [size(match.x, dim) for dim in order[:-1]]
        output = new.add("view", output, *sizes, width)
    if moved:
        output = new.add("permute", output, [order.index(dim) for dim in sorted(order)])
    if facts_of(fake_of(output)) != facts_of(fake_of(last)):
        new.erase()
        return "its result would have other strides"
    last.replace_all_uses_with(output)
    for node in sorted(match.inner, reverse=True):
        node.graph.erase_node(node)
    return ""


def _order(match: Match) -> list[int]:
    """The dims of the input in the order in which they become rows: that of the result in memory,
    where the input lies as it does and no copy is made, else as they are.

    A model that norms its heads after it has transposed them gets them back transposed.
    """
    value, order = fake_of(match.x), _in_memory(fake_of(match.last))
    return order if _in_memory(value) == order else list(range(value.dim()))


def _in_memory(value: torch.Tensor) -> list[int]:
    """The dims in the order in which they lie in memory, as far as that is known and the last one
    stays last."""
    dims, sizes, strides = list(range(value.dim())), value.shape, value.stride()
    if not all(isinstance(n, int) for n in (*sizes, *strides)):
        return dims
    order = sorted(dims[:-1], key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    return order + dims[-1:]
