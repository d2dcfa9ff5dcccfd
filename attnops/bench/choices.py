"""Suites `regret` and `training_regret`: how much slower the automatic choice is than the best one,
on calls that no table has.

The calls of `regret` have random sizes off the grid of `attnops tune`, most of them ragged, and
some have head counts and page sizes that it does not measure. Each kernel is timed as tune times
it; `us` of a row has all times. The regret of a choice is its time over the best one's, less 1.
`automatic` chooses by the table in force, `by_estimates` by formulas alone; the last rows of a
family have the mean and the worst of both. On the first small calls every kernel is compared with
the reference in float64. A wrong one is no candidate.

Those of `training_regret` are of the kinds that `attnops tune` times the gradients of, with other
head counts and random lengths. A choice is a pair of a forward and its gradient, and takes the sum
of both times. Every kernel saves the same output and lse. The suite `training` and the tests
compare the gradients; these are not compared again. flex is left out there, because it compiles for
every call.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch

from attnops.bench import Setup, exact
from attnops.bench.rows import Case, Row, Rows, time_if_right
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import select_by
from attnops.measured import Sizes, Table, in_force, work
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.latent.timed import MLA
from attnops.ops.pages.timed import PAGED
from attnops.ops.points import documents
from attnops.ops.sweeps import decoding, toy
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import GRADIENT, build
from attnops.tune.clock import clock_for
from attnops.tune.grids import sweeps_of
from attnops.tune.run import COMPILED, Stopwatch, runner

LARGEST_BYTES, LARGEST_FLOPS = 4e9, 4e12
# Pairs of a query and a key in a small call, and how many of them check a kernel
SMALL_PAIRS, CHECKED = 1 << 25, 2
HEADS = (
    (32, 8),
    (32, 8),
    (64, 8),
    (40, 8),
    (28, 4),
    (32, 32),
    (16, 16),
    (48, 8),
    (24, 8),
    (12, 2),
    (16, 1),
)
FAMILIES = {"dense": DENSE, "packed": PACKED, "paged decode": PAGED, "extend": PAGED, "mla": MLA}
BATCHES = {
    "mla": 256,
    "paged decode": 256,
    "padded decode": 128,
    "extend": 48,
    "packed": 24,
}  # the most requests by kind; 16 of others
DECODES = {"mla": 50_000, "paged decode": 60_000, "padded decode": 30_000}  # the most keys
WAYS = ("automatic", "by_estimates")
KINDS = tuple(sweep.kind for sweep in sweeps_of("full") if sweep.kind.results.grad)
TRAINED = dict(
    zip(
        ("dense", "packed"),
        dict.fromkeys(kind.op.removesuffix(GRADIENT) for kind in KINDS),
        strict=True,
    )
)
MOST = 65536  # tokens of a forward
# Of the key heads of a kind: the number of query heads a key head stays, which kernels compile for.
SCALES = (0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.5)


Checked = dict[str, list[str]]
"""By kernel its errors on the calls that checked it, "" for none."""


class Held(NamedTuple):
    """A call that no table has: its family and shape, new tokens and keys of each request."""

    family: str
    shape: Problem
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]

    @property
    def name(self) -> str:
        """Family and sizes: unique among the calls of a seed."""
        q, k = (
            "-".join(map(str, sorted({min(some), max(some)})))
            for some in (self.q_lens, self.k_lens)
        )
        return f"{self.family} {len(self.q_lens)}x{q} of {k}"

    def sized(self, size: str) -> Held:
        """At the size of the run: on a CPU short, with few heads, in float32."""
        if size in ("full", "quick"):
            return self
        return Held(
            self.family,
            toy(self.shape),
            *(tuple(min(n, 24) for n in some[:4]) for some in (self.q_lens, self.k_lens)),
        )


def _shape(family: str, kind: str, rng: random.Random) -> Problem:
    if family == "mla":
        heads = rng.choice((16, 16, 32, 64, 128, 128))
        return altered(MLA, q_heads=heads, page_size=rng.choice((64, 64, 64, 16)))
    (q_heads, kv_heads), dim = rng.choice(HEADS), rng.choice((128, 128, 128, 64))
    shape = altered(
        FAMILIES[family],
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        causal=kind != "both sides",
    )
    if kind.startswith("padded"):
        return altered(shape, kv_range=True, sizes_equal=False)
    if family == "packed" and rng.random() < 0.2:
        return altered(shape, q_heads=16, kv_heads=16, head_dim=192, v_head_dim=128)
    if shape.page_size:
        return altered(shape, page_size=rng.choice((16, 16, 64, 64, 32, 128, 1)))
    return shape


def _drawn(at: int, rng: random.Random) -> Held:
    family = tuple(FAMILIES)[at % len(FAMILIES)]

    def log(low: float, high: float) -> int:
        """Uniform on a logarithmic scale."""
        return max(round(low * math.pow(high / low, rng.random())), 1)

    def ragged(most: int, least: float) -> tuple[int, ...]:
        """Lengths from `least * most` to `most`, one of them the longest; a third of the batches
        are even."""
        if rng.random() < 1 / 3:
            return (most,) * batch
        lengths = [max(round(most * rng.uniform(least, 1.0)), 1) for _ in range(batch)]
        lengths[rng.randrange(batch)] = most
        return tuple(lengths)

    kind = (
        rng.choice(("prefill", "prefill", "padded prefill", "padded decode", "both sides"))
        if family == "dense"
        else family
    )
    shape = _shape(family, kind, rng)
    batch = log(1, BATCHES.get(kind, 16))
    if most := DECODES.get(kind):
        return Held(family, decoding(shape), (1,) * batch, ragged(log(200, most), 0.3))
    if kind == "extend":
        q_lens, past = ragged(log(2, 3000), 0.3), ragged(log(1, 30_000), 0.3)
        return Held(family, shape, q_lens, tuple(map(sum, zip(q_lens, past, strict=True))))
    even = (length := log(100, 12_000),) * batch
    lengths = (
        ragged(length, 0.2 if kind == "packed" else 0.5)
        if kind in ("packed", "padded prefill")
        else even
    )
    return Held(family, shape, lengths if kind == "packed" else even, lengths)


def _drawn_pair(at: int, rng: random.Random) -> Held:
    like = KINDS[at % len(KINDS)]
    op, group = like.op.removesuffix(GRADIENT), like.group_size
    kv_heads = max(round(like.kv_heads * rng.choice(SCALES)), 1)
    shape = altered(like, op=op, grad=False, q_heads=kv_heads * group, kv_heads=kv_heads)
    family = next(family for family, its in TRAINED.items() if its == op)
    length = round(512 * 64 ** rng.random())
    batch = max(min(round(32 ** rng.random()), MOST // length), 1)
    lengths = (length,) * batch
    if family == "packed" and rng.random() < 2 / 3:
        lengths = documents(batch, length * batch, rng.randrange(1 << 30))
    return Held(family, shape, lengths, lengths)


def held_out(
    count: int,
    seed: int = 1,
    draw: Callable[[int, random.Random], Held] = _drawn,
    most_flops: float = LARGEST_FLOPS,
) -> list[Held]:
    """`count` calls, the families in turn, each by `draw` from its number; too large ones are drawn
    again."""
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
    return {
        way: found.name
        for way, by in zip(WAYS, (table, None), strict=True)
        if (found := select_by(by, full).kernel) is not None
    }


def regret(row: Row, way: str = "automatic") -> float | None:
    """In percent; None where the chosen kernel was not timed."""
    mine = row["us"].get(row["chosen"].get(way))
    return None if mine is None else 100 * (mine / min(row["us"].values()) - 1.0)


def summary(family: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Mean and worst regret in percent of both ways to choose. A choice without a time is
    unanswered."""
    for way in WAYS:
        found = [r for row in rows if (r := regret(row, way)) is not None]
        counts = {
            "best_chosen": found.count(0),
            "over_10_percent": sum(r > 10 for r in found),
            "unanswered": len(rows) - len(found),
        }
        figures = (
            {"mean_percent": round(fmean(found), 2), "worst_percent": round(max(found), 1)}
            if found
            else {}
        )
        yield {"case": family, "way": way, "calls": len(rows), **figures, **counts}


