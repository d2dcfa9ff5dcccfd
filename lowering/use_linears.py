"""`use_linears`: a linear with the RMS norm before it, the gated activation and the residual after it becomes one call of `linear`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import Guard, TracingContext
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.nn.functional import linear

from ..call import check, split
from ..errors import find, one_line
from ..ops.linear import LINEAR, Linear
from ..problem import Extent, altered
from ..select import Decision, active_policy, select
from .fuse_linears import facts_of, fake_of, finish, give_value, linear_arguments, source_of
from .linear_parts import Match, match_linear

log = logging.getLogger("attnops.lowering")

ROWS = 64
"""The most rows of a product that a kernel other than torch's own serves."""


@dataclass(frozen=True)
class Product:
    """A linear of a graph, and what became of it.

    weight: the name of the graph input; of fused linears, the first's.
    parts: what one call computes, in order: "norm", "linear", the activation, "residual". Empty where the linear was not looked at.
    kernel: of the call. "aten": torch's own operations are the fastest, and the graph keeps them.
    refusal: why the linear, or a part beside it, was left as it is; "" where all became one call.
    """

    weight: str
    parts: tuple[str, ...] = ()
    kernel: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        done = f"{' + '.join(self.parts)} by {self.kernel}" if self.kernel else "left as it is"
        return f"{self.weight}: {done}" + (f"; {self.refusal}" if self.refusal else "")


def summary(products: Iterable[Product]) -> tuple[str, ...]:
    """Lines on the linears of a model, equal ones of all layers and traces once; no line without any."""
    found = tuple(dict.fromkeys(products))
    taken = Counter(f"{' + '.join(p.parts)} by {p.kernel}" for p in found if p.kernel)
    left = Counter(p.refusal for p in found if p.refusal)
    lines = {
        f"linears of compiled layers, {sum(taken.values())} of {len(found)} recognised": taken,
        "parts or linears left as they are": left,
    }
    return tuple(f"{line}: {', '.join(f'{n} {what}' for what, n in counts.items())}" for line, counts in lines.items() if counts)


def use_linears(graph: fx.Graph | fx.GraphModule) -> tuple[Product, ...]:
    """Replace linears, with the RMS norm before and the gated activation and residual after them, by calls of `attnops::linear`.

    Where torch's own operations are the fastest kernel, as on a CPU and for long prompts, the graph stays as it is. Where another kernel
    is faster for few rows, a graph of any number of rows is guarded on their number. The policy in force is guarded, too.

    Args:
        graph: as Dynamo gives it to a backend or to Inductor's `pre_grad_custom_pass`, after `fuse_linears`. Changed in place.

    Returns:
        Every linear of the graph, in order. It is left as it is in grad mode and under autocast; where its weight is no parameter, of a
        tensor subclass, or in an adapter; where dtypes differ; and where the graph writes one of its inputs in between. A part is left
        where its value has another user, and the rounding of a norm must be that of float32.
    """
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    linears = graph.find_nodes(op="call_function", target=linear)
    against = _against(graph) if linears else ""
    found: list[Product] = []
    for node in linears:
        found.append(Product(_weight(node), refusal=against) if against else _use(graph, node))
        log.info("%s", found[-1])
    if any(p.parts for p in found):
        finish(graph)
        source = next(source for n in graph.find_nodes(op="placeholder") if (source := source_of(n)) is not None)
        TracingContext.get().guards_context.dynamo_guards.add(Guard(source, partial(_guard, key=active_policy())))
    return tuple(found)


def _guard(builder: Any, guard: Any, *, key: str) -> None:
    """Guard the policy: a graph without other calls of attnops does not read it."""
    code = [f"active_policy() == {key!r}"]
    builder.add_python_lambda_leaf_guard_to_root(code, [f"{code[0]}  # kernels of linears"], {"active_policy": active_policy})


def _against(graph: fx.Graph) -> str:
    """The reason against all linears of the graph, or ""."""
    if TracingContext.try_get() is None:
        return "no guard can be added here"
    if torch.is_grad_enabled() or any(n.args[0] for n in graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)):
        return "grad mode is on"
    within = graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)
    return "autocast is on" if within or torch._C._is_any_autocast_enabled() else ""


