"""DDP and FSDP2 over two processes with gloo: what one process over the whole batch computes."""

from functools import cache

import pytest
import torch

from tests.distributed import CASES, STEPS, check, results

# A gradient is a sum of the same terms in another order; each step starts from parameters that
# differ by as much.
LIMIT = STEPS * 256 * torch.finfo(torch.float32).eps


# One start of two processes each. The compiler that is cheap has one compiled case of each model
# and of each way.
RUNS = {
    "aot_eager": [
        n for n in CASES if n not in ("attnops.nn, fsdp2, compiled", "transformers, ddp, compiled")
    ],
    "inductor": [*CASES],
}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the processes find, of the cases that this run has."""
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]

    def of(backend):
        names = [each["name"] for each in asked if each["backend"] == backend]
        return results("cpu", backend, names, tmp_path_factory.mktemp("ranks"))

    return cache(of)


@pytest.mark.sweep(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(run, name, marks=[pytest.mark.full] * (run == "inductor"))
        for run, names in RUNS.items()
        for name in names
    ],
)
def test_two_processes_are_one(backend, name, found):
    check(found(backend)[name], LIMIT)
