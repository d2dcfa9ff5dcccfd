"""What kernels estimate of themselves against what was measured: the choice where no table covers a
call."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import fmean, median

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from attnops.measured import Roofline, scaled, sizes_of, work
from attnops.measured.cost import BY_ARCH, RATES, rates_of
from attnops.measured.table import from_json
from attnops.testing.timed_calls import problem_at, problem_of
from tests.helpers import ROOT
from tests.measuring import STEP
from tests.test_judge import H200

ALIKE = 1.05
"""Times closer than this are in no order."""


@dataclass(frozen=True)
class Ranking:
    """Over points, in percent: the time of the kernel that estimates choose over the best one's,
    less 1, and the pairs in wrong order."""

    points: int
    mean_regret: float
    worst_regret: float
    wrong_pairs: float


def timed(table, target):
    """Every measured point with two times at least: its grid, its sizes, its Problem as the kernels
    were given it, the times by kernel."""
    for grid in table.grids:
        for i, at in enumerate(grid.points()):
            us = {name: t for name, times in grid.us.items() if (t := times[i]) is not None}
            if len(us) > 1:
                bare = problem_at(grid.kind, at, target)
                yield grid, at, altered(bare, plan="host", workspace=1 << 62), us


def rankings(table, target, without=()):
    """By op, and "all". without: kernels, as `op.name`, whose times are not of today's code."""
    regrets, pairs = defaultdict(list), defaultdict(list)
    for _, _, problem, us in timed(table, target):
        kernels = kernels_of(problem.op)
        some = [
            name for name in us if not kernels[name].judge and f"{problem.op}.{name}" not in without
        ]
        if len(some) < 2:
            continue
        guess = {name: kernels[name].cost_us(problem) for name in some}
        best, chosen = min(us[name] for name in some), min(guess, key=guess.__getitem__)
        apart = [
            (a, b)
            for a, b in combinations(some, 2)
            if max(us[a], us[b]) > ALIKE * min(us[a], us[b])
        ]
        for op in (problem.op + " with lse" * problem.results.lse, "all"):
            regrets[op].append(100 * (us[chosen] / best - 1))
            pairs[op] += [(us[a] < us[b]) != (guess[a] < guess[b]) for a, b in apart]
    return {
        op: Ranking(
            len(found), fmean(found), max(found), 100 * sum(pairs[op]) / max(len(pairs[op]), 1)
        )
        for op, found in regrets.items()
    }


TABLE, OTHER = (
    from_json((ROOT / "attnops" / "tables" / f"{name}.json").read_text())
    for name in ("h200", "h100")
)
STALE = ("attention.aten_flash",)
"""Timed when it repeated keys and transposed."""
BOUNDS = {
    "paged_attention": (4.0, 100.0),
    "mla_attention": (5.0, 60.0),
    "attention": (4.0, 60.0),
    "varlen_attention": (1.0, 10.0),
    "attention with lse": (10.0, 110.0),
    "varlen_attention with lse": (12.0, 100.0),
    "attention_backward": (6.0, 40.0),
    "varlen_attention_backward": (2.0, 40.0),
    "linear": (3.0, 40.0),
}
"""Percent: the mean regret, and the worst. Formulas of each kernel's own had a mean of 16 and a
worst of 282."""


def test_estimates_rank_as_the_table_does():
    found = rankings(TABLE, H200, STALE)
    for op, (mean, worst) in BOUNDS.items():
        assert found[op].mean_regret < mean and found[op].worst_regret < worst, (op, found[op])
    every = found["all"]
    assert every.points > 3000 and every.mean_regret < 4.0 and every.wrong_pairs < 14.0, every


def test_they_rank_on_a_gpu_that_they_were_not_fitted_to():
    found = rankings(OTHER, replace(H200, gpu=OTHER.gpu), STALE)["all"]
    assert found.points > 500 and found.mean_regret < 4.5


def test_scaled_times_are_near_those_measured():
    """The H200's, scaled to an H100, against the H100's own."""
    grids = {g.kind: g for g in scaled(TABLE, OTHER.gpu).grids}
    off = []
    for grid in (grid for grid in OTHER.grids if grid.kind in grids):
        for name, times in grid.us.items():
            for us, at in zip(times, grid.points(), strict=True):
                there = grids[grid.kind].at(name, at)
                if us is not None and there is not None:
                    off.append(abs(there / us - 1))
    assert len(off) > 1500 and median(off) < 0.05


def test_estimates_are_of_the_size_of_what_was_measured():
    """Within a factor of two and a half almost everywhere, so that a launch in one formula is a
    launch in another."""
    off = total = 0
    for _, _, problem, us in timed(TABLE, H200):
        for name in us.keys() - {"reference", "aten_flash"}:
            ratio = kernels_of(problem.op)[name].cost_us(problem) / us[name]
            off, total = off + (not 0.4 < ratio < 2.5), total + 1
    assert off < 0.02 * total


def test_a_roofline():
    pace = Roofline(10.0, 0.5, 0.25, key_us=0.01, keys=1000)
    problem = problem_of(STEP, [1] * 8, [4096] * 8, H200)
    needs, rates = work(STEP, sizes_of(problem)), RATES["NVIDIA H200"]
    moved = needs.bytes / (0.5 * rates.bandwidth * 1e6)
    done = needs.flops / (0.25 * rates.matmul * 1e6)
    assert pace(problem) == pytest.approx(10 + math.hypot(moved, done, 10.0))
    assert replace(pace, bandwidth=1.0)(problem) < pace(problem) < replace(pace, keys=2000)(problem)
    slower = replace(problem, target=Target("cuda", 90, gpu="NVIDIA H100 80GB HBM3"))
    assert pace(problem) < pace(slower)
    assert (
        pace(altered(problem, attention_chunk=512))
        == pace(altered(problem, window=(511, -1)))
        < pace(problem)
    )
    assert (
        pace(replace(problem, kv_dtype=torch.float8_e4m3fn))
        < pace(problem)
        < pace(replace(problem, dtype=torch.float32))
    )


@pytest.mark.parametrize("arch", [0, 75, *BY_ARCH])
def test_every_estimate_is_a_time_whatever_is_asked(arch):
    """No size, dtype or target makes a formula fail: a choice is made from fake tensors of any
    kind."""
    target = Target("cuda" if arch else "cpu", arch, ())
    assert rates_of(target).bandwidth > 0
    ops = {grid.kind.op for grid in TABLE.grids if grid.kind.q_heads}
    dtypes = (torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8)
    for op, size, dtype in product(ops, (0, 1, 1 << 20), dtypes):
        sizes = {n: Extent.of(size) for n in ("tokens", "batch", "queries", "context")}
        plain = Problem(op, target, dtype, torch.uint8, 4, 2, 64, 64)
        problem = altered(plain, causal=True, attention_chunk=size, **sizes)
        for kernel in kernels_of(op).values():
            assert 0 <= kernel.cost_us(problem) < float("inf"), (kernel.name, problem)
