"""Measured times of layers that carry a state: what is counted, and the choice by them."""

import warnings

import pytest
import torch

from attnops.core import errors
from attnops.core.errors import NotFast
from attnops.core.flops import flops_of
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, pretend
from attnops.core.select import choose, select_by
from attnops.core.told import installs
from attnops.measured import Grid, Sizes, Table, distance, place, work
from attnops.ops import OPS
from attnops.ops.recurrent.timed import CONV, RULE, SCAN
from attnops.ops.sweeps import decoding, toy
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import call_of, problem_at

H200 = Target("cuda", 90, ("triton",), "NVIDIA H200")
KINDS = {kind.op: kind for kind in (RULE, SCAN, CONV)}
TWICE = ("q_heads", "in_features")
GATES = {"decay", "beta", "dt", "a", "d", "dt_bias", "cu_seqlens_q"}
STEP, TOKENS = Sizes(8, 1, 1), Sizes(2, 512, 1)


def small(kind):
    return altered(toy(kind), in_features=24) if kind.in_features else toy(kind)


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("at", [Sizes(3, 1, 1), Sizes(2, 5, 1)], ids=["step", "tokens"])
def test_bytes_and_operations_are_those_of_the_call(op, at):
    """States are read and written. What a head has of a token is left out."""
    kind = small(KINDS[op])
    call = call_of(kind, at, Pool("cpu"))
    moved = {n: t.nbytes for n, t in call.tensors().items() if n not in GATES}
    assert work(kind, at).bytes == sum(moved.values()) + moved["state"]
    if OPS[op].flops:
        assert work(kind, at).flops == flops_of(OPS[op], *call.args, **call.kwargs)


@pytest.mark.parametrize("part", ["bias", "activation"])
def test_a_convolution_is_nearest_to_those_with_the_same_parts(part):
    other = altered(CONV, asks=CONV.asks ^ {part})
    assert distance(CONV, CONV) < distance(CONV, other) < float("inf")


@pytest.mark.parametrize("op", KINDS)
def test_states_stay_small_at_any_length(op):
    """A timed call may be made again and again on the states that it has left."""
    call = call_of(small(KINDS[op]), Sizes(1, 64, 1), Pool("cpu"))
    for _ in range(16):
        kernels_of(op)["aten"].run(call.record)
    assert all(bool(t.isfinite().all()) for t in call.tensors().values())


@pytest.mark.parametrize("op", KINDS)
def test_the_choice_follows_the_times_of_a_kind(op):
    """Of the same kind and of one with twice the heads or channels, but of no other width of
    numbers, and of no other phase."""
    kind = KINDS[op]
    step = decoding(kind)
    for timed, at in ((step, STEP), (kind, TOKENS)):
        axes = (at.batch,), (at.queries,), (1.0,)
        grid = Grid(timed, *axes, {"aten": (1.0,), "triton": (9.0,)})
        table = Table("NVIDIA H200", "sm90", {f"{op}.{name}": "" for name in grid.us}, (grid,))
        p = problem_at(kind, at, H200)
        more = altered(p, **{n: 2 * getattr(p, n) for n in TWICE})
        assert distance(timed, p) == 0 and place(timed, p) == at
        assert 0 < distance(timed, more) < 2 and place(timed, more).batch == 2 * at.batch
        assert select_by(table, p).kernel.name == select_by(table, more).kernel.name == "aten"
        wide = altered(p, dtype=torch.float32, kv_dtype=torch.float32)
        [other] = {STEP, TOKENS} - {at}
        for elsewhere in (wide, problem_at(kind, other, H200)):
            assert distance(timed, elsewhere) == float("inf")
            assert select_by(table, elsewhere).kernel.name == "triton"


# Torch's own ops, where no package brings a kernel -----------------------------------------------


def bare(op, packages=(), gpu="NVIDIA H200", dtype=torch.bfloat16):
    """A prompt on a GPU with these packages, or on a CPU."""
    target = Target("cuda", 90, packages, gpu) if gpu else Target("cpu", 0, packages)
    return altered(problem_at(KINDS[op], TOKENS, target), dtype=dtype, kv_dtype=dtype)


@pytest.mark.parametrize("op", KINDS)
def test_a_stand_in_on_a_gpu_warns_once_and_says_what_to_install(op, monkeypatch):
    monkeypatch.setattr(errors, "_WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(bare(op, ("triton",)))
        choose(bare(op, gpu=""))
        choose(bare(op, dtype=torch.float64))  # no package has a kernel of it
        with pretend(Target("cuda", 90)):
            choose(bare(op))
        with pytest.raises(NotFast, match=rf"{op} runs as torch's own ops on NVIDIA H200 \(sm90\)"):
            choose(bare(op))
        assert choose(bare(op)).name == "aten"
    assert "for triton: pip install triton" in installs(kernels_of(op)["aten"], bare(op))
    assert not installs(kernels_of(op)["aten"], bare(op, ("triton",)))
