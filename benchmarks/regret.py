"""How much slower the automatic choice is than the best measured one, on calls that no table of times contains; regret.json.

    python benchmarks/regret.py [--device cuda] [--table FILE] [--gpus 1] [--count 240] [--seed 1] [--budget-s 150]
    python benchmarks/regret.py --again FILE [--table FILE]

Every call has random sizes off the grid that `attnops tune` measures, most of them ragged, and head counts that it does not measure
among others. Each kernel that can answer, given the plan and the workspace it asks for, is timed as tune times; the regret is the
time of the chosen kernel over the best one's, less 1. Beside it stand, on the same times, the regret of the kernels' own estimates
(no table), of hints rounded to powers of two, and of calls that bring neither plan nor workspace (there a kernel that reads a plan
of the device has the time of a call without). Of every family and kernel a few
small calls are compared with the float64 reference first; a kernel that fails is left out and named.

`--again` times nothing: it chooses anew, with this code and table, for the calls that an earlier file timed, and writes the file again,
with `again` in it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from common import arguments, environment, write, write_file

from attnops.inputs import Pool, build, problem_of
from attnops.kernel import Kernel, kernels_of
from attnops.measured import MEASURED, Shape, Sizes, Table, costs, in_force
from attnops.measured.table import from_json
from attnops.problem import Problem, Target
from attnops.select import select_by
from attnops.testing import Call, Mismatch, check_kernel
from attnops.tune import Stopwatch, clock_for
from attnops.tune.shapes import DENSE, MLA, PACKED, PAGED

ENOUGH = 1 << 62
HOPELESS = 6.0  # a kernel measured this many times slower than the best in the table is not timed again
SLOW = "slow in the table"
FAR = 30.0  # the second best by the table is timed unless it is this many times slower
LARGEST_BYTES, LARGEST_FLOPS = 4e9, 4e12
SMALL_PAIRS, CHECKED_PER_KERNEL = 1 << 25, 2

LLAMA_HEADS = ((32, 8), (32, 8), (64, 8), (40, 8), (28, 4), (32, 32), (16, 16), (48, 8), (24, 8), (12, 2), (16, 1))
FAMILIES = ("dense", "packed", "paged decode", "extend", "mla")
WAYS = ("automatic", "by_estimates", "by_powers_of_two", "bare")


class Held(NamedTuple):
    """A call held out: its family, its shape, and the lengths of each request in tokens."""

    family: str
    shape: Shape
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]

    def work(self) -> tuple[float, float]:
        """Bytes and operations."""
        return self.shape.work(Sizes(len(self.q_lens), sum(self.q_lens) / len(self.q_lens), sum(self.k_lens) / sum(self.q_lens)))

    @property
    def sizes(self) -> dict[str, Any]:
        """As the file has them; they tell the calls of a seed apart."""
        q, k = self.q_lens, self.k_lens
        return {"family": self.family, "batch": len(q), "queries": [min(q), max(q)], "keys": [min(k), max(k)]}


class Row(NamedTuple):
    """One call's outcome.

    us: by kernel, with the plan it reads. bare_us: of kernels that read a plan on the device, without it. planned: kernels whose time
    includes a plan or workspace that a bare call lacks.
    """

    held: Held
    us: dict[str, float]
    chosen: dict[str, str]
    planned: tuple[str, ...] = ()
    skipped: Mapping[str, str] = MappingProxyType({})
    bare_us: Mapping[str, float] = MappingProxyType({})

    def regret(self, way: str) -> float | None:
        """Of a way to choose; None where the chosen kernel was not timed."""
        times = {n: us for n, us in self.us.items() if n not in self.planned} | dict(self.bare_us) if way == "bare" else self.us
        mine = times.get(self.chosen.get(way, ""))
        return None if mine is None else mine / min(times.values()) - 1.0


def _log(rng: random.Random, low: float, high: float) -> int:
    """A whole number, uniform on a logarithmic scale."""
    return max(round(low * (high / low) ** rng.random()), 1)


def _ragged(rng: random.Random, most: int, batch: int, least: float) -> tuple[int, ...]:
    """Lengths from `least * most` to `most`, one of them the longest; a third of the batches are even."""
    if rng.random() < 1 / 3:
        return (most,) * batch
    lengths = [max(round(most * rng.uniform(least, 1.0)), 1) for _ in range(batch)]
    lengths[rng.randrange(batch)] = most
    return tuple(lengths)


def _heads(rng: random.Random, shape: Shape) -> Shape:
    q_heads, kv_heads = rng.choice(LLAMA_HEADS)
    dim = rng.choice((128, 128, 128, 64))
    return replace(shape, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)


def _one(family: str, rng: random.Random) -> Held:
    if family == "mla":
        shape = replace(MLA, q_heads=rng.choice((16, 16, 32, 64, 128, 128)), page_size=rng.choice((64, 64, 64, 16)), decode=True)
        batch = _log(rng, 1, 256)
        return Held(family, shape, (1,) * batch, _ragged(rng, _log(rng, 200, 50_000), batch, 0.3))
    if family == "dense":
        kind = rng.choice(("prefill", "prefill", "padded prefill", "padded decode", "both sides"))
        shape = _heads(rng, DENSE)
        if kind == "padded decode":
            batch, keys = _log(rng, 1, 128), _log(rng, 200, 30_000)
            return Held(family, replace(shape, kv_range=True, square=False, decode=True), (1,) * batch, _ragged(rng, keys, batch, 0.3))
        batch, length = _log(rng, 1, 16), _log(rng, 100, 12_000)
        if kind == "padded prefill":
            lengths = _ragged(rng, length, batch, 0.5)
            return Held(family, replace(shape, kv_range=True, square=False), (length,) * batch, lengths)
        return Held(family, replace(shape, causal=kind == "prefill"), (length,) * batch, (length,) * batch)
    if family == "packed":
        shape = _heads(rng, PACKED)
        if rng.random() < 0.2:
            shape = replace(PACKED, q_heads=16, kv_heads=16, head_dim=192, v_head_dim=128)
        batch = _log(rng, 1, 24)
        lengths = _ragged(rng, _log(rng, 100, 12_000), batch, 0.2)
        return Held(family, shape, lengths, lengths)
    shape = replace(_heads(rng, PAGED), page_size=rng.choice((16, 16, 64, 64, 32, 128, 1)))
    if family == "paged decode":
        batch = _log(rng, 1, 256)
        return Held(family, replace(shape, decode=True), (1,) * batch, _ragged(rng, _log(rng, 200, 60_000), batch, 0.3))
    batch, queries = _log(rng, 1, 48), _log(rng, 2, 3000)
    q_lens = _ragged(rng, queries, batch, 0.3)
    past = _ragged(rng, _log(rng, 1, 30_000), batch, 0.3)
    return Held(family, shape, q_lens, tuple(q + p for q, p in zip(q_lens, past, strict=True)))


def held_out(count: int, seed: int = 1) -> list[Held]:
    """`count` calls, the families in turn; too large ones are drawn again."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        held = _one(FAMILIES[len(found) % len(FAMILIES)], rng)
        moved, flops = held.work()
        if moved <= LARGEST_BYTES and flops <= LARGEST_FLOPS:
            found.append(held)
    return found


