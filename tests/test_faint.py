"""Faint rows on a CPU: kernels of torch, those of foreign packages over stand-ins, and Triton's in the interpreter."""

from contextlib import nullcontext

import pytest

from attnops.kernel import kernels_of
from attnops.problem import pretend
from tests import faint
from tests.standins import aten_flash, cudnn, flash_attn_cute, mem_efficient
from tests.standins.test_fa4 import SM90 as WITH_FA4
from tests.standins.test_turns import SM90, flex_on_a_cpu
from tests.triton.process import interpreted
from tests.triton.test_numerics import SM90 as WITH_TRITON

STANDINS = {
    "aten_flash": aten_flash.installed, "cudnn": cudnn.installed, "fa4": flash_attn_cute.installed, "flex": flex_on_a_cpu,
    "mem_efficient": mem_efficient.installed,
}  # fmt: skip
ON_CPU = ("reference", "sdpa", "aten_flash", "flex")
ON_CUDA = [(op, "flex") for op in faint.BACKWARD] + [(op, "aten_flash") for op in faint.FORWARD[1:] + faint.BACKWARD[1:]]
"""Kernels that the CPU has a stand-in of alone."""
RUNS = faint.runs()
HERE = [(*run, False) for run in RUNS if run[1] in ON_CPU and run[:2] not in ON_CUDA] + [(*run, True) for run in RUNS if run[1] in STANDINS]
OURS = [run for run in RUNS if run[1] == "triton"]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("op", "name", "way", "dtype", "standin"), HERE)
def test_a_faint_row_harms_no_other(op, name, way, dtype, standin):
    target = (WITH_FA4 if name == "fa4" else SM90) if standin else None
    with STANDINS[name]() if standin else nullcontext(), pretend(target) if standin else nullcontext():
        faint.checked(kernels_of(op)[name], way, dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("op", "name", "way", "dtype"), OURS)
@interpreted
def test_triton(op, name, way, dtype):
    with pretend(WITH_TRITON):
        faint.checked(kernels_of(op)[name], way, dtype)


MERGES = [k for op in ("merge_state", "merge_states") for k in kernels_of(op).values() if k.name in ("reference", "triton")]


@pytest.mark.parametrize(("op", "name"), [(k.op, k.name) for k in MERGES])
@interpreted
def test_merges(op, name):
    faint.merges(kernels_of(op)[name])
