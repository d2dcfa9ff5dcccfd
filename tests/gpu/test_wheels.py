"""The wheels of sgl-kernel and FlashMLA that are installed: the schemas that tests/standins pins,
and FlashMLA's kernels over each."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.sources import Source as Wheel, source
from attnops.testing import CASES, Source
from tests.gpu.helpers import figures_of, judge
from tests.standins.schemas import COMMON, LEGACY_OPS, OPS, READ_IN, Foreign

KERNELS = [
    pytest.param(kernel, id=f"{kernel.op}.{kernel.name}")
    for op in ("mla_attention", "sparse_mla_attention", "decode_rows")
    for kernel in kernels_of(op).values()
    if kernel.name.startswith("flashmla")
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_flashmla_over_each_wheel(
    kernel: Kernel, flashmla_wheel: Wheel, found: dict[str, Any]
) -> None:
    module = flashmla_wheel.package.module
    with pretend(replace(Target.of(torch.device("cuda")), assume=(module, "triton"))):
        assert source() is flashmla_wheel
        calls = [
            (str(case), partial(case.build, Source(seed, "cuda")))
            for seed, case in enumerate(CASES[kernel.op])
        ]
        done = figures_of(kernel, calls, [])
    found["flashmla_wheels"] = {f"{module}.{kernel.op}.{kernel.name}": done}
    judge(done)


@pytest.mark.parametrize("schema", LEGACY_OPS, ids=lambda text: text.partition("(")[0])
def test_the_second_wheel_has_the_pinned_schemas(schema: str, flashmla_wheel: Wheel) -> None:
    if flashmla_wheel.namespace != "flash_mla_legacy":
        pytest.skip("the other test compares the first wheel's")
    pinned = torch._C.parse_schema(f"flash_mla_legacy::{schema}")
    loaded = getattr(flashmla_wheel.ops, schema.partition("(")[0]).default._schema
    assert str(loaded) == str(pinned)


@pytest.mark.skipif(
    find_spec("sgl_kernel") is None,
    reason="sgl_kernel is not installed, so its schemas cannot be compared",
)
@pytest.mark.parametrize("foreign", OPS, ids=lambda f: f.name)
def test_the_loaded_op_has_the_pinned_schema(foreign: Foreign) -> None:
    version = wheel.package().version()
    if version not in (None, READ_IN):
        pytest.skip(f"sgl_kernel {version}; the schemas were read in {READ_IN}")
    library = (
        wheel.common_ops(Target.of(torch.device("cuda", 0)))
        if foreign.library == COMMON
        else foreign.library
    )
    if wheel.library(library) is None:
        pytest.skip(f"this wheel was cut down: no {library}")
    wheel.load(foreign.name, library)
    loaded = str(getattr(torch.ops.sgl_kernel, foreign.name).default._schema)
    assert loaded == str(torch._C.parse_schema(f"sgl_kernel::{foreign.schema}"))
