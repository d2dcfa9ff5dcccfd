"""flex compiles whatever it takes: wide head dims, masks, windows, more queries than keys."""

from dataclasses import replace

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.testing import Features, Source, make_call
from tests.checks import right

BF16, F32 = torch.bfloat16, torch.float32
NONE, WINDOW = (-1, -1), (100, 0)
CASES = {
    "d64-511x1": (64, 64, BF16, 511, 1, NONE, "none"),
    "d64-511x1-additive": (64, 64, BF16, 511, 1, NONE, "additive"),
    "d64-float32-511x1": (64, 64, F32, 511, 1, NONE, "none"),
    "d64-biases": (64, 64, BF16, 300, 400, NONE, "biases"),
    "d128-bool": (128, 128, BF16, 300, 400, NONE, "bool"),
    "d128-float32-window": (128, 128, F32, 130, 200, WINDOW, "none"),
    "d192-additive": (192, 192, BF16, 130, 257, NONE, "additive"),
    "d224-511x1": (224, 224, BF16, 511, 1, WINDOW, "none"),
    "d256-float32-additive": (256, 256, F32, 130, 200, NONE, "additive"),
    "d512-window-bool": (512, 512, BF16, 130, 257, WINDOW, "bool"),
    "d512-float32": (512, 512, F32, 40, 70, NONE, "none"),
    "d576-512": (576, 512, BF16, 40, 70, NONE, "none"),
}


FLEX = {op: kernels_of(op)["flex"] for op in ("attention", "varlen_attention")}
PLAIN = Features(dtype=BF16, q_heads=4, kv_heads=2, causal=True, lse=True)


@pytest.mark.parametrize("name", CASES)
def test_dense(name: str) -> None:
    d, dv, dtype, queries, keys, window, mask = CASES[name]
    f = replace(PLAIN, dtype=dtype, head_dim=d, v_head_dim=dv, window=window, mask=mask)
    right(FLEX["attention"], make_call("attention", Source(5, "cuda"), 2, queries, keys, f))


@pytest.mark.parametrize("d", [64, 224, 512])
@pytest.mark.parametrize("lengths", [((511, 3), (1, 3)), ((100, 29), (300, 29))], ids=str)
def test_packed(d: int, lengths: tuple[tuple[int, int], tuple[int, int]]) -> None:
    right(FLEX["varlen_attention"], make_call("varlen_attention", Source(6, "cuda"), *lengths, replace(PLAIN, head_dim=d)))