def coarse(problem: Problem) -> Problem:
    """Hints at the top of their power-of-two bucket."""
    sizes = {n: getattr(problem, n) for n in ("tokens", "batch", "queries", "context")}
    return replace(problem, **{n: replace(x, hint=x.hi) for n, x in sizes.items() if x.hi})


def choices(problem: Problem, table: Table | None) -> dict[str, str]:
    """By way of choosing: the kernel. All but `bare` bring a host plan and workspace enough."""
    full = replace(problem, plan="host", workspace=ENOUGH)
    asked = {"automatic": (table, full), "by_estimates": (None, full), "by_powers_of_two": (table, coarse(full)), "bare": (table, problem)}
    return {way: kernel.name for way, given in asked.items() if (kernel := select_by(*given).kernel) is not None}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and worst regret in percent of each way to choose, in all and by family. Ways without a timed choice count as unanswered."""

    def figures(some: Sequence[Row]) -> dict[str, Any]:
        known = {way: [100 * r for row in some if (r := row.regret(way)) is not None] for way in WAYS}
        return {"calls": len(some)} | {
            way: {
                "mean_percent": round(statistics.fmean(found), 2) if found else None,
                "worst_percent": round(max(found), 1) if found else None,
                "best_chosen": found.count(0),
                "over_10_percent": sum(r > 10 for r in found),
                "unanswered": len(some) - len(found),
            }
            for way, found in known.items()
        }

    families = dict.fromkeys(r.held.family for r in rows)
    return {"all": figures(rows), "families": {f: figures([r for r in rows if r.held.family == f]) for f in families}}


class Checker:
    """Compares every kernel with the float64 reference on the first small calls of each family."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def trusts(self, kernel: Kernel, call: Call, held: Held) -> bool:
        name, key = f"{kernel.op}.{kernel.name}", f"{held.family}: {kernel.op}.{kernel.name}"
        pairs = sum(held.q_lens) * max(held.k_lens) * held.shape.q_heads
        if pairs <= SMALL_PAIRS and self.done[key] < CHECKED_PER_KERNEL and name not in self.failed:
            self.done[key] += 1
            try:
                # The pool's tensors share one buffer, and the check copies whole buffers.
                check_kernel(kernel, call.map(lambda _, t: t.clone()))
            except Exception as error:  # a kernel that cannot run is no candidate
                self.failed[name] = (str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}")[:300]
        return name not in self.failed


