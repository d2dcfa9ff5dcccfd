"""Suite `linear`: the products of a decode step with the norm, activation and residual around them, by model and number of rows.

`aten`: the torch ops of transformers, as Inductor compiles them. `triton`: one launch; `deterministic`: the kernel under that policy.
`product`: torch's product alone, without what is around it. `us` of a row of `automatic` has all times of kernels, and its regret is the
time of the chosen one over the best one's, less 1; the last rows of a model have the mean and the worst, and those of a choice by
estimates alone. Of the models in HELD no table has the shapes, and of most no table has all the rows.

A measurement is a CUDA graph that goes once through copies of the weight, which no cache holds together, so every read is cold. The results
that the last replay left are compared, too. `of_bandwidth`: the bytes of the weight over the time, as a share of the bandwidth measured in
the same run. `error` is the largest one as a share of the error allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Setup, regret
from attnops.bench.rows import Case, Row, Way, largest_error, time_if_right
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, altered
from attnops.core.record import changed
from attnops.core.select import select
from attnops.measured import Sizes, in_force
from attnops.ops import OPS
from attnops.ops.linear import timed as linears
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance
from attnops.testing.linear_calls import with_copies
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import call_of
from attnops.tune.clock import Timed, Times, kernels_us
from attnops.tune.run import runner, tracing

DETERMINISTIC, AT = "deterministic", (1, 8, 64)  # the policy, and the rows at which it is timed
HELD: Mapping[str, Mapping[str, Problem]] = {
    "phi-3-mini": linears.products(3072, 32, 32, 8192, 32064, 96), "mistral-small-24b": linears.products(5120, 32, 8, 32768, 131072),
}  # fmt: skip
MODELS = {**linears.MODELS, **HELD}
ROWS = {"toy": (1, 8), "small": (1, 8), "quick": (1, 8, 64), "full": (1, 2, 3, 8, 16, 24, 32, 48, 64, 96, 512)}
LESS = {"toy": 128, "small": 16, "quick": 1, "full": 1}
"""By size of the run, the divisor of the weight's rows and columns."""
BY_ROW = ("x", "residual", "output")
ROUNDS = 3


def cases(setup: Setup) -> dict[str, Case]:
    """One a model; the first model alone unless the run is full."""
    pool = Pool(setup.device)
    return {name: partial(measure, setup, pool, name) for name in (MODELS if setup.size == "full" else list(MODELS)[:1])}


@torch.no_grad()
def measure(setup: Setup, pool: Pool, model: str) -> list[Row]:
    """Every product of a model with every number of rows, and how good the choices are."""
    rows, less = list[Row](), LESS[setup.size]
    for name, shape in MODELS[model].items():
        sizes = {n: getattr(shape, n) // less for n in ("out_features", "in_features")}
        rows += product(setup, pool, f"{model} {name}", altered(shape, dtype=setup.dtype, kv_dtype=setup.dtype, **sizes))
    chosen = [row for row in rows if "us" in row]
    return [*rows, *(regret.summary(model, chosen) if chosen else ())]


def product(setup: Setup, pool: Pool, name: str, shape: Problem) -> Iterator[Row]:
    """One product with every number of rows."""
    some = ROWS[setup.size]
    calls = with_copies(call_of(shape, Sizes(float(some[-1]), 1.0, 1.0), pool), pool)
    for call in calls[1:]:
        call.arguments["weight"].copy_(calls[0].arguments["weight"])
    exact = calls[0].map(lambda _, t: t.double())
    OPS[shape.op].reference(exact.record)
    want = exact.arguments["output"]
    allowed: Any = allowance(calls[0], {"output": want})["output"]
    for count in some:
        fewer = [call.with_(**{n: call.arguments[n][:count] for n in BY_ROW if n in call.arguments}) for call in calls]
        found = timed(setup, f"{name} x{count}", fewer, want[:count], allowed[:count])
        yield from with_choice(setup, found, fewer[0])


def timed(setup: Setup, case: str, calls: list[Call], want: Tensor, allowed: Tensor) -> list[Row]:
    """The rows of one case. calls: alike, with a copy of the weight each."""
    first, bandwidth = calls[0], setup.ceilings.get("bandwidth_tb_s")
    problem, weight = first.problem, first.arguments["weight"]
    left: dict[str, list[Tensor]] = {}

    def way(name: str, run_of: Callable[[Call], Callable[[], Any]]) -> Way:
        outputs = first.arguments["output"].new_empty((len(calls), *want.shape))
        owned = [call.with_(output=output) for call, output in zip(calls, outputs, strict=True)]
        runs, now = [run_of(call) for call in owned], left.setdefault(name, list(outputs))

        def spoil() -> None:
            for result in now:
                result.fill_(float("nan"))

        def run() -> None:
            now[:] = [output if (result := one()) is None else result for one, output in zip(runs, outputs, strict=True)]

        def results() -> Tensor:
            spoil()
            run()
            return torch.stack(now)

        return Way(Timed(run, before=spoil), results)

    def share(got: Tensor, want: Tensor) -> float:
        return largest_error(got.double() / allowed, (want / allowed).expand(got.shape))

    def clock(steps: Mapping[str, Timed]) -> Times:
        with tracing():
            found = kernels_us(setup.device, steps, ROUNDS)
        for name in steps:
            if name != "product" and not (off := share(torch.stack(left[name]), want)) <= 1:
                raise RuntimeError(f"{case}: the timed graph of {name} left results that are off by {off:.3g} of the error allowed")
        return {name: {figure: round(us / len(calls), 2) for figure, us in one.items()} for name, one in found.items()}

    def figures(us: float, way: Way) -> Row:
        return {"of_bandwidth": round(weight.nbytes / us / 1e6 / bandwidth, 4)} if bandwidth else {}

    def steady(kernel: Kernel, call: Call) -> Callable[[], Any]:
        return partial(kernel.run, changed(call.record, policy=DETERMINISTIC))

    kernels = [k for k in kernels_of(first.op).values() if not (k.judge or k.refusals(problem))]
    ways = {k.name: way(k.name, partial(runner, k, backend=setup.backend)) for k in kernels}
    if (by_policy := select(problem, DETERMINISTIC).kernel) is not None and want.shape[0] in AT:
        ways[DETERMINISTIC] = way(DETERMINISTIC, partial(steady, by_policy))
    # The product alone has another result, which is not compared.
    alone = [partial(torch.nn.functional.linear, call.arguments["x"], call.arguments["weight"]) for call in calls]
    ways["product"] = Way(Timed(lambda: [one() for one in alone]), lambda: want)
    with tracing():
        return time_if_right(case, ways, want, 1.0, clock, share, figures, own=ways)


def with_choice(setup: Setup, rows: list[Row], call: Call) -> list[Row]:
    """The rows, and that of `automatic`; none unless two kernels have a time."""
    times = {row["way"]: row for row in rows if row["way"] in kernels_of(call.op) and "median_us" in row}
    if len(times) < 2:
        return rows
    chosen = regret.choices(call.problem, in_force(call.problem.target).table)
    us = {name: one["median_us"] for name, one in times.items()}
    row: Row = {"case": rows[0]["case"], "way": "automatic", "us": us, "chosen": chosen}
    if (percent := regret.regret(row)) is not None:
        mine = times[chosen["automatic"]]
        row |= {name: mine[name] for name in ("median_us", "spread_us", "of_bandwidth") if name in mine}
        row["regret_percent"] = round(percent, 2)
    return [*rows, row]