def failure(kernel: Kernel, call: Call) -> str:
    """Why the kernel is wrong on the call, or ""."""
    want, allowed = exact.oracle(call)
    output, most = call.arguments.get(call.spec.output), allowed * kernel.tolerance.factor
    make = partial(exact.way, runner(kernel, call), lambda whole: whole, most, output)
    return str(
        time_if_right("", {kernel.name: make}, want, allowed, lambda steps: {})[0].get("wrong", "")
    )


def with_regret(row: Row, us: Mapping[str, float]) -> Row:
    """The row of `automatic`, with the time and the regret of its choice if that has a time. us: by
    kernel, or by pair of them."""
    percent, mine = regret(row | {"us": us}), row["chosen"].get("automatic")
    return (
        row
        if percent is None
        else {**row, "median_us": round(us[mine], 2), "regret_percent": round(percent, 2)}
    )


def with_choice(rows: Rows, call: Call) -> Rows:
    """The rows of a call, and that of `automatic`; none unless two kernels have a time."""
    times = {
        row["way"]: row for row in rows if row["way"] in kernels_of(call.op) and "median_us" in row
    }
    if len(times) < 2:
        return rows
    chosen = choices(call.problem, in_force(call.problem.target).table)
    us = {name: one["median_us"] for name, one in times.items()}
    mine = times.get(chosen.get("automatic", ""), {})
    more: Row = {name: mine[name] for name in ("spread_us", "of_bandwidth") if name in mine}
    return [
        *rows,
        with_regret(
            {"case": rows[0]["case"], "way": "automatic", "us": us, "chosen": chosen, **more}, us
        ),
    ]


def timed(
    held: Held, pool: Pool, stopwatch: Stopwatch, checked: Checked, table: Table | None
) -> Iterator[Row]:
    """The row of a call that two kernels answer at least, after those of kernels without a time."""
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
    if len(us) > 1:
        yield with_regret(
            {
                "case": held.name,
                "way": "automatic",
                "us": us,
                "chosen": choices(call.problem, table),
            },
            us,
        )


