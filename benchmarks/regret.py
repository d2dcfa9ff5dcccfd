"""How much slower the automatic choice is than the best measured one, on calls that no table of times contains; regret.json.

    python benchmarks/regret.py [--device cuda] [--table FILE] [--gpus 1] [--count 240] [--seed 1] [--budget-s 150]
    python benchmarks/regret.py --again FILE --table FILE

Every call has random sizes off the grid that `attnops tune` measures, most of them ragged, and head counts that it does not measure among
others. Each kernel that can answer, given the plan and the workspace it asks for, is timed as tune times; the regret is the time of the
chosen kernel over the best one's, less 1. On the same times, the file has the regret of the kernels' own estimates (no table) and of hints
rounded to powers of two. A few small calls of every family and kernel are compared with the float64 reference first; a kernel that fails is
left out and named. `--again` times nothing: it chooses anew, with this code and table, for the calls that an earlier file timed.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import arguments, write, write_file

from attnops.errors import one_line
from attnops.inputs import Call, Pool, build, problem_of
from attnops.kernel import Kernel
from attnops.measured import MEASURED, Cost, Shape, Sizes, Table, in_force
from attnops.measured.table import from_json
from attnops.problem import Problem, Target, altered
from attnops.select import select_by
from attnops.testing import check_kernel
from attnops.tune import Stopwatch, clock_for
from attnops.tune.shapes import DENSE, MLA, PACKED, PAGED

ENOUGH = 1 << 62
HOPELESS = 6.0  # a kernel measured this many times slower than the best in the table is not timed again, unless it is the second best
LARGEST_BYTES, LARGEST_FLOPS = 4e9, 4e12
SMALL_PAIRS, CHECKED_PER_KERNEL = 1 << 25, 2
LLAMA_HEADS = ((32, 8), (32, 8), (64, 8), (40, 8), (28, 4), (32, 32), (16, 16), (48, 8), (24, 8), (12, 2), (16, 1))
FAMILIES = ("dense", "packed", "paged decode", "extend", "mla")
WAYS = ("automatic", "by_estimates", "by_powers_of_two")
Row = dict[str, Any]  # of the file: sizes and shape of a call, `us` by kernel, `chosen` by way, and `skipped`: why a kernel has no time


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
    def sizes(self) -> Row:
        """As the file has them; they tell the calls of a seed apart."""
        q, k = self.q_lens, self.k_lens
        return {"family": self.family, "batch": len(q), "queries": [min(q), max(q)], "keys": [min(k), max(k)]}


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
    (q_heads, kv_heads), dim = rng.choice(LLAMA_HEADS), rng.choice((128, 128, 128, 64))
    return replace(shape, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)


def _decode(rng: random.Random, family: str, shape: Shape, batch: int, keys: float) -> Held:
    return Held(family, replace(shape, decode=True), (1,) * batch, _ragged(rng, _log(rng, 200, keys), batch, 0.3))


def _one(family: str, rng: random.Random) -> Held:
    if family == "mla":
        shape = replace(MLA, q_heads=rng.choice((16, 16, 32, 64, 128, 128)), page_size=rng.choice((64, 64, 64, 16)))
        return _decode(rng, family, shape, _log(rng, 1, 256), 50_000)
    if family == "dense":
        kind = rng.choice(("prefill", "prefill", "padded prefill", "padded decode", "both sides"))
        shape = replace(_heads(rng, DENSE), **({"kv_range": True, "square": False} if kind.startswith("padded") else {}))
        if kind == "padded decode":
            return _decode(rng, family, shape, _log(rng, 1, 128), 30_000)
        batch, length = _log(rng, 1, 16), _log(rng, 100, 12_000)
        lengths = _ragged(rng, length, batch, 0.5) if kind == "padded prefill" else (length,) * batch
        return Held(family, replace(shape, causal=kind != "both sides"), (length,) * batch, lengths)
    if family == "packed":
        shape = _heads(rng, PACKED)
        if rng.random() < 0.2:
            shape = replace(PACKED, q_heads=16, kv_heads=16, head_dim=192, v_head_dim=128)
        batch = _log(rng, 1, 24)
        lengths = _ragged(rng, _log(rng, 100, 12_000), batch, 0.2)
        return Held(family, shape, lengths, lengths)
    shape = replace(_heads(rng, PAGED), page_size=rng.choice((16, 16, 64, 64, 32, 128, 1)))
    if family == "paged decode":
        return _decode(rng, family, shape, _log(rng, 1, 256), 60_000)
    batch, queries = _log(rng, 1, 48), _log(rng, 2, 3000)
    q_lens = _ragged(rng, queries, batch, 0.3)
    past = _ragged(rng, _log(rng, 1, 30_000), batch, 0.3)
    return Held(family, shape, q_lens, tuple(q + p for q, p in zip(q_lens, past, strict=True)))


def held_out(count: int, seed: int = 1) -> list[Held]:
    """`count` calls, the families in turn; too large ones are drawn again."""
    rng, found = random.Random(seed), list[Held]()
    while len(found) < count:
        held = _one(FAMILIES[len(found) % len(FAMILIES)], rng)
        if all(done <= most for done, most in zip(held.work(), (LARGEST_BYTES, LARGEST_FLOPS), strict=True)):
            found.append(held)
    return found


def coarse(problem: Problem) -> Problem:
    """Hints at the top of their power-of-two bucket."""
    sizes = {n: getattr(problem.sizes, n) for n in ("tokens", "batch", "queries", "context")}
    return altered(problem, **{n: replace(x, hint=x.hi) for n, x in sizes.items() if x.hi})


def choices(problem: Problem, table: Table | None) -> tuple[Mapping[str, Cost], dict[str, str]]:
    """(the cost of each kernel by the table, the chosen kernel by way), of a call with a host plan and workspace enough."""
    full = altered(problem, plan="host", workspace=ENOUGH)
    found = {way: select_by(*given) for way, given in zip(WAYS, ((table, full), (None, full), (table, coarse(full))), strict=True)}
    return found["automatic"].costs, {way: decision.kernel.name for way, decision in found.items() if decision.kernel is not None}


def regret(row: Row, way: str = "automatic") -> float | None:
    """In percent; None where the chosen kernel was not timed."""
    mine = row["us"].get(row["chosen"].get(way))
    return None if mine is None else 100 * (mine / min(row["us"].values()) - 1.0)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and worst regret in percent of each way to choose, in all and by family. Ways without a timed choice count as unanswered."""

    def figures(some: Sequence[Row]) -> dict[str, Any]:
        out: dict[str, Any] = {"calls": len(some)}
        for way in WAYS:
            found = [r for row in some if (r := regret(row, way)) is not None]
            mean, worst = (round(statistics.fmean(found), 2), round(max(found), 1)) if found else (None, None)
            counts = {"best_chosen": found.count(0), "over_10_percent": sum(r > 10 for r in found), "unanswered": len(some) - len(found)}
            out[way] = {"mean_percent": mean, "worst_percent": worst, **counts}
        return out

    families = dict.fromkeys(row["family"] for row in rows)
    return {"all": figures(rows), "families": {f: figures([row for row in rows if row["family"] == f]) for f in families}}


