"""Measured times of linear layers: what is timed, how a call finds its times, and the choice by
them."""

from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered
from attnops.core.select import select_by
from attnops.kernels.triton.launch.linear_tiles import MOST_ROWS
from attnops.lowering.fused_call import ROWS
from attnops.measured import MEASURED, Grid, Sizes, Table, costs, distance, place, scaled, work
from attnops.ops.linear import timed as linears
from attnops.ops.linear.counted import MOST_TIMED
from attnops.ops.sweeps import F32, Sweep
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import call_of, problem_at, with_copies
from attnops.tune import Stopwatch, measure, run, sweeps_of

CPU, H200 = torch.device("cpu"), Target("cuda", 90, ("triton",), "NVIDIA H200")
NORM, GATE, RESIDUAL = linears.NORM, linears.GATE, linears.RESIDUAL
PARTS = {"plain": (), "norm": NORM, "gated": NORM + GATE, "residual": RESIDUAL}


def small(*asks, outs=32):
    return altered(linears.product(outs, 16, *asks), **F32)


SMALL = small()


def problem(outs, width, *asks, rows=1, dtype=torch.bfloat16):
    kind = altered(linears.product(outs, width, *asks), dtype=dtype, kv_dtype=dtype)
    return problem_at(kind, Sizes(rows, 1, 1), H200)


def grid(shape, us):
    return Grid(shape, (1.0, 64.0, 65.0), (1.0,), (1.0,), us)


def table(*grids):
    return Table("NVIDIA H200", "sm90", {"linear.aten": "", "linear.triton": ""}, grids)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_timed_call_is_of_its_shape(parts, rows):
    kind, at = small(*parts), Sizes(rows, 1, 1)
    call = call_of(kind, at, Pool("cpu"))
    assert call.problem == problem_at(kind, at, Target.of(CPU))
    assert distance(kind, call.problem) == 0 and place(kind, call.problem) == at
    read = [t for n, t in call.tensors().items() if n != "norm_weight"]
    assert work(kind, at).bytes == sum(t.nbytes for t in read)
    assert work(kind, at).flops == 2 * rows * 32 * 16


def test_every_linear_of_the_models_is_timed_once():
    sweeps = sweeps_of("full", ("linear",))
    swept = {s.kind for s in sweeps}
    assert len(swept) == len(sweeps) > 25
    assert swept.issuperset(shape for model in linears.MODELS.values() for shape in model.values())
    assert {s.allowed for s in sweeps} == {len(linears.ROWS)}


@pytest.mark.parametrize("rows", [1, 3])
def test_torchs_own_way_is_timed_compiled(rows):
    """As one graph of norm, product, activation and residual, for any number of rows and of
    results."""
    counter = CompileCounter()
    for outs, more in ((32, 0), (48, rows > 1)):
        call = call_of(small(*NORM, *GATE, outs=outs), Sizes(rows + more, 1, 1), Pool("cpu"))
        with torch.no_grad(), run.tracing():
            got = run.runner(kernels_of("linear")["aten"], call, counter)()
        kernels_of("linear")["reference"].run(call.record)
        torch.testing.assert_close(got, call.arguments["output"])
    assert counter.frame_count == 1


def test_weights_are_cold(monkeypatch):
    """A GPU runs through copies of the weight, which share no memory, and its time is that of one
    call."""
    pool = Pool("cpu")
    call = call_of(SMALL, Sizes(2, 1, 1), pool)
    weight = call.arguments["weight"]
    assert with_copies(call, pool) == [call]
    monkeypatch.setattr("attnops.testing.timed_calls.COLD_BYTES", 7 * weight.nbytes - 3)
    pool.device = torch.device("cuda")  # its memory remains that of the CPU
    monkeypatch.setattr(pool, "reserve", lambda dtype, numbers: None)
    pool._buffers[torch.float32] = torch.randn(1 << 16)
    calls = with_copies(call, pool)
    starts = sorted(c.arguments["weight"].data_ptr() for c in calls)
    assert len(calls) == 7 and all(b - a >= weight.nbytes for a, b in pairwise(starts))
    # The clock gives the number of calls that it saw, ten microseconds each.
    stopwatch = Stopwatch(lambda kernel, call, run: 10.0 * len(run()))
    assert stopwatch.time(kernels_of("linear")["reference"], call, SMALL, calls[1:]).us == 10.0


