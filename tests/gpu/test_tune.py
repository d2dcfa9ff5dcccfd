"""Measuring on a real GPU: the clock against what is known, a small table, and selection by it."""

from functools import partial
from statistics import median

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered
from attnops.core.select import select_by
from attnops.measured import MEASURED, Sizes, costs
from attnops.measured.table import Grid, Table, from_json
from attnops.ops.latent.timed import MLA
from attnops.ops.linear.timed import NORM, product
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import Sweep, decoding
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build, problem_at
from attnops.tune import Stopwatch, measure
from attnops.tune.clock import GraphClock, Timed

STEP = Sweep(decoding(PAGED), (1.0, 16.0), (1.0,), (512.0, 4096.0))
LATENT = Sweep(decoding(altered(MLA, q_heads=16)), (1.0, 16.0), (1.0,), (512.0, 4096.0))


@pytest.mark.alone
def test_the_clock_times_a_copy() -> None:
    clock = GraphClock("cuda")
    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    [us] = [
        median(times)
        for times in clock.in_turn({"copy": Timed(lambda: target.copy_(source))}).values()
    ]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    end.synchronize()
    assert 0.2 < us / (start.elapsed_time(end) * 50) < 5, "another unit than that of CUDA's events"


def test_what_can_be_captured_is_timed_by_its_graph() -> None:
    call = build(STEP.kind, [1] * 16, [4096] * 16, Pool("cuda"))
    run = partial(kernels_of("paged_attention")["sdpa"].run, call.record)
    run()
    assert GraphClock("cuda")._capture(run)


def table_of(sweep: Sweep) -> tuple[Table, Grid]:
    """What is measured of a sweep within a minute."""
    table, report = measure(
        [sweep], Stopwatch(GraphClock("cuda")), torch.device("cuda", 0), budget_s=60
    )
    assert not report.broken and not report.late
    [grid] = table.grids
    return table, grid


@pytest.mark.parametrize("sweep", [STEP, LATENT], ids=["decode", "latent"])
def test_a_small_table(sweep: Sweep) -> None:
    table, grid = table_of(sweep)
    assert from_json(table.to_json()) == table and table.gpu == torch.cuda.get_device_name()
    call = build(sweep.kind, [1] * 16, [4096] * 16, Pool("cuda"))
    assert call.problem.target == Target.of(torch.device("cuda", 0))
    fits = [
        k
        for k in kernels_of(sweep.kind.op).values()
        if k.name in grid.us and not k.refusals(call.problem)
    ]
    assert all(c.how == MEASURED for c in costs(call.problem, fits, table).values())
    chosen = select_by(table, call.problem)
    assert chosen.costs[chosen.kernel.name].us == min(c.us for c in chosen.costs.values())


def test_a_small_table_of_linears() -> None:
    """Torch's own way is compiled and captured, as ours is."""
    sweep = Sweep(product(6144, 4096, *NORM), (1.0, 16.0), (1.0,), (1.0,))
    table, grid = table_of(sweep)
    assert set(grid.us) == {"aten", "triton"} and all(
        t for times in grid.us.values() for t in times
    )
    problem = problem_at(sweep.kind, Sizes(16.0, 1.0, 1.0), Target.of(torch.device("cuda", 0)))
    assert {
        cost.how for name, cost in select_by(table, problem).costs.items() if name in grid.us
    } == {MEASURED}
