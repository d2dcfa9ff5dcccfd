"""Suite `training`: attention forward and backward in one timing, dense and packed, with every rule
that trains, and others' calls.

`automatic` and `deterministic` (the same under that policy) are the public functions `attention`
and `varlen_attention`; `kernel` names their forward and their gradient. The other ways are direct
calls (the family's `vendors`). The gradients of query, key, value, sinks and mask of every way are
compared with those in float32 before it is timed. Times are of the device, with a cold L2 cache;
`host_us` is what a step takes until it is issued. `of_direct`: the time of the fastest direct call
over the row's; above 1 is faster than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import attnops.ops
from attnops.bench import Setup
from attnops.bench.op_suite import OpSuite
from attnops.bench.rows import Row, Rows, Way, Ways, time_if_right, with_direct, with_ratios
from attnops.core.problem import altered
from attnops.core.select import active_policy, choose, use
from attnops.ops import OPS
from attnops.ops.attention import reference
from attnops.ops.attention.record import Attention
from attnops.ops.attention.vendors import RULES, TRAINED, Attend, packed, public
from attnops.ops.points import Trained
from attnops.ops.sweeps import toy
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import GRADIENT, build
from attnops.tune.clock import Timed, kernels_us, steps_us

MOST_ERROR = 0.02
ROWS = 512
"""Queries whose logits the float32 gradients hold at a time."""
SHARED = ("sinks", "mask")
"""Of all requests, where the others have rows of tokens."""
OURS = {"automatic": nullcontext, "deterministic": partial(use, deterministic=True)}


def shorter(pair: Trained, size: str) -> Trained:
    """At the size of the run: short, in float32 and with few heads on a CPU."""
    if size in ("full", "quick"):
        return pair
    shape = altered(toy(pair.shape), window=(min(pair.shape.rules.window[0], 7), -1))
    return replace(
        pair,
        shape=shape,
        lengths=tuple(min(n, 24) for n in pair.lengths[:3]),
        chunk=min(pair.chunk, 5),
    )


def forward_of(pair: Trained, pool: Pool) -> Call:
    """The forward call."""
    call = build(pair.shape, pair.lengths, pair.lengths, pool)
    more: dict[str, Any] = {"attention_chunk": pair.chunk} if pair.chunk else {}
    if pair.bias:
        more["mask"] = pool.take(
            1, pair.shape.q_heads, pair.lengths[0], pair.lengths[0], dtype=pair.shape.dtype
        )
    return call.with_(**more)


def pair_rows(setup: Setup, pool: Pool, op: str, pair: Trained) -> Rows:
    """A forward and its gradient, by every way that can answer them."""
    call = forward_of(pair, pool)
    grad = pool.take(*call.record.query.shape[:-1], pair.shape.v_head_dim, dtype=setup.dtype)
    ways: Ways = {name: partial(own, call, grad, policy) for name, policy in OURS.items()}

    def peer(make: Any) -> Way | None:
        attend = make(call.record, setup.compiled)
        return None if attend is None else step(attend, call, grad)

    left = ("flex",) if setup.size == "toy" else ()  # at toy size, compilers are not measured
    others = {
        name: partial(peer, make)
        for name, make in OPS[op].of_family("vendors", "VENDORS").items()
        if name not in left
    }

    def host(us: float, way: Way) -> Row:
        return {"host_us": steps_us({"": way.timed}, 5, inner=1, wait=False)[""]["median_us"]}

    clock = partial(kernels_us, setup.device, rounds=3, launched=True)
    rows = time_if_right(
        pair.name, ways | others, exact(call, grad), MOST_ERROR, clock, relative, host, own=OURS
    )
    return with_ratios(with_direct(rows, lambda way: others if way in OURS else ()), "flex")


def own(call: Call, grad: Tensor, policy: Any) -> Way:
    """A public function under a policy, with the kernels that are chosen for it."""
    function, given = getattr(attnops.ops, call.op), public(call.arguments)

    def attend(trained: Mapping[str, Tensor]) -> Tensor:
        with policy():
            out: Tensor = function(**{**given, **trained})
        return out

    backward = altered(call.problem, op=call.op + GRADIENT, grad=True, mask_grad="mask" in given)
    steps = altered(call.problem, lse=True), backward
    with policy():
        names = [choose(p, active_policy()).name for p in steps]
    return step(attend, call, grad, {"kernel": ", ".join(names)})


def step(attend: Attend, call: Call, grad: Tensor, more: Row | None = None) -> Way:
    """A forward and its backward, whose result are the gradients."""

    @torch.enable_grad()
    def run() -> tuple[Tensor, ...]:
        given = {
            n: call.arguments[n].detach().requires_grad_() for n in TRAINED if n in call.arguments
        }
        return torch.autograd.grad(attend(given), list(given.values()), grad)

    return Way(Timed(run), more=more or {})


def leaves(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """Copies of what is trained, tokens first, whose `grad` sums what each part adds."""
    given = {n: call.arguments[n] for n in TRAINED if n in call.arguments}
    return {
        n: (x if n in SHARED else x.flatten(0, -3)).to(dtype, copy=True).requires_grad_()
        for n, x in given.items()
    }


@torch.enable_grad()
def exact(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a causal call in float32 (in float64 of a float32 call), with the logits of
    at most ROWS queries in memory."""
    a = call.arguments
    wide = torch.float64 if grad.dtype == torch.float32 else torch.float32
    given = leaves(call, wide)
    c, [query] = call.record, call.spec.roles["queries"]
    ends = (
        c.cu_seqlens_q.tolist() if packed(c) else range(0, len(given[query]) + 1, c.query.shape[1])
    )
    flat, left, rules = grad.flatten(0, -3), c.window_left, {n: a[n] for n in RULES if n in a}
    for start, end in pairwise(ends):
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            low = max(start, first - left) if left >= 0 else start
            part = {n: x if n in SHARED else x[None, low:last] for n, x in given.items()}
            part[query] = given[query][None, first:last]
            if "mask" in part:
                queries, keys = slice(first - start, last - start), slice(low - start, last - start)
                part["mask"] = part["mask"][..., queries, keys]
            output, _ = reference.attention(Attention(**part, **rules))
            output[0].backward(flat[first:last].to(wide))
    return tuple(x.grad.view(a[n].shape) for n, x in given.items())


def relative(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative norm of a difference; infinite for numbers that are not finite."""
    off = [float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return max(off) if all(map(math.isfinite, off)) else float("inf")


SUITE = OpSuite("training", pair_rows, {"toy": 6, "small": 10, "quick": 4}, shorter)
