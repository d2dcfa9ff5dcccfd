"""Suite `regret`: how much slower the automatic choice is than the best kernel, on calls that no table of measured times has.

The calls have random sizes off the grid of `attnops tune`, most of them ragged, and some have head counts and page sizes that it does not
measure. Each kernel is timed as tune times it; `us` of a row has all times. The regret of a choice is its time over the best one's, less 1.
`automatic` chooses by the table in force, `by_estimates` by formulas alone; the last rows of a family have the mean and the worst of both.
On the first small calls every kernel is compared with the reference in float64. A wrong one is no candidate.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch

from attnops.bench import Setup, kernels
from attnops.bench.rows import Case, Row, time_if_right
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import select_by
from attnops.measured import Sizes, Table, in_force, work
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.latent.timed import MLA
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import decoding, toy
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build
from attnops.tune.clock import clock_for
from attnops.tune.run import COMPILED, Stopwatch, runner

LARGEST_BYTES, LARGEST_FLOPS = 4e9, 4e12
SMALL_PAIRS, CHECKED = 1 << 25, 2  # pairs of a query and a key in a small call, and how many of them check a kernel
SECONDS, FIRST_S = 34.0, 20.0  # of a family, and of the slow first calls of a kernel in it
COUNT = {"toy": 1, "small": 4, "quick": 8, "full": 48}  # calls of a family
HEADS = ((32, 8), (32, 8), (64, 8), (40, 8), (28, 4), (32, 32), (16, 16), (48, 8), (24, 8), (12, 2), (16, 1))
FAMILIES = {"dense": DENSE, "packed": PACKED, "paged decode": PAGED, "extend": PAGED, "mla": MLA}
BATCHES = {"mla": 256, "paged decode": 256, "padded decode": 128, "extend": 48, "packed": 24}  # the most requests by kind; 16 of others
DECODES = {"mla": 50_000, "paged decode": 60_000, "padded decode": 30_000}  # the most keys
WAYS = ("automatic", "by_estimates")


class Held(NamedTuple):
    """A call that no table has: its family and shape, new tokens and keys of each request."""

    family: str
    shape: Problem
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]

    @property
    def name(self) -> str:
        """Family and sizes: unique among the calls of a seed."""
        q, k = ("-".join(map(str, sorted({min(some), max(some)}))) for some in (self.q_lens, self.k_lens))
        return f"{self.family} {len(self.q_lens)}x{q} of {k}"

    def sized(self, size: str) -> Held:
        """At the size of the run: on a CPU short, with few heads, in float32."""
        if size in ("full", "quick"):
            return self
        return Held(self.family, toy(self.shape), *(tuple(min(n, 24) for n in some[:4]) for some in (self.q_lens, self.k_lens)))


def cases(setup: Setup) -> dict[str, Case]:
    """One a family."""
    return {family: partial(measure, setup, family) for family in FAMILIES}


def _drawn(at: int, rng: random.Random) -> Held:
    family = tuple(FAMILIES)[at % len(FAMILIES)]

    def log(low: float, high: float) -> int:
        """Uniform on a logarithmic scale."""
        return max(round(low * math.pow(high / low, rng.random())), 1)

    def ragged(most: int, least: float) -> tuple[int, ...]:
        """Lengths from `least * most` to `most`, one of them the longest; a third of the batches are even."""
        if rng.random() < 1 / 3:
            return (most,) * batch
        lengths = [max(round(most * rng.uniform(least, 1.0)), 1) for _ in range(batch)]
        lengths[rng.randrange(batch)] = most
        return tuple(lengths)

    kind = rng.choice(("prefill", "prefill", "padded prefill", "padded decode", "both sides")) if family == "dense" else family
    if family == "mla":
        shape = altered(MLA, q_heads=rng.choice((16, 16, 32, 64, 128, 128)), page_size=rng.choice((64, 64, 64, 16)))
    else:
        (q_heads, kv_heads), dim = rng.choice(HEADS), rng.choice((128, 128, 128, 64))
        shape = altered(FAMILIES[family], q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, causal=kind != "both sides")
    if kind.startswith("padded"):
        shape = altered(shape, kv_range=True, sizes_equal=False)
    elif family == "packed" and rng.random() < 0.2:
        shape = altered(shape, q_heads=16, kv_heads=16, head_dim=192, v_head_dim=128)
    elif shape.op == "paged_attention":
        shape = altered(shape, page_size=rng.choice((16, 16, 64, 64, 32, 128, 1)))
    batch = log(1, BATCHES.get(kind, 16))
    if most := DECODES.get(kind):
        return Held(family, decoding(shape), (1,) * batch, ragged(log(200, most), 0.3))
    if kind == "extend":
        q_lens, past = ragged(log(2, 3000), 0.3), ragged(log(1, 30_000), 0.3)
        return Held(family, shape, q_lens, tuple(map(sum, zip(q_lens, past, strict=True))))
    even = (length := log(100, 12_000),) * batch
    lengths = ragged(length, 0.2 if kind == "packed" else 0.5) if kind in ("packed", "padded prefill") else even
    return Held(family, shape, lengths if kind == "packed" else even, lengths)


def held_out(
    count: int, seed: int = 1, draw: Callable[[int, random.Random], Held] = _drawn, most_flops: float = LARGEST_FLOPS
) -> list[Held]:
    """`count` calls, the families in turn, each by `draw` from its number; too large ones are drawn again."""
    rng, found = random.Random(seed), list[Held]()
    while len(found) < count:
        held = draw(len(found), rng)
        batch, tokens = len(held.q_lens), sum(held.q_lens)
        needs = work(held.shape, Sizes(batch, tokens / batch, sum(held.k_lens) / tokens))
        found += [held] if needs.bytes <= LARGEST_BYTES and needs.flops <= most_flops else []
    return found


def choices(problem: Problem, table: Table | None) -> dict[str, str]:
    """The chosen kernel by way, of a call with a host plan and workspace enough."""
    full = altered(problem, plan="host", workspace=1 << 62)
    return {way: found.name for way, by in zip(WAYS, (table, None), strict=True) if (found := select_by(by, full).kernel) is not None}


def regret(row: Row, way: str = "automatic") -> float | None:
    """In percent; None where the chosen kernel was not timed."""
    mine = row["us"].get(row["chosen"].get(way))
    return None if mine is None else 100 * (mine / min(row["us"].values()) - 1.0)


def summary(family: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Mean and worst regret in percent of both ways to choose. A choice without a time is unanswered."""
    for way in WAYS:
        found = [r for row in rows if (r := regret(row, way)) is not None]
        counts = {"best_chosen": found.count(0), "over_10_percent": sum(r > 10 for r in found), "unanswered": len(rows) - len(found)}
        figures = {"mean_percent": round(fmean(found), 2), "worst_percent": round(max(found), 1)} if found else {}
        yield {"case": family, "way": way, "calls": len(rows), **figures, **counts}