def _weight(node: fx.Node) -> str:
    weight = linear_arguments(*node.args, **node.kwargs)[1]
    return str(weight.args[0] if isinstance(weight, fx.Node) and weight.target is torch.as_strided else weight)


def _use(graph: fx.Graph, node: fx.Node) -> Product:
    name, match = _weight(node), match_linear(node)
    if isinstance(match, str):
        return Product(name, refusal=match)
    decision = _decide(match)
    if isinstance(decision, str):
        return Product(name, match.parts, refusal=decision)
    kernel, refusal = decision.kernel, "; ".join(match.left)
    if kernel is None:
        forced = decision.policy.forced("linear")
        why = next((f"{forced}: {refused[0]}" for n, refused in decision.refused.items() if n == forced), "no kernel can run it")
        return Product(name, match.parts, refusal=why)
    if kernel.inline is None:
        policy = replace(decision.policy, kernel=(f"linear:{kernel.name}",)).key
        if why := _replace(graph, match, policy):
            return Product(name, match.parts, refusal=why)
    return Product(name, match.parts, kernel.name, refusal)


def _decide(match: Match) -> Decision | str:
    """The kernel for the call, or the reason why the op does not take it."""
    x, policy = fake_of(match.x), active_policy()
    with x.fake_mode, enable_python_dispatcher():
        given = {name: None if n is None else fake_of(n) for name, n in match.inputs.items()}
        width = fake_of(match.last).shape[-1]
        rows = given["x"] = x.reshape(-1, x.shape[-1])
        if given["residual"] is not None:
            given["residual"] = given["residual"].reshape(-1, width)
        call = Linear(**match.arguments(**given), output=rows.new_empty((rows.shape[0], width)), policy=policy)
        try:
            check(call)
        except Exception as error:
            if (ours := find(error)) is None:
                raise
            return one_line(ours)
        problem = LINEAR.problem(call)
        tokens = problem.sizes.tokens
        # No guard bounds a product of two symbols, as of a batch of prompts.
        if tokens.hi is None and not free_unbacked_symbols(rows) and len(free_symbols(rows.shape[0])) == 1:
            few, many = Extent(tokens.lo, ROWS, min(tokens.hint, ROWS)), Extent(ROWS + 1, None, max(tokens.hint, 2 * ROWS))
            if len({select(altered(problem, tokens=extent), policy).kernel for extent in (few, many)}) > 1:
                bool(rows.shape[0] <= ROWS)  # a guard, which bounds the symbol: graphs of fewer and of more rows are compiled apart
                problem = LINEAR.problem(call)
    return select(problem, policy)


def _replace(graph: fx.Graph, match: Match, policy: str) -> str:
    """Replace the nodes of the match by one call. Returns the reason where the result would differ in more than its numbers, or ""."""
    last, made, value = match.last, list[fx.Node](), fake_of(match.x)

    def add(kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made.append(give_value(graph.create_node(kind, target, args, kwargs), last))
        return made[-1]

    def rows(node: fx.Node | None) -> Any:
        return node if node is None or value.dim() == 2 else add("call_method", "reshape", node, -1, int(fake_of(node).shape[-1]))

    def size(node: fx.Node, dim: int) -> Any:
        known = fake_of(node).shape[dim]
        symbolic = isinstance(known, torch.SymInt) and known.node.maybe_as_int() is None
        return add("call_method", "size", node, dim) if symbolic else int(known)

    with graph.inserting_before(last):
        x, width = rows(match.x), int(fake_of(last).shape[-1])
        # The buffer has two dims, as the op has it: the compiler would read a view that is written from memory again.
        output = add("call_function", torch.empty, (size(x, 0), width), dtype=value.dtype, device=value.device)
        args, kwargs = split(Linear(**match.arguments(x=x, residual=rows(match.residual), output=output, policy=policy)))
        add("call_function", LINEAR.packet.default, *args, **kwargs)
        if value.dim() != 2:
            output = add("call_method", "view", output, *(size(match.x, dim) for dim in range(value.dim() - 1)), width)
    if facts_of(fake_of(output)) != facts_of(fake_of(last)):
        for node in reversed(made):
            graph.erase_node(node)
        return "its result would have other strides"
    last.replace_all_uses_with(output)
    for node in sorted(match.inner, reverse=True):
        graph.erase_node(node)
    return ""
