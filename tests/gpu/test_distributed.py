"""DDP and FSDP2 over two GPUs with nccl, compiled by Inductor: what one GPU over the whole batch
computes, in bfloat16."""

from typing import Any

import pytest
import torch

from tests.distributed import CASES, WORLD, check, results

pytestmark = pytest.mark.alone  # other processes of the suite see one GPU each

# A gradient is rounded to bfloat16 before its sum over the processes, and after it where one
# process has them all. The weights of the tiny model have ten times the usual spread, and with them
# a rounding grows: autocast steps on a CPU are 0.04 apart.
LIMIT = 0.15


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    if (count := torch.cuda.device_count()) < WORLD:
        pytest.skip(f"{WORLD} processes need as many GPUs; this machine has {count}")
    return results("cuda", "inductor", [*CASES], tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_are_one(name: str, ranks: dict[str, list[Any]], found: dict[str, Any]) -> None:
    losses, moved = check(ranks[name], LIMIT)
    found.setdefault("distributed", {})[name] = (
        f"losses within {losses:.1e}, parameters within {moved:.1e}"
    )