def trusted(kernel: Kernel, call: Call, held: Held, checked: dict[str, list[str]]) -> bool:
    """Is the kernel right, by the float64 reference, on the first small calls of each family? checked: their errors, or ""."""
    seen = checked.setdefault(f"{held.family}: {kernel.op}.{kernel.name}", [])
    if sum(held.q_lens) * max(held.k_lens) * held.shape.q_heads <= SMALL_PAIRS and len(seen) < CHECKED_PER_KERNEL and not any(seen):
        try:
            check_kernel(kernel, call.map(lambda _, t: t.clone()))  # the pool's tensors share a buffer, which would be copied whole
            seen.append("")
        except Exception as error:  # a kernel that cannot run is no candidate
            seen.append(one_line(error))
    return not any(seen)


def time_one(held: Held, pool: Pool, stopwatch: Stopwatch, checked: dict[str, list[str]], table: Table | None) -> Row:
    """Time every candidate on one call."""
    call, s, us, skipped = build(held.shape, held.q_lens, held.k_lens, pool), held.shape, dict[str, float](), dict[str, str]()
    costs, names = choices(call.problem, table)
    best = min((c.us for c in costs.values() if c.how == MEASURED), default=inf)
    # Two at least: that the other kernels are slow is the table's claim, which this script checks.
    kept = {*names.values(), *sorted(costs, key=lambda n: costs[n].us)[:2]}
    kind = s.op, s.head_dim, s.v_head_dim, s.causal, s.decode, s.kv_range, s.window >= 0, s.page_size, s.group_size if s.decode else 0
    for kernel, given, _ in stopwatch.candidates(call):
        cost = costs.get(kernel.name)
        hopeless = cost is not None and cost.how == MEASURED and cost.us > HOPELESS * best and kernel.name not in kept
        if hopeless or not trusted(kernel, given, held, checked):
            continue
        timing = stopwatch.time(kernel, given, kind)
        if timing.us is None:
            skipped[kernel.name] = timing.reason
        else:
            us[kernel.name] = round(timing.us, 2)
    shape = {n: v for n, v in asdict(s).items() if n == "op" or v != getattr(Shape(s.op), n)}
    return {**held.sizes, "shape": shape, "us": us, "chosen": names} | ({"skipped": skipped} if skipped else {})


