"""Kernels that are torch ops lowered in place: what Inductor makes of them on a GPU gives what they give eagerly."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, all_kernels
from attnops.core.record import changed, split
from attnops.ops import OPS
from attnops.testing import CASES, Source, refusals
from attnops.testing.check import check_kernel

INLINE = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels() if k.fused]


@pytest.mark.parametrize("kernel", INLINE)
def test_compiled_in_place_keeps_the_contract(kernel: Kernel) -> None:
    """Compared with the reference as every kernel is; integers must be the same to the last one."""
    packet, policy = OPS[kernel.op].packet.default, f"kernel={kernel.op}:{kernel.name}"

    def run(call: Any) -> Any:
        return torch.compile(lambda a, k: packet(*a, **k), fullgraph=True, dynamic=False)(*split(changed(call, policy=policy)))

    compiled = replace(kernel, run=run, contract=2)
    cases = [c for c in CASES[kernel.op] if not refusals(kernel, c.build(Source(0, "cuda")))]
    if not cases:
        pytest.skip("takes no case on this GPU")
    for seed, case in enumerate(random.Random(0).sample(cases, min(2, len(cases)))):
        torch._dynamo.reset()
        with torch.no_grad():
            check_kernel(compiled, case.build(Source(seed, "cuda")))
