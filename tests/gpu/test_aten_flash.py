"""torch's own FlashAttention-2 on a real GPU: what the wrap of its dense and packed calls relies
on, gradients included."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.testing import Call, Features, Source, gradient_call, make_call
from tests.checks import right

BF16 = torch.bfloat16
# (query heads, heads of keys, head dim)
HEADS = ((4, 4, 64), (4, 2, 128), (6, 2, 96), (8, 2, 192), (8, 1, 256))
WINDOWS = ((-1, -1), (33, -1), (16, 5), (-1, 3), (0, 0), (400, 400))
RAGGED = ((5, 0, 1, 130, 64, 7), (5, 3, 70, 130, 200, 0))
ODD = (((1, 0, 1), (5, 3, 7)), ((1, 1), (9, 0)), ((0, 0), (3, 0)), ((300,), (2,)))
DENSE = ((2, 77, 77), (2, 130, 70), (2, 70, 130), (3, 1, 90))


def checked(call: Call) -> None:
    for one in (call, gradient_call(Source(4, "cuda"), call)):
        right(kernels_of(one.op)["aten_flash"], one)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), HEADS)
def test_windows(
    q_heads: int, kv_heads: int, dim: int, causal: bool, window: tuple[int, int]
) -> None:
    f = Features(
        dtype=BF16,
        head_dim=dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
        causal=causal,
        window=window,
        lse=True,
    )
    for lengths in (RAGGED, *(ODD if causal and window == (-1, -1) else ())):
        for padding in ((0, 0), (3, 70)):
            checked(
                make_call("varlen_attention", Source(dim, "cuda"), *lengths, f, padding=padding)
            )
    for sizes in DENSE if window in WINDOWS[:3] else ():
        if causal or window == (-1, -1) or sizes[1] <= sizes[2]:  # it refuses the others
            checked(make_call("attention", Source(1, "cuda"), *sizes, f))


def test_rows_that_do_not_start_at_16_bytes() -> None:
    call = make_call(
        "attention", Source(1, "cuda"), 2, 50, 50, Features(dtype=BF16, head_dim=64, causal=True)
    )
    checked(
        call.map(
            lambda n, t: torch.cat([t, t[..., :1]], -1)[..., :-1] if n in ("query", "value") else t
        )
    )
