"""DDP and FSDP2 over two processes with gloo: what one process over the whole batch computes."""

import pytest
import torch

from tests.distributed import CASES, STEPS, check, results

# A gradient is a sum of the same terms in another order; each step starts from parameters that differ by as much.
LIMIT = STEPS * 256 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def found(request, tmp_path_factory):
    return results("cpu", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name, found):
    check(found[name], LIMIT)
