"""Suite `hybrid`: layers that carry a state, and whole models that have them.

`... step 8x1`: requests of one token each; `... prompt 1x4096`: tokens of one request; `...
training`: a forward and its gradient. The ways are our kernels, `automatic` is the plain op or the
public function, and `direct.fla` flash-linear-attention's own function, which has a gradient.
`error` of a forward is the largest one of output and states as a share of the family's bound. The
gradients are compared with those of torch's own products in float64, as in the suite `training`.
`of_bandwidth` and `of_flops` are shares of the ceilings measured in the same run, for the bytes
that a call must move, states included, and its operations.

`..., first token`: as in the suite `first_token`; `..., step`: as in the suite `decode`. `hf_torch`
and `hf_eager_torch` run where flash-linear-attention is installed: transformers without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors

import attnops.ops
from attnops.bench import Setup, decode, generate, models, training, ways
from attnops.bench.cold import running
from attnops.bench.op_suite import OpSuite
from attnops.bench.ops import call_at, shorter
from attnops.bench.rows import Case, Row, Rows, Way, Ways, time_if_right, with_ratios
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import altered
from attnops.core.select import active_policy, choose, select, use
from attnops.measured import Sizes, work
from attnops.ops import OPS
from attnops.ops.points import Trained
from attnops.testing.calls import Call
from attnops.testing.check import compare, named_results, oracle
from attnops.testing.error_bounds import allowance
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import GRADIENT
from attnops.tune.clock import Timed, kernels_us

SUITE = "hybrid"
EXACT = "aten"
"""The kernel that torch differentiates in float64."""


def sized(point: Any, size: str) -> Any:
    """At the size of the run; None for training by an op without a gradient."""
    if not isinstance(point, Trained):
        return shorter(point, size)
    return training.shorter(point, size) if point.shape.op + GRADIENT in OPS else None


def op_rows(setup: Setup, pool: Pool, op: str, point: Any) -> Rows:
    """Those of a point."""
    rows = training_rows if isinstance(point, Trained) else forward_rows
    return with_ratios(rows(setup, pool, op, point), "fla", "direct.fla", "aten")


# Forward ------------------------------------------------------------------------------------------


def players(call: Call) -> dict[str, Kernel]:
    """The kernels that answer a call, without the judge."""
    known = kernels_of(call.op)
    return {n: k for n, k in known.items() if not (k.judge or k.refusals(call.problem))}


def forward_rows(setup: Setup, pool: Pool, op: str, point: Any) -> Rows:
    """Every kernel that answers, and the choice."""
    call = call_at(point, pool)
    call = call.map(lambda _, t: t.clone())  # a storage of its own for each tensor
    needs = work(point.shape, Sizes(point.batch, point.queries, 1.0))
    want = oracle(call)
    allowed = allowance(call, want)

    def way(run_of: Callable[[Call], Callable[[], Any]], factor: float, **more: str) -> Way:
        def share() -> float:
            return share_of_bound(call, run_of, want, allowed, factor)

        return Way(Timed(run_of(call)), share, more=more)

    known = players(call)
    made: Ways = {n: way(partial(running, k), k.tolerance.factor) for n, k in known.items()}
    chosen = select(call.problem).kernel
    if chosen is not None:
        made["automatic"] = way(plain, chosen.tolerance.factor, kernel=chosen.name)

    def shares(us: float, _: Way) -> Row:
        return setup.shares(us, of_bandwidth=needs.bytes, of_flops=needs.flops)

    clock = partial(kernels_us, setup.device)
    return time_if_right(point.name, made, 0.0, 1.0, clock, _share, shares, own=made)


def _share(got: float, want: float) -> float:
    return got


def plain(call: Call) -> Callable[[], Any]:
    """The op, whose kernel is chosen at the call."""
    return partial(OPS[call.op].packet.default, *call.args, **call.kwargs)


def share_of_bound(
    call: Call,
    run_of: Callable[[Call], Callable[[], Any]],
    want: Mapping[str, Tensor],
    allowed: Mapping[str, Any],
    factor: float,
) -> float:
    """The largest error of a run as a share of the one allowed there. Raises Mismatch above 1."""
    mine = call.map(lambda name, t: _unwritten(t) if name in call.writes else t.clone())
    found = named_results(mine, run_of(mine)(), call.op)
    worst = 0.0
    for name, got in found.items():
        error, most = compare(name, got, want[name], allowed.get(name, 0.0), factor)
        worst = max(worst, error / most if most else 0.0)
    return worst


def _unwritten(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


# Training -----------------------------------------------------------------------------------------


def training_rows(setup: Setup, pool: Pool, op: str, point: Trained) -> Rows:
    """Every pair of kernels of one name, the choice, and others' calls."""
    call = training.forward_of(point, pool)
    output = call.arguments[call.spec.output]
    grad = pool.take(*output.shape, dtype=output.dtype)
    backward = altered(call.problem, op=op + GRADIENT, grad=True)
    pairs = {
        n: partial(use, kernel={op: n, backward.op: n})
        for n, k in kernels_of(backward.op).items()
        if n in players(call) and not k.refusals(backward)
    }

    def own(policy: Callable[[], AbstractContextManager[None]]) -> Way:
        with policy():
            names = [choose(p, active_policy()).name for p in (call.problem, backward)]
        return differentiated(call, grad, partial(public, call, policy), kernel=", ".join(names))

    def peer(make: Any) -> Way:
        return differentiated(call, grad, make(call.record, setup.compiled))

    every: dict[str, Any] = {**pairs, "automatic": nullcontext}
    made: Ways = {n: partial(own, policy) for n, policy in every.items()}
    others = OPS[op].of_family("vendors", "VENDORS") or {}
    made |= {n: partial(peer, make) for n, make in others.items() if setup.on_gpu}
    clock = partial(kernels_us, setup.device, rounds=3, launched=True)
    want, most = exact_gradients(call, grad), training.MOST_ERROR
    return time_if_right(point.name, made, want, most, clock, training.relative, own=every)


