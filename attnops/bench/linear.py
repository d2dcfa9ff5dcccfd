"""Suite `linear`: the products of a decode step with the norm, activation and residual around them, by model and number of rows.

`aten`: the torch ops of transformers, compiled. `triton`: one launch; `deterministic`: the kernel under that policy. `product`: torch's
product alone, without what is around it. `automatic`: the time of the kernel that is chosen, and its regret, the time over that of the best
kernel, less 1. Each measurement goes once through copies of the weight that no cache holds together, so every read is cold.

`of_bandwidth`: the bytes of the weight over the time, as a share of the bandwidth measured in the same run. `error` is the largest one as a
share of the error allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.bench import Setup
from attnops.bench.rows import Case, Row, Way, largest_error, time_if_right
from attnops.call import changed
from attnops.inputs import Call, Pool, allowance
from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS, linear
from attnops.select import select
from attnops.tune.clock import Timed, Times, kernels_us

DETERMINISTIC = "deterministic"
COLD_BYTES = 600_000_000
"""Bytes of all copies of a weight together: several times the L2 cache of any GPU."""


class Product(NamedTuple):
    """A linear layer: its results, the columns of its weight, and what is around it."""

    outs: int
    columns: int
    norm: bool = False
    activation: str = ""
    residual: bool = False


def _products(hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, head_dim: int = 128) -> dict[str, Product]:
    return {
        "qkv": Product((heads + 2 * kv_heads) * head_dim, hidden, norm=True),
        "o": Product(hidden, heads * head_dim, residual=True),
        "gate_up": Product(inner, hidden, norm=True, activation="silu"),
        "down": Product(hidden, inner, residual=True),
        "head": Product(vocabulary, hidden, norm=True),
    }


MODELS = {"llama-3-8b": _products(4096, 32, 8, 14336, 128256), "qwen3-4b": _products(2560, 32, 8, 9728, 151936)}
ROWS = {"toy": (1, 8), "small": (1, 8), "quick": (1, 8), "full": (1, 8, 32, 64)}
LESS = {"toy": 128, "small": 16, "quick": 1, "full": 1}
"""By size of the run, the divisor of all sizes but the rows."""


def cases(setup: Setup) -> dict[str, Case]:
    """Every product of every model; of one model unless the run is full."""
    pool, less = Pool(setup.device), LESS[setup.size]
    models = list(MODELS) if setup.size == "full" else list(MODELS)[:1]
    sized = {f"{m} {n}": p._replace(outs=p.outs // less, columns=p.columns // less) for m in models for n, p in MODELS[m].items()}
    return {name: partial(measure, setup, pool, name, product) for name, product in sized.items()}


@torch.no_grad()
def measure(setup: Setup, pool: Pool, name: str, product: Product) -> list[Row]:
    """One product with every number of rows."""
    compiled, found = setup.compiled(partial(linear, kernel="aten"), fullgraph=True), list[Row]()
    for rows in ROWS[setup.size]:
        pool.reset()
        calls = calls_of(pool, rows, product, setup)
        chosen = select(calls[0].problem).kernel
        found += with_choice(timed(setup, f"{name} x{rows}", calls, compiled), "" if chosen is None else chosen.name)
    return found


def calls_of(pool: Pool, rows: int, product: Product, setup: Setup) -> list[Call]:
    """Calls with a copy of the weight each, which are equal; a CPU gets one."""
    take = partial(pool.take, dtype=setup.dtype)
    outs, columns = product.outs, product.columns
    weight = take(outs * (2 if product.activation else 1), columns)
    given: dict[str, Any] = {"x": take(rows, columns), "output": torch.empty(rows, outs, dtype=setup.dtype, device=setup.device)}
    given |= {"norm_weight": take(columns), "norm_eps": 1e-5} if product.norm else {}
    given |= {"activation": product.activation} if product.activation else {}
    given |= {"residual": take(rows, outs)} if product.residual else {}
    copies = max(2, -(-COLD_BYTES // weight.nbytes)) if setup.on_gpu else 1
    return [Call("linear", {**given, "weight": weight if i == 0 else weight.clone()}) for i in range(copies)]


def timed(setup: Setup, case: str, calls: list[Call], compiled: Callable[..., Tensor]) -> list[Row]:
    """The rows of one case."""
    first, bandwidth = calls[0], setup.ceilings.get("bandwidth_tb_s")
    weight, output, problem = first.arguments["weight"], first.arguments["output"], first.problem
    exact = first.map(lambda _, t: t.double())
    OPS["linear"].reference(exact.record)
    want = exact.arguments["output"]
    allowed: Any = allowance(first, {"output": want})["output"]
    del exact

    def way(run: Callable[[Call], Any]) -> Way:
        def result() -> Tensor:
            output.fill_(float("nan"))
            returned: Tensor | None = run(first)
            return output.clone() if returned is None else returned

        return Way(Timed(lambda: [run(call) for call in calls]), result)

    def by(kernel: Kernel, policy: str, call: Call) -> Any:
        return kernel.run(changed(call.record, policy=policy))

    def alone(call: Call) -> Tensor:
        return torch.nn.functional.linear(call.arguments["x"], call.arguments["weight"])

    def share(got: Tensor, want: Tensor) -> float:
        return largest_error(got.double() / allowed, want / allowed)

    def clock(steps: Mapping[str, Timed]) -> Times:
        found = kernels_us(setup.device, steps)
        return {name: {figure: round(us / len(calls), 2) for figure, us in one.items()} for name, one in found.items()}

    def figures(us: float, way: Way) -> Row:
        return {"of_bandwidth": round(weight.nbytes / us / 1e6 / bandwidth, 4)} if bandwidth else {}

    ways: dict[str, Way] = {"aten": way(lambda call: compiled(**{n: v for n, v in call.arguments.items() if n != "output"}))}
    called = [k for k in kernels_of("linear").values() if not (k.judge or k.fused or k.refusals(problem))]
    ways |= {kernel.name: way(partial(by, kernel, "")) for kernel in called}
    if (steady := select(problem, DETERMINISTIC).kernel) is not None:
        ways["deterministic"] = way(partial(by, steady, DETERMINISTIC))
    # The product alone has another result, which is not compared.
    ways["product"] = Way(Timed(lambda: [alone(call) for call in calls]), lambda: want)
    return time_if_right(case, ways, want, 1.0, clock, share, figures, own=ways)


def with_choice(rows: list[Row], chosen: str) -> list[Row]:
    """The rows, and that of `automatic`; none where the chosen kernel has no time."""
    times = {row["way"]: row for row in rows if row["way"] in kernels_of("linear") and "median_us" in row}
    if chosen not in times:
        return rows
    best, mine = min(row["median_us"] for row in times.values()), times[chosen]
    kept = {name: mine[name] for name in ("median_us", "spread_us", "of_bandwidth") if name in mine}
    regret = round(100 * (mine["median_us"] / best - 1), 2)
    return [*rows, {"case": mine["case"], "way": "automatic", "kernel": chosen, **kept, "regret_percent": regret}]
