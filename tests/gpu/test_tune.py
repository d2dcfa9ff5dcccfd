"""Measuring on a real GPU: the clock against what is known, a small table, and selection by it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import Capture, kernels_of
from attnops.core.problem import Target, altered
from attnops.core.select import select_by
from attnops.measured import MEASURED, Sizes, costs
from attnops.measured.table import from_json
from attnops.ops.latent.timed import MLA
from attnops.ops.linear.timed import NORM, product
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import Sweep, decoding
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build, problem_at
from attnops.tune import Stopwatch, measure
from attnops.tune.clock import GraphClock, Timed

STEP = Sweep(decoding(PAGED), (1.0, 16.0), (1.0,), (512.0, 4096.0))
LATENT = Sweep(altered(decoding(MLA), q_heads=16), (1.0, 16.0), (1.0,), (512.0, 4096.0))


@pytest.mark.alone
def test_the_clock_times_a_copy(found: dict[str, Any]) -> None:
    clock = GraphClock("cuda")
    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    [us] = [sorted(t)[len(t) // 2] for t in clock.in_turn({"copy": Timed(lambda: target.copy_(source))}).values()]
    rate = 2 * source.numel() * 2 / us / 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    end.synchronize()
    assert 0.2 < us / (start.elapsed_time(end) * 50) < 5, "another unit than that of CUDA's events"
    found.setdefault("clock", {}).update({"copy_tb_s": round(rate, 2), "launch_us": round(clock.launch_us, 2)})


@pytest.mark.alone
def test_what_can_be_captured_is_timed_by_its_graph(found: dict[str, Any]) -> None:
    """And the same call by launches: the difference is the host's part."""
    call = build(STEP.kind, [1] * 16, [4096] * 16, Pool("cuda"))
    clock = GraphClock("cuda")
    kernel = kernels_of("paged_attention")["sdpa"]
    run = lambda: kernel.run(call.record)  # noqa: E731
    run()
    assert clock._capture(run)
    us = {"replay_us": clock(kernel, call, run), "launched_us": clock(replace(kernel, capture=Capture.NEVER), call, run)}
    found.setdefault("clock", {}).update({name: round(value, 2) for name, value in us.items()})


@pytest.mark.parametrize("sweep", [STEP, LATENT], ids=["decode", "latent"])
def test_a_small_table(sweep: Sweep, found: dict[str, Any]) -> None:
    table, report = measure([sweep], Stopwatch(GraphClock("cuda")), torch.device("cuda", 0), budget_s=60)
    assert not report.broken and not report.late
    assert from_json(table.to_json()) == table and table.gpu == torch.cuda.get_device_name()
    [grid] = table.grids
    call = build(sweep.kind, [1] * 16, [4096] * 16, Pool("cuda"))
    assert call.problem.target == Target.of(torch.device("cuda", 0))
    fits = [k for k in kernels_of(sweep.kind.op).values() if not k.refusals(call.problem)]
    assert all(c.how == MEASURED for c in costs(call.problem, [k for k in fits if k.name in grid.us], table).values())
    chosen = select_by(table, call.problem)
    assert chosen.costs[chosen.kernel.name].us == min(c.us for c in chosen.costs.values())
    found.setdefault("tune", {})[sweep.kind.op] = {name: list(us) for name, us in grid.us.items()}


def test_a_small_table_of_linears(found: dict[str, Any]) -> None:
    """Torch's own way is compiled and captured, as ours is."""
    sweep = Sweep(product(6144, 4096, *NORM), (1.0, 16.0), (1.0,), (1.0,))
    table, report = measure([sweep], Stopwatch(GraphClock("cuda")), torch.device("cuda", 0), budget_s=60)
    assert not report.broken and not report.late
    [grid] = table.grids
    assert set(grid.us) == {"aten", "triton"} and all(t for times in grid.us.values() for t in times)
    problem = problem_at(sweep.kind, Sizes(16.0, 1.0, 1.0), Target.of(torch.device("cuda", 0)))
    assert {cost.how for name, cost in select_by(table, problem).costs.items() if name in grid.us} == {MEASURED}
    found.setdefault("tune", {})["linear"] = {name: list(us) for name, us in grid.us.items()}
