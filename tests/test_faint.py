"""Faint rows on a CPU: kernels of torch, those of foreign packages over stand-ins, and Triton's in
the interpreter."""

from contextlib import nullcontext

import pytest

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from tests import faint
from tests.standins.vendors import VENDORS
from tests.triton.checks import SM90 as WITH_TRITON
from tests.triton.process import interpreted

STANDINS = ("aten_flash", "cudnn", "fa4", "flex", "mem_efficient")
ON_CPU = ("reference", "sdpa", "aten_flash", "flex")
ON_CUDA = [(op, "flex") for op in faint.BACKWARD] + [
    (op, "aten_flash") for op in faint.FORWARD[1:] + faint.BACKWARD[1:]
]
"""Kernels that the CPU has a stand-in of alone."""
RUNS = faint.runs()
HERE = [(*run, False) for run in RUNS if run[1] in ON_CPU and run[:2] not in ON_CUDA] + [
    (*run, True) for run in RUNS if run[1] in STANDINS
]
OURS = [run for run in RUNS if run[1] == "triton"]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("op", "name", "way", "dtype", "standin"), HERE)
def test_a_faint_row_harms_no_other(op, name, way, dtype, standin):
    with VENDORS[name].running() if standin else nullcontext():
        faint.checked(kernels_of(op)[name], way, dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("op", "name", "way", "dtype"), OURS)
@interpreted
def test_triton(op, name, way, dtype):
    with pretend(WITH_TRITON):
        faint.checked(kernels_of(op)[name], way, dtype)


MERGES = [
    k
    for op in ("merge_state", "merge_states")
    for k in kernels_of(op).values()
    if k.name in ("reference", "triton")
]


@pytest.mark.parametrize(("op", "name"), [(k.op, k.name) for k in MERGES])
@interpreted
def test_merges(op, name):
    faint.merges(kernels_of(op)[name])
