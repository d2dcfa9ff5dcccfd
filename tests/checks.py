"""Results of a call, and comparisons that tests of several kernels share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnops.core.kernel import Kernel, all_kernels
from attnops.testing import CASES, Call, Figures, check_kernel
from attnops.testing.check import clone, named_results


@torch.no_grad()
def results(run: Callable[[Any], Any], call: Call) -> dict[str, Tensor]:
    """What `run` returns or writes of copies of the call's tensors, by name."""
    fresh = call.map(lambda _, x: clone(x))
    return named_results(fresh, run(fresh.record), call.op)


def runs_here(kernel: Kernel) -> bool:
    """Has this machine what the kernel wants of one? Whether it takes a call is another
    question."""
    refused = kernel.refusals(CASES[kernel.op][0].call().problem)
    return not {r.field for r in refused} & {"package", "target", "device"}


def those(wanted: Callable[[Kernel], bool] = runs_here) -> list[Any]:
    """Parameters of a test: the kernels that are wanted."""
    return [pytest.param(k, id=f"{k.op}-{k.name}") for k in all_kernels() if wanted(k)]


def case_of(op: str, label: str) -> Call:
    """The call of a case."""
    [case] = [case for case in CASES[op] if case.label == label]
    return case.call()


def right_or_skipped(kernel: Kernel, call: Call) -> None:
    """The kernel's results are within the budget; skips a call that it refuses, with the
    reasons."""
    figures = check_kernel(kernel, call)
    if figures.refused:
        pytest.skip(str(figures))


def right(kernel: Kernel, call: Call) -> Figures:
    """The figures of a kernel that takes the call. Raises Mismatch."""
    figures = check_kernel(kernel, call)
    assert not figures.refused, figures
    return figures
