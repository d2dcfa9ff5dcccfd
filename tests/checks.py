"""A comparison that the grids of several kernels share."""

import pytest

from attnops.core.kernel import Kernel
from attnops.testing import Call, check_kernel


def right_or_skipped(kernel: Kernel, call: Call) -> None:
    """The kernel's results are within the budget; skips a call that it refuses, with the reasons."""
    figures = check_kernel(kernel, call)
    if figures.refused:
        pytest.skip(str(figures))
    assert figures.worst <= 1.0, figures
