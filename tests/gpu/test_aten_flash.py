"""torch's own FlashAttention-2 on a real GPU: what the wrap of its dense and packed calls relies on, gradients included."""

from typing import Any

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.testing import Call, Features, Source, check_kernel, gradient_call, make_call

BF16, F16 = torch.bfloat16, torch.float16
LENGTHS = ((5, 0, 1, 130, 64, 7), (5, 3, 70, 130, 200, 0))
HEADS = ((4, 4), (4, 2), (6, 2), (8, 2), (8, 1))


def checked(call: Call) -> None:
    for one in (call, gradient_call(Source(4, "cuda"), call)):
        figures = check_kernel(kernels_of(one.op)["aten_flash"], one)
        assert not figures.refused and figures.worst <= 1.0, figures


@pytest.mark.parametrize("window", [(-1, -1), (33, -1), (16, 5), (-1, 3), (0, 0), (400, 400)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_requests(causal: bool, window: tuple[int, int]) -> None:
    for seed, (heads, dim) in enumerate(zip(HEADS, (64, 128, 96, 192, 256), strict=True)):
        f = Features(dtype=BF16, head_dim=dim, q_heads=heads[0], kv_heads=heads[1], causal=causal, window=window, lse=True)
        for padding in ((0, 0), (3, 70)):
            checked(make_call("varlen_attention", Source(seed, "cuda"), *LENGTHS, f, padding=padding))


@pytest.mark.parametrize("lengths", [((1, 0, 1), (5, 3, 7)), ((1, 1), (9, 0)), ((0, 0), (3, 0)), ((300,), (2,))], ids=str)
def test_odd_batches(lengths: Any) -> None:
    for padding in ((0, 0), (1, 2)):
        q_lens, k_lens = lengths
        checked(
            make_call(
                "varlen_attention",
                Source(0, "cuda"),
                q_lens,
                k_lens,
                Features(dtype=F16, head_dim=64, causal=True, lse=True),
                padding=padding,
            )
        )


@pytest.mark.parametrize("sizes", [(2, 77, 77), (2, 130, 70), (2, 70, 130), (3, 1, 90)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (33, -1), (16, 5)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_dense(causal: bool, window: tuple[int, int], sizes: tuple[int, int, int]) -> None:
    if window != (-1, -1) and not causal and sizes[1] > sizes[2]:
        pytest.skip("refused: more queries than keys")
    for heads, dim in zip(HEADS, (64, 128, 96, 192, 256), strict=True):
        f = Features(dtype=BF16, head_dim=dim, q_heads=heads[0], kv_heads=heads[1], causal=causal, window=window, lse=True)
        checked(make_call("attention", Source(1, "cuda"), *sizes, f))


def test_rows_that_do_not_start_at_16_bytes() -> None:
    call = make_call("attention", Source(1, "cuda"), 2, 50, 50, Features(dtype=BF16, head_dim=64, causal=True))
    checked(call.map(lambda n, t: torch.cat([t, t[..., :1]], -1)[..., :-1] if n in ("query", "value") else t))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_training_step_stays_off_the_formulas(packed: bool) -> None:
    q, k, v = (torch.randn(2, 512, n, 128, dtype=BF16, device="cuda", requires_grad=True) for n in (8, 2, 2))
    with torch.profiler.profile() as profile:
        if packed:
            cu = torch.tensor([0, 512, 1024], dtype=torch.int32, device="cuda")
            a, b, c = (x.flatten(0, 1) for x in (q, k, v))
            out = attnops.varlen_attention(a, b, c, cu, cu, max_seqlen_q=512, max_seqlen_k=512, causal=True)
        else:
            out = attnops.attention(q, k, v, causal=True)
        out.sum().backward()
    called = {e.key for e in profile.key_averages()}
    assert not {n for n in called if n in ("aten::bmm", "aten::einsum", "aten::exp")}
