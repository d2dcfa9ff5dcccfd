"""`fuse_norm_linear_pass`: a linear with its norm, activation and residual becomes one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.nn.functional import linear

from ..core.errors import find, one_line
from ..core.op import is_lowered
from ..core.private_torch import autocasting, tracing_context
from ..core.problem import Extent, Problem, altered
from ..core.record import check, split
from ..core.select import Decision, active_policy, select
from ..ops.linear.record import LINEAR, Linear
from .graph_tools import (
    NewNodes,
    add_guard,
    facts_of,
    fake_of,
    finish,
    graph_of,
    log,
    records_gradients,
    source_of,
)
from .inductor import ENTER_AUTOCAST, enable_python_dispatcher
from .linear_parts import Match, match_linear, name_of

ROWS = 64
"""Rows up to which the kernel `triton` serves. Others serve more."""


@dataclass(frozen=True)
class Product:
    """A linear of a graph, and what became of it.

    weight: the name of the graph input; of merged linears, the first's.
    parts: what one call computes, in order: "norm", "linear", the activation, "residual". Empty
        where the linear was not looked at.
    kernel: of the call. "aten": torch's own operations are the fastest, and the graph keeps them.
    refusal: why the linear, or a part beside it, has not changed; "" where all became one call.
    """

    weight: str
    parts: tuple[str, ...] = ()
    kernel: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        done = f"{' + '.join(self.parts)} by {self.kernel}" if self.kernel else "left as it is"
        return f"{self.weight}: {done}" + (f"; {self.refusal}" if self.refusal else "")


def summary(products: Iterable[Product]) -> tuple[str, ...]:
    """Lines on the linears of a model. Equal linears of all layers and traces count once."""
    found = tuple(dict.fromkeys(products))
    taken = Counter(f"{' + '.join(p.parts)} by {p.kernel}" for p in found if p.kernel)
    left = Counter(p.refusal for p in found if p.refusal)
    title = f"linears of compiled layers, {sum(taken.values())} of {len(found)} recognised"
    lines = {title: taken, "parts or linears left as they are": left}
    return tuple(f"{line}: {_listed(counts)}" for line, counts in lines.items() if counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in counts.items())


def fuse_norm_linear_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Product, ...]:
    """Replace linears by calls of `attnops::linear`, which take in the parts beside them.

    The parts are the RMS norm before a linear, and the gated activation and the residual after it.
    Where torch's own operations are the fastest kernel, as on a CPU and for long prompts that a
    compiler fuses, the graph does not change. Where another kernel is faster for few rows, a graph
    of any number of rows is guarded on their number. The policy in force is guarded, too.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, after
            `merge_linears_pass`. Changed in place.

    Returns:
        Every linear of the graph, in order. It does not change in grad mode and under autocast;
        where its weight is no parameter, of a tensor subclass, or in an adapter; where dtypes
        differ; and where the graph writes one of its inputs in between. A part is left where its
        value has another user, and the rounding of a norm must be that of float32.
    """
    graph = graph_of(graph)
    linears = graph.find_nodes(op="call_function", target=linear)
    against = _against(graph) if linears else ""
    found: list[Product] = []
    for node in linears:
        found.append(Product(name_of(node), refusal=against) if against else _fuse(node))
        log.info("%s", found[-1])
    if any(p.parts for p in found):
        finish(graph)
        # A graph without other calls of attnops does not read the policy.
        known = next(n for n in graph.find_nodes(op="placeholder") if source_of(n) is not None)
        code = [f"active_policy() == {active_policy()!r}"]
        add_guard(known, code, "kernels of linears", active_policy=active_policy)
    return tuple(found)


def _against(graph: fx.Graph) -> str:
    """The reason against all linears of the graph, or ""."""
    if tracing_context() is None:
        return "no guard can be added here"
    if records_gradients(graph):
        return "grad mode is on"
    within = graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    return "autocast is on" if within or autocasting() else ""


def _fuse(node: fx.Node) -> Product:
    name, match = name_of(node), match_linear(node)
    if isinstance(match, str):
        return Product(name, refusal=match)
    decision = _decide(match)
    if isinstance(decision, str):
        return Product(name, match.parts, refusal=decision)
    kernel = decision.kernel
    if kernel is None:
        forced = decision.policy.forced("linear")
        refused = decision.refused.get(forced or "")
        why = f"{forced}: {refused[0]}" if refused else "no kernel can run it"
        return Product(name, match.parts, refusal=why)
    if kernel.inline is None:
        policy = replace(decision.policy, kernel=(f"linear:{kernel.name}",)).key
        if why := _replace(match, policy):
            return Product(name, match.parts, refusal=why)
    return Product(name, match.parts, kernel.name, "; ".join(match.left))


def _decide(match: Match) -> Decision | str:
    """The kernel for the call, or the reason why the op does not take it."""
    x, policy = fake_of(match.x), active_policy()
    with x.fake_mode, enable_python_dispatcher():
        given = {name: None if n is None else fake_of(n) for name, n in match.inputs.items()}
        width = fake_of(match.last).shape[-1]
        rows = given["x"] = x.reshape(-1, x.shape[-1])
        if given["residual"] is not None:
            given["residual"] = given["residual"].reshape(-1, width)
        output = rows.new_empty((rows.shape[0], width))
        call = Linear(**match.arguments(**given), output=output, policy=policy)
        try:
            check(call)
        except Exception as error:
            if (ours := find(error)) is None:
                raise
            return one_line(ours)
        compiled = is_lowered()  # a compiler fuses torch's own ops
        problem = altered(LINEAR.problem(call), compiled=compiled)
        if _depends(problem, rows, policy):
            bool(rows.shape[0] <= ROWS)  # a guard, which bounds the symbol
            problem = altered(LINEAR.problem(call), compiled=compiled)
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

    def rows(node: fx.Node | None) -> Any:
        if node is None or value.dim() == 2:
            return node
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
    given = match.arguments(x=x, residual=rows(match.residual), output=output, policy=policy)
    args, kwargs = split(Linear(**given))
    new.add(LINEAR.packet.default, *args, **kwargs)
    if value.dim() != 2:
        sizes = [size(match.x, dim) for dim in range(value.dim() - 1)]
        output = new.add("view", output, *sizes, width)
    if facts_of(fake_of(output)) != facts_of(fake_of(last)):
        new.erase()
        return "its result would have other strides"
    last.replace_all_uses_with(output)
    for node in sorted(match.inner, reverse=True):
        node.graph.erase_node(node)
    return ""
