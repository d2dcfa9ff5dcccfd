"""The calls of attention over pages that `attnops tune` times."""

from __future__ import annotations

import torch

from attnops.core.problem import Problem
from attnops.ops.sweeps import (
    D64,
    D64_4,
    D64_MHA,
    D256,
    F32,
    FEW,
    FEWEST,
    FINE,
    GPT_OSS,
    LLAMA,
    MHA,
    ONE_KEY_HEAD,
    SHORTEST,
    SMALL,
    SOME,
    TOY,
    USUAL,
    decode,
    extend,
    powers,
)
from attnops.ops.typical import Leaves

PAGED = Problem.kind("paged_attention", **LLAMA, page_size=16)
STEP = Problem.kind(
    "decode_attention", **LLAMA | {"causal": False}, page_size=16, asks=frozenset({"cos", "sin"})
)

EACH_MANY = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 2048.0)
STRIDES = powers(4, 2048, 8)
MORE_HEADS: Leaves = {"q_heads": 64}
KEY_HEADS: tuple[Leaves, ...] = (
    MORE_HEADS,
    MHA,
    ONE_KEY_HEAD,
    {"q_heads": 4, "kv_heads": 1},
    {"q_heads": 32, "kv_heads": 2},
)
FP8: Leaves = {"kv_dtype": torch.float8_e4m3fn}

TIMED = {
    "paged_attention": (
        decode(0, PAGED, *FINE),
        extend(1, PAGED, SOME, EACH_MANY),
        decode(5, PAGED, *USUAL, page_size=64),
        extend(5, PAGED, FEW, page_size=64),
        *(decode(5, PAGED, *USUAL, **heads) for heads in KEY_HEADS),
        *(decode(5, PAGED, *USUAL, page_size=size) for size in (1, 128)),
        *(extend(5, PAGED, **heads) for heads in (MORE_HEADS, MHA)),
        extend(5, PAGED, FEW, **SMALL),
        extend(5, PAGED, FEW, STRIDES, **ONE_KEY_HEAD),
        *(decode(13, PAGED, *USUAL, **heads) for heads in (D64, D64_4, D64_MHA)),
        extend(13, PAGED, SOME, **D64),
        extend(13, PAGED, FEW, STRIDES, **D64_MHA),
        *(decode(13, PAGED, **heads, page_size=1) for heads in (MHA, D64_4)),
        decode(16, PAGED, **GPT_OSS),
        extend(16, PAGED, FEW, STRIDES, **GPT_OSS),
        *(decode(18, PAGED, **more) for more in (FP8, D256)),
        decode(0, PAGED, (1.0, 8.0), (256.0, 1024.0), grid="cpu", **F32),
        decode(1, PAGED, FEWEST, SHORTEST, grid="tiny", **TOY, page_size=4),
    ),
    "decode_attention": (
        decode(8, STEP, *FINE),
        decode(8, STEP, *USUAL, page_size=64),
        *(decode(8, STEP, *USUAL, **heads) for heads in (MORE_HEADS, MHA, D64, D64_4)),
        decode(8, STEP, **GPT_OSS),
    ),
}
