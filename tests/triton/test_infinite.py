"""As tests/ops/test_infinite.py, for `triton` through the interpreter, with keys whole and
split."""

from contextlib import nullcontext

import pytest

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from tests.ops.test_infinite import CHECKS, cases_of
from tests.triton.checks import SM90, mode
from tests.triton.process import interpreted
from tests.triton.test_decode import many_splits

WAYS = {"whole": nullcontext, "split": lambda: mode("split"), "many splits": many_splits}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [op for op in CHECKS if "triton" in kernels_of(op)])
@interpreted
def test_infinity_is_no_nan(op):
    kernel = kernels_of(op)["triton"]
    with pretend(SM90):
        calls = cases_of(kernel)
    assert calls
    for call in calls:
        for way in WAYS.values():
            with way():
                CHECKS[op](kernel, call)
