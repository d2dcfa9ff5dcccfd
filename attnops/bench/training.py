"""Suite `training`: attention forward and backward in one timing, dense and packed, with every rule that trains, and others' calls.

`automatic` and `deterministic` (the same under that policy) are the public functions `attention` and `varlen_attention`; `kernel` names
their forward and their gradient. The other ways are direct calls (`attnops.bench.direct`). The gradients of query, key, value, sinks and
mask of every way are compared with those in float32 before it is timed. Times are of the device, with a cold L2 cache; `host_us` is what
a step takes until it is issued. `of_direct`: the time of the fastest direct call over the row's; above 1 is faster than that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import attnops.ops
from attnops.bench import Setup, direct
from attnops.bench.direct import RULES, Attend
from attnops.bench.rows import Case, Make, Row, Way, time_if_right, with_ratios
from attnops.core.problem import Problem, altered
from attnops.core.select import active_policy, choose, use
from attnops.ops import OPS
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.sweeps import D64_MHA, DEEPSEEK, toy
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build
from attnops.tune.clock import Timed, kernels_us, steps_us

MOST_ERROR = 0.02
ROWS = 512
"""Queries whose logits the float32 gradients hold at a time."""
TRAINED = ("query", "key", "value", "sinks", "mask")
SHARED = ("sinks", "mask")
"""Of all requests, where the others have rows of tokens."""
OURS = {"automatic": nullcontext, "deterministic": partial(use, deterministic=True)}


@dataclass(frozen=True)
class Pair:
    """A forward and its backward. lengths: the tokens of each request. chunk: attention_chunk. bias: with a mask `[1, Hq, S, S]`, added."""

    name: str
    shape: Problem
    lengths: tuple[int, ...]
    chunk: int = 0
    bias: bool = False

    def sized(self, size: str) -> Pair:
        """At the size of the run: short, in float32 and with few heads on a CPU."""
        if size in ("full", "quick"):
            return self
        shape = altered(toy(self.shape), window=(min(self.shape.rules.window[0], 7), -1))
        return replace(self, shape=shape, lengths=tuple(min(n, 24) for n in self.lengths[:3]), chunk=min(self.chunk, 5))

    def build(self, pool: Pool) -> Call:
        """The forward call."""
        call = build(self.shape, self.lengths, self.lengths, pool)
        more: dict[str, Any] = {"attention_chunk": self.chunk} if self.chunk else {}
        if self.bias:
            more["mask"] = pool.take(1, self.shape.q_heads, self.lengths[0], self.lengths[0], dtype=self.shape.dtype)
        return call.with_(**more)


def documents(count: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """`count` random lengths of `tokens` in all, the longest about ten times the shortest."""
    rng = random.Random(seed)
    parts = [rng.uniform(0.2, 2.0) for _ in range(count)]
    lengths = [max(int(tokens * part / sum(parts)), 1) for part in parts]
    lengths[-1] += tokens - sum(lengths)
    return tuple(lengths)


PAIRS = (
    Pair("2x4096, 32/8 heads, d128", DENSE, (4096,) * 2),
    Pair("packed, 18 documents, 32k tokens", PACKED, documents(18, 32768)),
    Pair("window 1024, 1x16384", altered(DENSE, window=(1023, -1)), (16384,)),
    Pair("sinks, 2x4096", altered(DENSE, sinks=True), (4096,) * 2),
    Pair("chunks of 1024, 1x16384", DENSE, (16384,), chunk=1024),
    Pair("bias with its gradient, 2x2048, 16/16 heads, d64", altered(DENSE, **D64_MHA), (2048,) * 2, bias=True),
    Pair("8x1024, 16/16 heads, d64", altered(DENSE, **D64_MHA), (1024,) * 8),
    Pair("soft cap 30, 2x4096", altered(DENSE, softcap=True), (4096,) * 2),
    Pair("2x4096, 16/16 heads, d192/128", altered(DENSE, **DEEPSEEK), (4096,) * 2),
    Pair("1x16384, 32/8 heads, d128", DENSE, (16384,)),
)
COUNT = {"toy": 6, "small": 10, "quick": 4, "full": 10}


def cases(setup: Setup) -> dict[str, Case]:
    """The pairs."""
    pool = Pool(setup.device)
    return {pair.name: partial(measure, setup, pool, pair.sized(setup.size)) for pair in PAIRS[: COUNT[setup.size]]}


def measure(setup: Setup, pool: Pool, pair: Pair) -> list[Row]:
    """One pair, by every way that can answer it."""
    call = pair.build(pool)
    grad = pool.take(*call.arguments["query"].shape[:-1], pair.shape.v_head_dim, dtype=setup.dtype)
    ours: dict[str, Make] = {name: partial(own, call, grad, policy) for name, policy in OURS.items()}

    def peer(make: Any) -> Way | None:
        attend = make(setup, call)
        return None if attend is None else step(attend, call, grad)

    left = ("flex",) if setup.size == "toy" else ()  # at toy size, compilers are not measured
    others: dict[str, Make] = {name: partial(peer, make) for name, make in direct.DIRECT.items() if name not in left}

    def host(us: float, way: Way) -> Row:
        return {"host_us": steps_us({"": way.timed}, 5, inner=1, wait=False)[""]["median_us"]}

    clock = partial(kernels_us, setup.device, rounds=3, launched=True)
    rows = time_if_right(pair.name, ours | others, exact(call, grad), MOST_ERROR, clock, relative, host, own=OURS)
    return with_ratios(direct.with_direct(rows, lambda way: others if way in OURS else ()), "flex")


def own(call: Call, grad: Tensor, policy: Any) -> Way:
    """A public function under a policy, with the kernels that are chosen for it."""
    function, given = getattr(attnops.ops, call.op), dict(call.arguments)
    if "window_left" in given:
        given["window"] = (given.pop("window_left"), -1)

    def attend(trained: Mapping[str, Tensor]) -> Tensor:
        with policy():
            out: Tensor = function(**{**given, **trained})
        return out

    backward = altered(call.problem, op=f"{call.op}_backward", grad=True, mask_grad="mask" in given)
    steps = altered(call.problem, lse=True), backward
    with policy():
        names = [choose(p, active_policy()).name for p in steps]
    return step(attend, call, grad, {"kernel": ", ".join(names)})


def step(attend: Attend, call: Call, grad: Tensor, more: Row | None = None) -> Way:
    """A forward and its backward, whose result are the gradients."""

    @torch.enable_grad()
    def run() -> tuple[Tensor, ...]:
        given = {n: call.arguments[n].detach().requires_grad_() for n in TRAINED if n in call.arguments}
        return torch.autograd.grad(attend(given), list(given.values()), grad)

    return Way(Timed(run), more=more or {})


@torch.enable_grad()
def exact(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a causal call in float32 (in float64 of a float32 call), with the logits of at most ROWS queries in memory."""
    a = call.arguments
    wide = torch.float64 if grad.dtype == torch.float32 else torch.float32
    given: dict[str, Any] = {n: (a[n] if n in SHARED else a[n].flatten(0, -3)).to(wide, copy=True) for n in TRAINED if n in a}
    for x in given.values():
        x.requires_grad_()  # and x.grad sums what each part adds
    ends = a["cu_seqlens_q"].tolist() if direct.packed(call) else range(0, len(given["query"]) + 1, a["query"].shape[1])
    flat, left, rules = grad.flatten(0, -3), a.get("window_left", -1), {n: a[n] for n in RULES if n in a}
    for start, end in pairwise(ends):
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            low = max(start, first - left) if left >= 0 else start
            part = {n: x if n in SHARED else x[None, first:last] if n == "query" else x[None, low:last] for n, x in given.items()}
            if "mask" in part:
                part["mask"] = part["mask"][..., first - start : last - start, low - start : last - start]
            output, _ = OPS["attention"].reference(Call("attention", part | rules).record)
            output[0].backward(flat[first:last].to(wide))
    return tuple(x.grad.view(a[n].shape) for n, x in given.items())


def relative(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative norm of a difference; infinite for numbers that are not finite."""
    off = [float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return max(off) if all(map(math.isfinite, off)) else float("inf")
