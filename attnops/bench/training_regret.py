"""Suite `training_regret`: how much slower the chosen pair of a forward and its gradient is than the best pair, on calls that no table has.

The calls are of the kinds that `attnops tune` times the gradients of, with other head counts and random lengths, most of them ragged. Each
kernel is timed as tune times it, and a pair takes the sum of both: every kernel saves the same output and lse. The regret is that of the
suite `regret`, as are the summaries. The suite `training` and the tests compare the gradients; these are not compared again.
flex is left out, because it compiles for every call; the suite `training` has it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from attnops.bench import Setup, regret
from attnops.bench.regret import Held
from attnops.bench.rows import Case, Row
from attnops.bench.training import documents
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.measured import Table, in_force
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import GRADIENT, build
from attnops.tune.clock import clock_for
from attnops.tune.grids import sweeps_of
from attnops.tune.run import COMPILED, Stopwatch

KINDS = tuple(sweep.kind for sweep in sweeps_of("full") if sweep.kind.results.grad)
FAMILIES = {"dense": "attention", "packed": "varlen_attention"}
SECONDS, FIRST_S = 70.0, 60.0  # of a family without first calls, and of the slow first calls of a kernel in it
COUNT = {"toy": 1, "small": 4, "quick": 12, "full": 60}  # calls of a family
MOST = 65536  # tokens
# Of the key heads of a kind: the number of query heads a key head stays, which kernels compile for.
SCALES = (0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.5)


def cases(setup: Setup) -> dict[str, Case]:
    """One a family."""
    return {family: partial(measure, setup, family) for family in FAMILIES}


def _drawn(at: int, rng: random.Random) -> Held:
    like = KINDS[at % len(KINDS)]
    op, group = like.op.removesuffix(GRADIENT), like.group_size
    kv_heads = max(round(like.kv_heads * rng.choice(SCALES)), 1)
    shape = altered(like, op=op, grad=False, q_heads=kv_heads * group, kv_heads=kv_heads)
    family = "packed" if op == FAMILIES["packed"] else "dense"
    length = round(512 * 64 ** rng.random())
    batch = max(min(round(32 ** rng.random()), MOST // length), 1)
    lengths = (length,) * batch
    if family == "packed" and rng.random() < 2 / 3:
        lengths = documents(batch, length * batch, rng.randrange(1 << 30))
    return Held(family, shape, lengths, lengths)


held_out = partial(regret.held_out, draw=_drawn, most_flops=1.5e12)
"""As that of the suite `regret`, of KINDS in turn; the operations are those of the forward."""


def measure(setup: Setup, family: str) -> list[Row]:
    """The rows of a family: of its calls, as many as SECONDS allow, and its summary."""
    pool, rows, op = Pool(setup.device), list[Row](), FAMILIES[family]
    if setup.on_gpu:
        pool.reserve(torch.bfloat16, int(regret.LARGEST_BYTES * 1.5 / 2))
    left = {"reference", "flex"} if setup.on_gpu else {"flex", *COMPILED}
    names = tuple({n: None for n in (*kernels_of(op), *kernels_of(op + GRADIENT)) if n not in left})
    stopwatch, table = Stopwatch(clock_for(setup.device), FIRST_S, names), in_force(Target.of(setup.device)).table
    start = time.monotonic()
    for held in held_out(COUNT[setup.size] * len(FAMILIES)):
        if held.family == family and time.monotonic() - stopwatch.starting_s - start <= SECONDS:
            rows += timed(held.sized(setup.size), pool, stopwatch, table)
    return [*rows, *regret.summary(family, [row | {"us": pairs(row)} for row in rows if "forward" in row])]


def timed(held: Held, pool: Pool, stopwatch: Stopwatch, table: Table | None) -> Iterator[Row]:
    """The row of a call whose forward or gradient two kernels answer at least, after those of kernels without a time."""
    us: dict[str, dict[str, float]] = {}
    chosen: dict[str, list[str]] = {way: [] for way in regret.WAYS}
    name = f"{held.name}, {held.shape.q_heads}/{held.shape.kv_heads} heads of {held.shape.head_dim}{_rules(held.shape)}"
    for part, ending in (("forward", ""), ("gradient", GRADIENT)):
        shape = altered(held.shape, op=held.shape.op + ending, grad=bool(ending))
        call, us[part] = build(shape, held.q_lens, held.k_lens, pool), {}
        call = call if ending else call.with_(return_lse=True)
        for kernel, given, _ in stopwatch.candidates(call):
            found = stopwatch.time(kernel, given, altered(shape, q_heads=shape.group_size, kv_heads=1))
            if found.us is None:
                yield {"case": name, "way": f"{part}.{kernel.name}", "wrong": found.reason}
            else:
                us[part][kernel.name] = round(found.us, 2)
        for way, kernel_name in regret.choices(call.problem, table).items():
            chosen[way].append(kernel_name)
    row: Row = {"case": name, "way": "automatic", **us, "chosen": {way: "+".join(some) for way, some in chosen.items()}}
    both = pairs(row)
    if len(both) > 1:
        percent = regret.regret(row | {"us": both})
        more = {} if percent is None else {"median_us": round(both[row["chosen"]["automatic"]], 2), "regret_percent": round(percent, 2)}
        yield row | more


def _rules(shape: Problem) -> str:
    rules, window = shape.rules, shape.rules.window[0]
    return f", window {window}" * (window >= 0) + ", soft cap" * rules.softcap + ", sinks" * rules.sinks


def pairs(row: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Microseconds of every forward with every gradient."""
    return {f"{f}+{b}": x + y for f, x in row["forward"].items() for b, y in row["gradient"].items()}