def time_one(held: Held, pool: Pool, stopwatch: Stopwatch, checker: Checker, table: Table | None, target: Target) -> Row:
    """Time every candidate on one call."""
    call = build(held.shape, held.q_lens, held.k_lens, pool)
    candidates = [c for c in stopwatch.candidates(call) if checker.trusts(c[0], c[1], held)]
    guess = costs(call.problem, [k for k, _, _ in candidates], table)
    best = min((c.us for c in guess.values() if c.how == MEASURED), default=float("inf"))
    planned, skipped, bare = tuple(k.name for k, given, _ in candidates if given is not call), dict[str, str](), dict[str, float]()
    row = Row(held, {}, choices(call.problem, table), planned, skipped, bare)
    # Two at least: that the other kernels are slow is the table's claim, which this script checks.
    near = sorted((c.us, n) for n, c in guess.items())[:2]
    kept = {*row.chosen.values(), *(n for us, n in near if us <= FAR * near[0][0])}
    for kernel, given, _ in candidates:
        name = kernel.name
        if guess[name].how == MEASURED and guess[name].us > HOPELESS * best and name not in kept:
            skipped[name] = SLOW
        elif (found := stopwatch.time(kernel, given, _kind(held.shape))).us is None:
            skipped[name] = found.reason
        else:
            row.us[name] = round(found.us, 2)
            if given.problem.plan == "device" and (us := stopwatch.time(kernel, call, _kind(held.shape)).us) is not None:
                bare[name] = round(us, 2)
    return row


def _kind(s: Shape) -> tuple[object, ...]:
    """The traits of a shape that kernels are compiled for."""
    return s.op, s.head_dim, s.v_head_dim, s.causal, s.decode, s.kv_range, s.window >= 0, s.page_size, s.group_size if s.decode else 0


def chosen_again(data: dict[str, Any], table: Table | None) -> list[Row]:
    """The rows of an earlier report with the choices that are made now, by `table` and for the machine it is of."""
    if table is None:
        raise SystemExit("--again needs a --table")
    packages = tuple(version.partition("==")[0] for version in data["packages"])
    target = replace(Target.parse(table.target, packages), gpu=table.gpu)
    known = {str(held.sizes): held for held in held_out(data["asked"], data["seed"])}
    rows = []
    for call in data["calls"]:
        held = known[str({n: call[n] for n in ("family", "batch", "queries", "keys")})]
        problem = problem_of(held.shape, held.q_lens, held.k_lens, target)
        # As `candidates` equips them: kernels that read a plan where there is one, and kernels that refuse a call without.
        kernels = [k for k in kernels_of(held.shape.op).values() if k.name in call["us"]]
        planned = tuple(k.name for k in kernels if k.plan.device is not None or k.refusals(problem))
        rows.append(Row(held, call["us"], choices(problem, table), planned, call.get("skipped", {}), call.get("bare_us", {})))
    return rows


