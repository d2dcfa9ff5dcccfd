"""Kernels on a GPU that is not the current one, and libraries that are loaded once for each GPU."""

from typing import Any

import pytest
import torch

from attnops.kernel import Kernel, all_kernels
from attnops.problem import Refusal
from attnops.testing import CASES, Call, Source, check_kernel, refusals

pytestmark = pytest.mark.alone  # other processes of the suite see one GPU each

FOREIGN = [kernel for kernel in all_kernels() if kernel.packages]


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"a GPU that is not the current one needs two; this machine has {count}")


def taken(kernel: Kernel, device: str) -> Call:
    """The first case of the grid that the kernel takes; skips with the last reasons where it takes none."""
    why: tuple[Refusal, ...] = ()
    for seed, case in enumerate(CASES[kernel.op]):
        call = case.build(Source(seed, device))
        if not (why := refusals(kernel, call)):
            return call
    pytest.skip("; ".join(map(str, why)))


@pytest.mark.parametrize("kernel", FOREIGN, ids=lambda k: f"{k.op}.{k.name}")
def test_numerics_on_each_in_turn(kernel: Kernel, found: dict[str, Any]) -> None:
    """What is loaded or compiled for one of them serves that one alone."""
    worst = 0.0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        call = taken(kernel, device)
        with torch.cuda.device(0):
            figures = check_kernel(kernel, call)
            torch.cuda.synchronize(device)
            assert torch.cuda.current_device() == 0
        worst = max(worst, figures.worst)
    assert worst <= 1.0
    found.setdefault("another_gpu", {})[f"{kernel.op}.{kernel.name}"] = round(worst, 4)