def trained(call: Call) -> list[str]:
    """The arguments that have a gradient."""
    results = OPS[call.op + GRADIENT].spec.results
    return [r.like for r in results if r.like in call.arguments]


def differentiated(
    call: Call, grad: Tensor, run: Callable[[Mapping[str, Tensor]], Tensor], **more: str
) -> Way:
    """A forward and its backward. run: from what is trained to the output."""

    @torch.enable_grad()
    def gradients() -> tuple[Tensor, ...]:
        given = {n: call.arguments[n].detach().requires_grad_() for n in trained(call)}
        return torch.autograd.grad(run(given), list(given.values()), grad)

    return Way(Timed(gradients), more=more)


def public(
    call: Call,
    policy: Callable[[], AbstractContextManager[None]],
    given: Mapping[str, Tensor],
) -> Tensor:
    """The op's public function under a policy. Written states are copies: each run begins with the
    same."""
    kept = {n: call.arguments[n].clone() for n in call.mutated if n not in call.writes}
    arguments = {n: x for n, x in call.arguments.items() if n not in call.writes}
    with policy():
        output: Tensor = getattr(attnops.ops, call.op)(**{**arguments, **kept, **given})
    return output


def exact_gradients(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients in float64, by torch's own derivative of its products."""
    wide = call.map(lambda _, t: t.double() if t.is_floating_point() else t)

    def run(given: Mapping[str, Tensor]) -> Tensor:
        written = {n: wide.arguments[n].clone() for n in wide.mutated}
        output: Tensor = written[call.spec.output]
        kernels_of(call.op)[EXACT].run(wide.with_(**given, **written).record)
        return output

    with allow_mutation_on_saved_tensors():  # of states
        found: tuple[Tensor, ...] = differentiated(wide, grad.double(), run).computed()
    return found


# Whole models -------------------------------------------------------------------------------------

of_one = partial(generate.measure, alone=True)
FIRST = ("hf", "attnops")
STEPS = ("hf_eager", "attnops_eager", "attnops_breakable")
LAYERS = {"qwen3-next-shape": 12, "falcon-h1-7b-shape": 8, "nemotron-h-8b-shape": 8}


def model_cases(setup: Setup) -> dict[str, Case]:
    """The first token and steps of every model at its points, one model after the other."""
    found: dict[str, Case] = {}
    for name, points in models.points_of(setup, SUITE).items():
        layers = setup.layers or (LAYERS.get(name, 0) if setup.on_gpu else 0)
        whole = replace(setup, layers=layers)
        kept = models.keeper(whole, models.largest(points))
        for point in points:
            first = partial(of_one, chosen(whole, FIRST, "generate"), kept, name, point)
            steps = partial(decode.measure, chosen(whole, STEPS, "decode"), kept, name, point)
            found |= {
                f"{name} {point}, {what}": partial(named, what, run)
                for what, run in (("first token", first), ("step", steps))
            }
    return found


def chosen(setup: Setup, usual: tuple[str, ...], suite: str) -> Setup:
    """With the ways that a suite has here."""
    known = ways.here(setup, suite)
    some = setup.ways or (*usual, *(n for n, how in known.items() if how.torch and has_fla()))
    return replace(setup, ways=tuple(n for n in some if n in known) or usual[:1])


def has_fla() -> bool:
    """Does transformers call flash-linear-attention?"""
    return find_spec("fla") is not None


def named(what: str, run: Callable[[], Iterable[Row]]) -> Rows:
    """The rows of a case, which say what is measured."""
    return [{**row, "case": f"{row['case']}, {what}"} for row in run()]


OF_OPS = OpSuite(SUITE, op_rows, dict.fromkeys(("toy", "small", "quick"), 9), sized)


def cases(setup: Setup) -> dict[str, Case]:
    """Calls of ops, then whole models. Raises InvalidInput for a way that this device does not
    have."""
    ways.check(setup, SUITE)
    return {**OF_OPS(setup), **model_cases(setup)}
