"""FlashMLA's kernels over each wheel that is installed. The other tests take the first of them."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl.sources import Source as Wheel, source
from attnops.testing import CASES, Source
from tests.gpu.helpers import figures_of, judge
from tests.standins.schemas import LEGACY_OPS

KERNELS = [
    pytest.param(kernel, id=f"{kernel.op}.{kernel.name}")
    for op in ("mla_attention", "sparse_mla_attention", "decode_rows")
    for kernel in kernels_of(op).values()
    if kernel.name.startswith("flashmla")
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_numerics(kernel: Kernel, flashmla_wheel: Wheel, found: dict[str, Any]) -> None:
    module = flashmla_wheel.package.module
    with pretend(replace(Target.of(torch.device("cuda")), assume=(module, "triton"))):
        assert source() is flashmla_wheel
        calls = [(str(case), partial(case.build, Source(seed, "cuda"))) for seed, case in enumerate(CASES[kernel.op])]
        done = figures_of(kernel, calls, [])
    found["flashmla_wheels"] = {f"{module}.{kernel.op}.{kernel.name}": done}
    judge(done)


@pytest.mark.parametrize("schema", LEGACY_OPS, ids=lambda text: text.partition("(")[0])
def test_the_second_wheel_has_the_pinned_schemas(schema: str, flashmla_wheel: Wheel) -> None:
    if flashmla_wheel.namespace != "flash_mla_legacy":
        pytest.skip("test_schemas.py compares the first wheel's")
    pinned = torch._C.parse_schema(f"flash_mla_legacy::{schema}")
    loaded = getattr(flashmla_wheel.ops, schema.partition("(")[0]).default._schema
    assert str(loaded) == str(pinned)
