"""Comparisons that tests of several kernels share."""

import pytest

from attnops.core.kernel import Kernel
from attnops.testing import Call, Figures, check_kernel


def right_or_skipped(kernel: Kernel, call: Call) -> None:
    """The kernel's results are within the budget; skips a call that it refuses, with the reasons."""
    figures = check_kernel(kernel, call)
    if figures.refused:
        pytest.skip(str(figures))


def right(kernel: Kernel, call: Call) -> Figures:
    """The figures of a kernel that takes the call. Raises Mismatch."""
    figures = check_kernel(kernel, call)
    assert not figures.refused, figures
    return figures