def chosen_again(data: dict[str, Any], table: Table) -> list[Row]:
    """The rows of an earlier report with the choices that are made now, by `table` and for the machine it is of."""
    target = replace(Target.parse(table.target, tuple(v.partition("==")[0] for v in data["packages"])), gpu=table.gpu)
    known = {str(held.sizes): held for held in held_out(data["asked"], data["seed"])}
    rows = []
    for row in data["calls"]:
        held = known[str({n: row[n] for n in ("family", "batch", "queries", "keys")})]
        rows.append(row | {"chosen": choices(problem_of(held.shape, held.q_lens, held.k_lens, target), table)[1]})
    return rows


def report_of(rows: Sequence[Row], table: Table | None) -> dict[str, Any]:
    """The sections of the file that follow from the rows, worst calls first. Prints mean and worst regret of each way."""
    found = summary(rows)
    for name, figures in {"all": found["all"], **found["families"]}.items():
        print(f"{name:14}", {way: [figures[way][n] for n in ("mean_percent", "worst_percent", "unanswered")] for way in WAYS})
    calls = [row | {"regret_percent": None if (r := regret(row)) is None else round(r, 2)} for row in rows]
    calls.sort(key=lambda row: inf if row["regret_percent"] is None else row["regret_percent"], reverse=True)
    used = None if table is None else {"gpu": table.gpu, "made": dict(table.made), "digest": table.digest[:12]}
    return {"table": used, **found, "calls": calls}


def timed(calls: Sequence[Held], device: torch.device, table: Table | None, given: Any) -> tuple[list[Row], dict[str, list[str]]]:
    """The rows of as many of the calls as the budget allows, of those that two kernels at least answer."""
    start, pool, checked, rows = time.monotonic(), Pool(device, seed=given.seed), dict[str, list[str]](), list[Row]()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))
    stopwatch = Stopwatch(clock_for(device), first_calls_s=given.budget_s / 4)
    for held in calls:
        if time.monotonic() - start > given.budget_s:
            break
        rows.append(time_one(held, pool, stopwatch, checked, table))
    return [row for row in rows if len(row["us"]) > 1], checked


def main() -> None:
    parser = arguments(__doc__, budget_s=150.0)
    parser.add_argument("--gpus", type=int, default=1, help="devices of one kind, which share the calls")
    parser.add_argument("--table", type=Path, default=None, help="a table to choose by; default the one in force")
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, default=None, help="a regret.json: choose anew for the calls it timed")
    given = parser.parse_args()
    start, parts = time.monotonic(), given.gpus
    table = from_json(given.table.read_text()) if given.table else in_force(Target.of(torch.device(given.device))).table
    if given.again:
        if table is None:
            parser.error("--again needs a --table")
        data = json.loads(given.again.read_text())
        write_file({**data, "again": True, **report_of(chosen_again(data, table), table)}, given.again)
        return
    calls = held_out(given.count, given.seed)
    devices = [torch.device("cuda", at) if given.device == "cuda" else torch.device("cpu") for at in range(parts)]
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        found = list(pool.map(timed, [calls[at::parts] for at in range(parts)], devices, [table] * parts, [given] * parts))
    rows = [row for some, _ in found for row in some]
    checked = sorted((name, errors) for _, some in found for name, errors in some.items() if errors)
    failed = {name: reason for name, errors in checked for reason in errors if reason}
    head = {"asked": given.count, "gpus": parts, "seed": given.seed, "seconds": round(time.monotonic() - start, 1), "failed": failed}
    head |= {"checked": {name: sum(len(errors) for n, errors in checked if n == name) for name, _ in checked}}
    report = head | report_of(rows, table)
    print(f"{len(rows)} calls in {head['seconds']} s -> {write(report, 'regret.json', given.device)}", *failed.items(), sep="\n")


if __name__ == "__main__":
    main()
