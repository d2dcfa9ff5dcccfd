"""The calls of attention over dense and packed tokens, and of its gradients, that `attnops tune`
times."""

from __future__ import annotations

from dataclasses import replace

from attnops.core.problem import Problem, altered
from attnops.ops.sweeps import (
    D64,
    D64_4,
    D64_MHA,
    D256,
    DEEPSEEK,
    F32,
    FEW,
    FEWEST,
    GPT_OSS,
    LLAMA,
    MHA,
    ONE_KEY_HEAD,
    SHORTEST,
    SMALL,
    SOME,
    Sweep,
    decode,
    powers,
    prefill,
    toy,
)
from attnops.ops.typical import Leaves

DENSE = Problem.kind("attention", **LLAMA, sizes_equal=True)
PADDED = Problem.kind("attention", **LLAMA, kv_range=True)
PACKED = Problem.kind("varlen_attention", **LLAMA)
DENSE_GRADIENT = altered(DENSE, op="attention_backward", grad=True)
PACKED_GRADIENT = altered(PACKED, op="varlen_attention_backward", grad=True)

# Times are flat within a tile of 64 or 128 queries and jump at the next one: 128 and 136, 256 and
# 272.
LONG_PROMPTS = (
    32.0,
    64.0,
    128.0,
    136.0,
    192.0,
    256.0,
    272.0,
    384.0,
    512.0,
    640.0,
    *powers(1024, 16384),
)
TRAINED, LONG = powers(512, 32768), powers(512, 32768, 4)
BOTH_SIDES: Leaves = {"causal": False}
WINDOW: Leaves = {"window": (1023, -1)}
GPT_OSS_WHOLE: Leaves = GPT_OSS | {"window": (-1, -1)}
D96: Leaves = MHA | {"head_dim": 96, "v_head_dim": 96}
TRAINING = 20
"""The turn of the first training steps. Each step has one; its forward is timed with it."""


def _gradients(kind: Problem, *last: Leaves) -> tuple[Sweep, ...]:
    kinds: tuple[Leaves, ...] = (
        D64_4,
        GPT_OSS,
        WINDOW,
        DEEPSEEK,
        {"softcap": True},
        D256,
        D64_MHA,
        MHA,
        *last,
    )
    longer = (
        prefill(TRAINING + i, kind, (1.0, 4.0, 16.0), LONG, **more)
        for i, more in enumerate(kinds, 1)
    )
    return prefill(TRAINING, kind, (1.0, 2.0, 4.0, 16.0), TRAINED), *longer


def forward(gradient: Sweep, of: Problem) -> Sweep:
    """The forward of a training step, at the sizes of its gradient. of: any call of the forward's
    op."""
    return replace(gradient, kind=altered(gradient.kind, op=of.op, lse=True, grad=False))


DENSE_GRADIENTS = _gradients(DENSE_GRADIENT, D96, D64_MHA | BOTH_SIDES)
PACKED_GRADIENTS = _gradients(PACKED_GRADIENT)
TINY_GRADIENT = prefill(TRAINING, toy(DENSE_GRADIENT), FEWEST, SHORTEST, grid="tiny")

# Head dims of 128 come first: prebuilt kernels have them, and compilation for others may exhaust a
# kernel's first_calls_s.
TIMED = {
    "attention": (
        prefill(3, DENSE, FEW, LONG_PROMPTS),
        decode(4, PADDED),
        prefill(4, PADDED),
        decode(9, DENSE),
        *(prefill(9, DENSE, **heads) for heads in (MHA, ONE_KEY_HEAD, SMALL)),
        Sweep(altered(DENSE, sizes_equal=False), FEW, (64.0, 256.0, 1024.0), (2.0, 8.0, 32.0), 11),
        prefill(11, DENSE, **D64),
        prefill(11, DENSE, SOME, **D64, **BOTH_SIDES),
        prefill(11, DENSE, **BOTH_SIDES),
        prefill(15, DENSE, **DEEPSEEK),
        *(
            way(17, PADDED, **heads)
            for heads in (GPT_OSS_WHOLE, GPT_OSS)
            for way in (decode, prefill)
        ),
        prefill(19, DENSE, **D256),
        *(forward(gradient, DENSE) for gradient in DENSE_GRADIENTS),
        prefill(0, DENSE, (1.0, 4.0), (64.0, 256.0), grid="cpu", **F32),
        decode(0, PADDED, (1.0, 4.0), (256.0, 1024.0), grid="cpu", **F32),
        prefill(0, toy(DENSE), FEWEST, SHORTEST, grid="tiny"),
        replace(forward(TINY_GRADIENT, DENSE), turn=TRAINING + 1),
    ),
    "attention_backward": (
        *DENSE_GRADIENTS,
        prefill(TRAINING, DENSE_GRADIENT, (1.0, 4.0), (64.0, 256.0), grid="cpu", **F32),
        TINY_GRADIENT,
    ),
    "varlen_attention": (
        prefill(3, PACKED, FEW, LONG_PROMPTS),
        prefill(10, PACKED, **ONE_KEY_HEAD),
        prefill(12, PACKED, **D64),
        prefill(14, PACKED, **DEEPSEEK),
        *(forward(gradient, PACKED) for gradient in PACKED_GRADIENTS),
        prefill(0, PACKED, (1.0, 4.0), (64.0, 256.0), grid="cpu", **F32),
        prefill(0, toy(PACKED), FEWEST, SHORTEST, grid="tiny"),
    ),
    "varlen_attention_backward": (
        *PACKED_GRADIENTS,
        prefill(TRAINING, toy(PACKED_GRADIENT), FEWEST, SHORTEST, grid="tiny"),
    ),
}
