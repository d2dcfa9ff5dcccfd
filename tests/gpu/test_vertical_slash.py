"""Vertical-slash attention on a real GPU, beyond the grid: long requests, and memory beside lse."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.ops.sparse.vertical_slash_cases import HALF
from attnops.testing import Source, make_call
from tests.checks import right
from tests.gpu.helpers import need

KERNEL = kernels_of("vertical_slash_attention")["sgl_sparse"]
INDEX = kernels_of("vertical_slash_indexes")["sgl_sparse"]


@pytest.fixture(autouse=True)
def usable() -> None:
    need(KERNEL, make_call("vertical_slash_attention", Source(0, "cuda"), (3,), (70,), HALF))


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [((2048,), (2048,)), ((1000, 3, 777), (3000, 64, 777)), ((1, 1, 130), (4096, 1, 131))],
)
def test_long_requests(q_lens: tuple[int, ...], k_lens: tuple[int, ...]) -> None:
    source = Source(5, "cuda")
    right(
        KERNEL,
        make_call(
            "vertical_slash_attention", source, q_lens, k_lens, HALF, verticals=200, slashes=20
        ),
    )
    right(
        INDEX, make_call("vertical_slash_indexes", source, q_lens, k_lens, 4, 200, 20, counted=True)
    )


@pytest.mark.parametrize(
    ("q_lens", "padding", "slack"),
    [
        ((64, 64, 64), 0, 0),
        ((64, 10, 3), 0, 0),
        ((64, 64, 3, 64), 0, 0),
        ((3,), 0, 200),
        ((3, 0, 2), 1, 64),
        ((2048, 1, 1, 1), 0, 0),
    ],
)
def test_the_lse_of_ragged_requests(q_lens: tuple[int, ...], padding: int, slack: int) -> None:
    """The wheel's kernel writes `[B, Hq, max_seqlen_q]` into memory for `[Hq, T]`: what is
    allocated near it must stay as it was."""
    lens = [n + 70 for n in q_lens]
    call = make_call(
        "vertical_slash_attention",
        Source(8, "cuda"),
        q_lens,
        lens,
        HALF,
        padding=(padding, 0),
        slack=slack,
    )
    # Freed memory of the size of the kernel's own lse lies between the witnesses, so that it is
    # allocated there.
    size = call.arguments["lse"].shape
    held = [torch.full(size, 7.0, device="cuda") for _ in range(65)]
    witnesses = held[::2]
    del held
    right(KERNEL, call)
    torch.cuda.synchronize()
    assert all(bool((w == 7.0).all()) for w in witnesses), "memory of others was written"
