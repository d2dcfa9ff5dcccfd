"""The kernel against the contract of its op. `pip install . && pytest`."""

import pytest

from attnops.core.kernel import kernels_of
from attnops.testing import CASES, check_kernel

PLAIN = kernels_of("attention")["plain"]  # found by the entry point: nothing here imports it
RUNS = [case for case in CASES["attention"] if not check_kernel(PLAIN, case.call(seed=0)).refused]


def test_it_runs_somewhere():
    assert RUNS


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_contract(case):
    assert check_kernel(PLAIN, case.call(seed=1)).worst <= 1
