"""The schemas of the foreign ops, as the loaded libraries register them, against what tests/standins/schemas.py pins."""

from importlib.util import find_spec

import pytest
import torch

from attnops.core.problem import Target
from attnops.kernels.sgl import wheel
from tests.standins.schemas import COMMON, OPS, READ_IN, Foreign

pytestmark = pytest.mark.skipif(find_spec("sgl_kernel") is None, reason="sgl_kernel is not installed, so its schemas cannot be compared")


@pytest.mark.parametrize("foreign", OPS, ids=lambda f: f.name)
def test_the_loaded_op_has_the_pinned_schema(foreign: Foreign) -> None:
    version = wheel.package().version()
    if version not in (None, READ_IN):
        pytest.skip(f"sgl_kernel {version}; the schemas were read in {READ_IN}")
    library = wheel.common_ops(Target.of(torch.device("cuda", 0))) if foreign.library == COMMON else foreign.library
    if wheel.library(library) is None:
        pytest.skip(f"this wheel was cut down: no {library}")
    wheel.load(foreign.name, library)
    loaded = str(getattr(torch.ops.sgl_kernel, foreign.name).default._schema)
    assert loaded == str(torch._C.parse_schema(f"sgl_kernel::{foreign.schema}"))
