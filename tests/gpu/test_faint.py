"""Faint rows on a GPU, by every kernel that the machine has: the calls of tests/test_faint.py."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from tests import faint


@pytest.mark.parametrize(("op", "name", "way", "dtype"), faint.runs())
def test_a_faint_row_harms_no_other(op: str, name: str, way: str, dtype: torch.dtype) -> None:
    faint.checked(kernels_of(op)[name], way, dtype, "cuda")
