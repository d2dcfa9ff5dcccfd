"""Kernels on a GPU that is not the current one, and libraries that are loaded once for each GPU."""

import pytest
import torch

from attnops.core.kernel import Kernel, all_kernels
from attnops.core.problem import Refusal
from attnops.testing import CASES, Call, Source, refusals
from tests.checks import right

pytestmark = pytest.mark.alone  # other processes of the suite see one GPU each

FOREIGN = [kernel for kernel in all_kernels() if kernel.packages]


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"a GPU that is not the current one needs two; this machine has {count}")


def taken(kernel: Kernel, device: str) -> Call:
    """The first case of the grid that the kernel takes; skips with the last reasons where it takes
    none."""
    why: tuple[Refusal, ...] = ()
    for seed, case in enumerate(CASES[kernel.op]):
        call = case.build(Source(seed, device))
        if not (why := refusals(kernel, call)):
            return call
    pytest.skip("; ".join(map(str, why)))


@pytest.mark.parametrize("kernel", FOREIGN, ids=lambda k: f"{k.op}.{k.name}")
def test_numerics_on_each_in_turn(kernel: Kernel) -> None:
    """What is loaded or compiled for one of them serves that one alone."""
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        call = taken(kernel, device)
        with torch.cuda.device(0):
            right(kernel, call)
            torch.cuda.synchronize(device)
            assert torch.cuda.current_device() == 0


def test_experts_are_packed_where_they_lie() -> None:
    """Weights of MXFP4 on a GPU that is not the current one, and back."""
    from attnops.hf import pack_experts, unpack_experts
    from tests.hf.test_mxfp4 import gpt_oss

    for _ in range(3):
        model = gpt_oss()
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.to("cuda:1")
        with torch.cuda.device(0):
            assert pack_experts(model) == len(model.model.layers)
            unpack_experts(model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.cpu(), want[name]), name