def failure(kernel: Kernel, call: Call) -> str:
    """Why the kernel is wrong on the call, or ""."""
    want, allowed = kernels.oracle(call)
    make = partial(kernels.way, runner(kernel, call), lambda whole: whole, allowed * kernel.tolerance.factor, call.arguments.get("output"))
    return str(time_if_right("", {kernel.name: make}, want, allowed, lambda steps: {})[0].get("wrong", ""))


def timed(held: Held, pool: Pool, stopwatch: Stopwatch, checked: dict[str, list[str]], table: Table | None) -> Iterator[Row]:
    """The row of a call that two kernels answer at least, after those of kernels without a time. checked: errors by kernel, or ""."""
    call, us = build(held.shape, held.q_lens, held.k_lens, pool), dict[str, float]()
    small = sum(held.q_lens) * max(held.k_lens) * held.shape.q_heads <= SMALL_PAIRS
    for kernel, given, _ in stopwatch.candidates(call):
        if any(seen := checked.setdefault(kernel.name, [])):
            continue
        reason = failure(kernel, given) if small and len(seen) < CHECKED else ""
        seen += [reason] if small else []
        found, reason, *_ = (None, reason) if reason else stopwatch.time(kernel, given, held.shape)
        if found is None:
            yield {"case": held.name, "way": kernel.name, "wrong": reason}
        else:
            us[kernel.name] = round(found, 2)
    row: Row = {"case": held.name, "way": "automatic", "us": us, "chosen": (chosen := choices(call.problem, table))}
    if len(us) > 1:
        percent = regret(row)
        yield row if percent is None else row | {"median_us": us[chosen["automatic"]], "regret_percent": round(percent, 2)}


@torch.no_grad()
def measure(setup: Setup, family: str) -> list[Row]:
    """The rows of a family: of its calls, as many as SECONDS allow, and its summary."""
    pool, start, rows, checked = Pool(setup.device), time.monotonic(), list[Row](), dict[str, list[str]]()
    if setup.on_gpu:
        pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))
    left = {"reference"} if setup.on_gpu else {"flex", *COMPILED}
    names = tuple(n for n in kernels_of(FAMILIES[family].op) if n not in left)
    stopwatch, table = Stopwatch(clock_for(setup.device), FIRST_S, names), in_force(Target.of(setup.device)).table
    for held in held_out(COUNT[setup.size] * len(FAMILIES)):
        if held.family == family and time.monotonic() - start <= SECONDS:
            rows += timed(held.sized(setup.size), pool, stopwatch, checked, table)
    return [*rows, *summary(family, [row for row in rows if "us" in row])]