def test_measuring_leaves_the_judge_out(monkeypatch):
    """And a shape that `aten` alone serves, as on a CPU, has no grid."""
    seen = set()
    monkeypatch.setattr(
        Stopwatch, "time", lambda self, kernel, *_: seen.add(kernel.name) or run.Timing(5.0)
    )
    sweep = Sweep(SMALL, (1.0, 2.0), (1.0,), (1.0,))
    assert measure([sweep], Stopwatch(), CPU)[0].grids == () and not seen
    monkeypatch.setattr(
        Stopwatch,
        "candidates",
        lambda self, call: [(k, call, None) for k in kernels_of("linear").values()],
    )
    made, _ = measure([sweep], Stopwatch(), CPU)
    assert made.grids[0].kind == SMALL and len(made.grids[0].us) == len(seen) == 4


NEAR = linears.product(4096, 4096, *RESIDUAL), linears.product(6144, 4096, *NORM)
FAST, SLOW = (10.0, 20.0, 90.0), (12.0, 30.0, 40.0)


@pytest.mark.parametrize(
    ("outs", "width", "asks", "found"),
    [
        (4096, 4096, RESIDUAL, 0),
        (4096, 4096, NORM, 1),
        (3072, 2048, NORM, 1),
        (2048, 2048, RESIDUAL, 0),
        (2048, 2048, (), 0),
    ],
)
def test_the_nearest_shape_speaks_for_a_call(outs, width, asks, found):
    made = table(*(grid(shape, {}) for shape in NEAR))
    for dtype in (torch.bfloat16, torch.float16):
        assert made.nearest(problem(outs, width, *asks, dtype=dtype))[0].kind == NEAR[found]
    assert made.nearest(problem(outs, width, *asks, dtype=torch.float32)) is None


@pytest.mark.parametrize("rows", [65, 4096])
def test_no_time_speaks_for_more_rows_than_were_timed(rows):
    """Though it says that `triton` is fast: a compiler fuses torch's ops, and else they are two
    launches."""
    made = table(*(grid(shape, {"triton": FAST, "aten": SLOW}) for shape in NEAR))
    asked = problem(6144, 4096, *NORM, rows=rows)
    assert made.nearest(asked) is None
    for compiled, name in ((True, "aten"), (False, "triton_aten")):
        assert select_by(made, altered(asked, compiled=compiled)).kernel.name == name


def test_the_bounds_of_rows_agree():
    assert {linears.ROWS[-1], MOST_TIMED, MOST_ROWS, ROWS} == {64}


@pytest.mark.parametrize("rows", [1, 64])
def test_the_choice_is_that_of_the_measured_times(rows):
    asked = problem(6144, 4096, *NORM, rows=rows)
    for us, name in (
        ({"triton": FAST, "aten": SLOW}, "triton"),
        ({"triton": SLOW, "aten": FAST}, "aten"),
    ):
        decision = select_by(table(*(grid(shape, us) for shape in NEAR)), asked)
        assert decision.kernel.name == name and decision.costs[name].how == MEASURED


def test_times_grow_with_the_weight_and_scale_to_a_sibling():
    made = table(grid(NEAR[0], {"triton": FAST, "aten": SLOW}))
    kernels = [kernels_of("linear")["aten"]]
    us = [
        costs(problem(outs, 4096, *RESIDUAL), kernels, made)["aten"].us
        for outs in (2048, 4096, 8192)
    ]
    assert us == [12.0, 12.0, 24.0]
    [there] = scaled(made, "NVIDIA H100 80GB HBM3").grids
    assert there.us["aten"][0] > SLOW[0]
