"""What kernels estimate of themselves against what was measured: the choice where no table covers a call."""

from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from attnops.measured import Roofline, scaled, sizes_of, work
from attnops.measured.cost import BY_ARCH, RATES, rates_of
from attnops.measured.table import from_json
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import decoding
from attnops.testing.timed_calls import problem_at, problem_of
from tests.helpers import ROOT
from tests.test_judge import H200

ALIKE = 1.05
"""Times closer than this are in no order."""


@dataclass(frozen=True)
class Ranking:
    """Over points, in percent: the time of the kernel that estimates choose over the best one's, less 1, and the pairs in wrong order."""

    points: int
    mean_regret: float
    worst_regret: float
    wrong_pairs: float


def timed(table, target):
    """Every measured point with two times at least: its grid, its sizes, its Problem as the kernels were given it, the times by kernel."""
    for grid in table.grids:
        for i, at in enumerate(grid.points()):
            us = {name: t for name, times in grid.us.items() if (t := times[i]) is not None}
            if len(us) > 1:
                bare = problem_at(grid.kind, at, target)
                yield grid, at, altered(bare, plan="host", workspace=1 << 62), us


def rankings(table, target, without=()):
    """By op, and "all". without: kernels, as `op.name`, whose times are not of today's code."""
    regrets = {}
    pairs = {}
    for _, _, problem, us in timed(table, target):
        kernels = kernels_of(problem.op)
        guess = {name: kernels[name].cost_us(problem) for name in us if not kernels[name].judge and f"{problem.op}.{name}" not in without}
        if len(guess) < 2:
            continue
        best = min(us[name] for name in guess)
        for op in (problem.op + " with lse" * problem.results.lse, "all"):
            regrets.setdefault(op, []).append(100 * (us[min(guess, key=guess.__getitem__)] / best - 1))
            pairs.setdefault(op, []).extend(
                (us[a] < us[b]) != (guess[a] < guess[b]) for a, b in combinations(guess, 2) if max(us[a], us[b]) > ALIKE * min(us[a], us[b])
            )
    return {
        op: Ranking(len(found), sum(found) / len(found), max(found), 100 * sum(pairs[op]) / max(len(pairs[op]), 1))
        for op, found in regrets.items()
    }


TABLE = from_json((ROOT / "attnops" / "tables" / "h200.json").read_text())
STALE = ("attention.aten_flash",)
"""Timed when it repeated keys and transposed."""
BOUNDS = {
    "paged_attention": (4.0, 100.0), "mla_attention": (5.0, 60.0), "attention": (4.0, 60.0), "varlen_attention": (1.0, 10.0),
    "attention with lse": (10.0, 110.0), "varlen_attention with lse": (12.0, 100.0), "attention_backward": (6.0, 40.0),
    "varlen_attention_backward": (2.0, 40.0), "linear": (3.0, 40.0),
}  # fmt: skip
"""Percent: the mean regret, and the worst. Formulas of each kernel's own had a mean of 16 and a worst of 282."""


def test_estimates_rank_as_the_table_does():
    found = rankings(TABLE, H200, STALE)
    for op, r in found.items():
        print(f"{op}: {r.points} points, regret {r.mean_regret:.1f}% mean, {r.worst_regret:.0f}% worst, {r.wrong_pairs:.1f}% wrong pairs")
    for op, (mean, worst) in BOUNDS.items():
        assert found[op].mean_regret < mean and found[op].worst_regret < worst, (op, found[op])
    assert found["all"].points > 3000 and found["all"].mean_regret < 4.0 and found["all"].wrong_pairs < 14.0


def test_they_rank_on_a_gpu_that_they_were_not_fitted_to():
    other = from_json((ROOT / "attnops" / "tables" / "h100.json").read_text())
    found = rankings(other, replace(H200, gpu=other.gpu), STALE)["all"]
    assert found.points > 500 and found.mean_regret < 4.5


def test_scaled_times_are_near_those_measured():
    """The H200's, scaled to an H100, against the H100's own."""
    other = from_json((ROOT / "attnops" / "tables" / "h100.json").read_text())
    grids = {g.kind: g for g in scaled(TABLE, other.gpu).grids}
    off = []
    for grid in other.grids:
        for name, times in grid.us.items() if grid.kind in grids else ():
            found = [(t, grids[grid.kind].at(name, at)) for t, at in zip(times, grid.points(), strict=True)]
            off += [abs(there / t - 1) for t, there in found if t is not None and there is not None]
    assert len(off) > 1500 and median(off) < 0.05


def test_worse_estimates_are_seen(monkeypatch):
    import attnops.core.kernel

    kernels = attnops.core.kernel._REGISTRY.kernels["mla_attention"]
    monkeypatch.setitem(kernels, "fa3", replace(kernels["fa3"], cost_us=lambda p: 1.0))
    assert rankings(TABLE, H200)["mla_attention"].mean_regret > BOUNDS["mla_attention"][0]


def test_estimates_are_of_the_size_of_what_was_measured():
    """Within a factor of two and a half almost everywhere, so that a launch in one formula is a launch in another."""
    off = total = 0
    for _, _, problem, us in timed(TABLE, H200):
        for name in us.keys() - {"reference", "aten_flash"}:
            ratio = kernels_of(problem.op)[name].cost_us(problem) / us[name]
            off, total = off + (not 0.4 < ratio < 2.5), total + 1
    assert off < 0.02 * total


STEP = decoding(PAGED)


def test_a_roofline():
    pace = Roofline(10.0, 0.5, 0.25, key_us=0.01, keys=1000)
    problem = problem_of(STEP, [1] * 8, [4096] * 8, H200)
    needs = work(STEP, sizes_of(problem))
    rates = RATES["NVIDIA H200"]
    parts = needs.bytes / (0.5 * rates.bandwidth * 1e6), needs.flops / (0.25 * rates.matmul * 1e6), 10.0
    assert pace(problem) == pytest.approx(10 + sum(x * x for x in parts) ** 0.5)
    assert replace(pace, bandwidth=1.0)(problem) < pace(problem) < replace(pace, keys=2000)(problem)
    slower = replace(problem, target=Target("cuda", 90, gpu="NVIDIA H100 80GB HBM3"))
    assert pace(problem) < pace(slower)
    assert pace(altered(problem, attention_chunk=512)) == pace(altered(problem, window=(511, -1))) < pace(problem)
    assert pace(replace(problem, kv_dtype=torch.float8_e4m3fn)) < pace(problem) < pace(replace(problem, dtype=torch.float32))


def test_every_estimate_is_a_time_whatever_is_asked():
    """No size, dtype or target makes a formula fail: a choice is made from fake tensors of any kind."""
    for arch in (0, 75, *BY_ARCH):
        target = Target("cuda" if arch else "cpu", arch, ())
        assert rates_of(target).bandwidth > 0
        for op in ("attention", "attention_backward", "varlen_attention", "varlen_attention_backward", "paged_attention", "mla_attention"):
            for size in (0, 1, 1 << 20):
                sizes = {n: Extent.of(size) for n in ("tokens", "batch", "queries", "context")}
                for dtype in (torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8):
                    problem = altered(Problem(op, target, dtype, torch.uint8, 4, 2, 64, 64), causal=True, attention_chunk=size, **sizes)
                    for kernel in kernels_of(op).values():
                        assert 0 <= kernel.cost_us(problem) < float("inf"), (kernel.name, problem)