def as_dict(row: Row) -> dict[str, Any]:
    """A row for the file: ways that chose as the automatic one did are left out, and kernels that the table has far behind."""
    held, regret, automatic = row.held, row.regret("automatic"), row.chosen.get("automatic")
    plain = asdict(Shape(held.shape.op))
    more = {"bare_us": dict(row.bare_us), "skipped": {n: v for n, v in row.skipped.items() if v != SLOW}}
    return {
        **held.sizes,
        "shape": {n: v for n, v in asdict(held.shape).items() if n == "op" or v != plain[n]},
        "us": row.us,
        "chosen": {way: name for way, name in row.chosen.items() if way == "automatic" or name != automatic},
        "regret_percent": None if regret is None else round(100 * regret, 2),
        **{name: found for name, found in more.items() if found},
    }


def report_of(rows: Sequence[Row], table: Table | None) -> dict[str, Any]:
    """The sections of the file that follow from the rows, worst calls first. Prints mean and worst regret of each way."""
    found = summary(rows)
    for name, figures in {"all": found["all"], **found["families"]}.items():
        print(f"{name:14}", {way: [figures[way][n] for n in ("mean_percent", "worst_percent", "unanswered")] for way in WAYS})
    calls = sorted(map(as_dict, rows), key=lambda r: -(1e9 if r["regret_percent"] is None else r["regret_percent"]))
    used = None if table is None else {"gpu": table.gpu, "made": dict(table.made), "digest": table.digest[:12]}
    return {"table": used, **found, "calls": calls}


def timed(calls: Sequence[Held], device: torch.device, table: Table | None, seed: int, budget_s: float) -> tuple[list[Row], Checker]:
    """The rows of as many of the calls as the budget allows, of those that two kernels at least answer."""
    start, pool, checker = time.monotonic(), Pool(device, seed=seed), Checker()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))
    stopwatch, rows = Stopwatch(clock_for(device), first_calls_s=budget_s / 4), []
    for held in calls:
        if time.monotonic() - start > budget_s:
            break
        row = time_one(held, pool, stopwatch, checker, table, Target.of(device))
        if len(row.us) > 1:
            rows.append(row)
    return rows, checker


def main() -> None:
    parser = arguments(__doc__, ("cpu", "cuda"), 150.0)
    parser.add_argument("--gpus", type=int, default=1, help="devices of one kind, which share the calls")
    parser.add_argument("--table", type=Path, default=None, help="a table to choose by; default the one in force")
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, default=None, help="a regret.json: choose anew for the calls it timed")
    given = parser.parse_args()
    start, parts = time.monotonic(), given.gpus
    table = from_json(given.table.read_text()) if given.table else in_force(Target.of(torch.device(given.device))).table
    if given.again:
        data = json.loads(given.again.read_text())
        write_file({**data, "again": True, **report_of(chosen_again(data, table), table)}, given.again)
        return
    calls = held_out(given.count, given.seed)
    devices = [torch.device("cuda", at) if given.device == "cuda" else torch.device("cpu") for at in range(parts)]
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        shares = [calls[at::parts] for at in range(parts)]
        found = list(pool.map(timed, shares, devices, [table] * parts, [given.seed] * parts, [given.budget_s] * parts))
    checked = sum((checker.done for _, checker in found), Counter[str]())
    failed = {name: why for _, checker in found for name, why in checker.failed.items()}
    head = {**environment(given.device), "asked": given.count, "gpus": parts, "seed": given.seed, "checked": dict(sorted(checked.items()))}
    seconds, rows = round(time.monotonic() - start, 1), [row for some, _ in found for row in some]
    report = {**head, "seconds": seconds, "failed": failed, **report_of(rows, table)}
    print(f"{len(rows)} calls in {seconds} s -> {write(report, 'regret.json', given.device)}")
    for name, why in failed.items():
        print("FAILED", name, why)


if __name__ == "__main__":
    main()
