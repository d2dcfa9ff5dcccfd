"""`triton` on a GPU, beyond what every kernel is asked: stages that overlap, and how many kernels
are compiled."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.triton.launch import grids
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, make_call
from tests.gpu.helpers import captured

BF16 = torch.bfloat16
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True, lse=True)

PAGED, LATENT = "paged_attention", "mla_attention"
OVERLAPPING = {
    PAGED: ((1,) * 8, (20000, 1, 70, 3000, 9000, 4096, 17, 0), 16, LLAMA),
    LATENT: ((1,) * 4, (20000, 70, 0, 5000), 64, replace(DEEPSEEK, lse=True)),
}


@pytest.mark.parametrize("op", OVERLAPPING)
def test_stages_that_overlap_give_what_stages_in_turn_give(op: str) -> None:
    """Stage two is launched while stage one runs and must wait for it: bit for bit, time and again,
    in a captured graph too."""
    from attnops.kernels.triton.launch.attention import attention

    call = make_call(op, Source(2, "cuda"), *OVERLAPPING[op])
    for splits in (2, 7, 40):
        choice = grids.Choice(grids.Tile(16, 32, 4, 2), splits)
        attention(call.record, choice._replace(overlap=False))
        want = {n: call.arguments[n].clone() for n in ("output", "lse")}
        launch = partial(attention, call.record, choice)
        graph, _ = captured(launch)
        for step in range(50):
            for n in want:
                call.arguments[n].fill_(float("nan"))
            (graph.replay if step % 2 else launch)()
            for n, x in want.items():
                how = "replayed" if step % 2 else "launched"
                assert torch.equal(call.arguments[n], x), (
                    f"{splits} splits, {how}, time {step}: {n} differs"
                )


def test_a_generate_run_compiles_few_kernels() -> None:
    from attnops.kernels.triton.device.attend import attend
    from attnops.kernels.triton.device.merge import combine

    def compiled() -> tuple[int, int]:
        attending, combining = (
            len(kernel.device_caches[torch.cuda.current_device()][0])
            for kernel in (attend, combine)
        )
        return attending, combining

    before = compiled()
    f = Features(dtype=BF16, head_dim=96, q_heads=6, kv_heads=2, causal=True)
    for queries, requests, keys in product(
        (1, 2, 7, 8, 33, 65, 300), (1, 2, 5, 16), (300, 700, 1100, 4096)
    ):
        call = make_call(PAGED, Source(0, "cuda"), (queries,) * requests, (keys,) * requests, 16, f)
        kernels_of(PAGED)["triton"].run(call.record)
    after = compiled()
    assert after[0] - before[0] <= 12 and after[1] - before[1] <= 2