def timed_pair(
    held: Held, pool: Pool, stopwatch: Stopwatch, checked: Checked, table: Table | None
) -> Iterator[Row]:
    """As `timed`, of a call whose forward or gradient two kernels answer at least. Nothing is
    checked."""
    us: dict[str, dict[str, float]] = {}
    chosen: dict[str, list[str]] = {way: [] for way in WAYS}
    name = (
        f"{held.name}, {held.shape.q_heads}/{held.shape.kv_heads} heads of "
        f"{held.shape.head_dim}{_rules(held.shape)}"
    )
    for part, ending in (("forward", ""), ("gradient", GRADIENT)):
        shape = altered(held.shape, op=held.shape.op + ending, grad=bool(ending))
        call, us[part] = build(shape, held.q_lens, held.k_lens, pool), {}
        call = call if ending else call.with_(return_lse=True)
        for kernel, given, _ in stopwatch.candidates(call):
            found = stopwatch.time(
                kernel, given, altered(shape, q_heads=shape.group_size, kv_heads=1)
            )
            if found.us is None:
                yield {"case": name, "way": f"{part}.{kernel.name}", "wrong": found.reason}
            else:
                us[part][kernel.name] = round(found.us, 2)
        for way, kernel_name in choices(call.problem, table).items():
            chosen[way].append(kernel_name)
    row: Row = {
        "case": name,
        "way": "automatic",
        **us,
        "chosen": {way: "+".join(some) for way, some in chosen.items()},
    }
    both = pairs(row)
    if len(both) > 1:
        yield with_regret(row, both)


def _rules(shape: Problem) -> str:
    rules, window = shape.rules, shape.rules.window[0]
    return (
        f", window {window}" * (window >= 0)
        + ", soft cap" * rules.softcap
        + ", sinks" * rules.sinks
    )


def pairs(row: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Microseconds of every forward with every gradient."""
    return {
        f"{f}+{b}": x + y for f, x in row["forward"].items() for b, y in row["gradient"].items()
    }


@dataclass(frozen=True)
class HeldOut:
    """A suite of calls that no table has: a function of a Setup. families: the ops of each, whose
    kernels are timed.

    count: by size of the run, the calls of a family. seconds: of a family, and first_s of the slow
    first calls of a kernel in it, which are `apart` from the others or not. rows: of a call.
    reserved: the share of LARGEST_BYTES that inputs take. slow: kernels that a GPU leaves.
    """

    families: Mapping[str, tuple[str, ...]] = field(hash=False)
    held_out: Callable[[int], list[Held]] = field(hash=False, compare=False)
    rows: Callable[[Held, Pool, Stopwatch, Checked, Table | None], Iterator[Row]]
    count: Mapping[str, int] = field(hash=False)
    seconds: float
    first_s: float
    apart: bool
    reserved: float
    slow: tuple[str, ...]

    def __call__(self, setup: Setup) -> dict[str, Case]:
        """One a family."""
        return {family: partial(self.measure, setup, family) for family in self.families}

    @torch.no_grad()
    def measure(self, setup: Setup, family: str) -> Rows:
        """The rows of a family: of its calls, as many as `seconds` allow, and its summary."""
        pool, rows, checked = Pool(setup.device), Rows(), Checked()
        if setup.on_gpu:
            pool.reserve(torch.bfloat16, int(LARGEST_BYTES * self.reserved / 2))
        left = self.slow if setup.on_gpu else ("flex", *COMPILED)
        names = tuple(
            {n: None for op in self.families[family] for n in kernels_of(op) if n not in left}
        )
        stopwatch = Stopwatch(clock_for(setup.device), self.first_s, names)
        table = in_force(Target.of(setup.device)).table
        start = time.monotonic()
        for held in self.held_out(self.count[setup.size] * len(self.families)):
            spent = time.monotonic() - start - (stopwatch.starting_s if self.apart else 0.0)
            if held.family == family and spent <= self.seconds:
                rows += self.rows(held.sized(setup.size), pool, stopwatch, checked, table)
        timed = [
            row if "us" in row else row | {"us": pairs(row)} for row in rows if "chosen" in row
        ]
        return [*rows, *summary(family, timed)]


REGRET = HeldOut(
    {family: (shape.op,) for family, shape in FAMILIES.items()},
    held_out,
    timed,
    {"toy": 1, "small": 4, "quick": 8, "full": 48},
    seconds=34.0,
    first_s=20.0,
    apart=False,
    reserved=1.1,
    slow=("reference",),
)
TRAINING = HeldOut(
    # The operations are those of the forward.
    {family: (op, op + GRADIENT) for family, op in TRAINED.items()},
    partial(held_out, draw=_drawn_pair, most_flops=1.5e12),
    timed_pair,
    {"toy": 1, "small": 4, "quick": 12, "full": 60},
    seconds=70.0,
    first_s=60.0,
    apart=True,
    reserved=1.5,
    slow=("reference", "flex"),
)
