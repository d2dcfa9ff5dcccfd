"""`Sweep`: a kind of call and the sizes at which `attnops tune` times it. `TIMED` of a family's
timed.py holds those of each of its ops.

Here are the sizes that several families share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from attnops.core.problem import ONE, Problem, altered
from attnops.measured import Sizes, work
from attnops.measured.table import Axes, Axis
from attnops.ops.typical import BF16, HEADS, Leaves

LARGEST_BYTES = 5e9
LARGEST_FLOPS = 1e13


@dataclass(frozen=True)
class Sweep(Axes):
    """A kind of call and the sizes it is timed at: every combination except the largest.

    turn: kinds of a lower turn are timed before, in case the budget ends: they are used the most.
    grid: the grid that has it.
    few: the batches of the brief grid; () thins those of the full one.
    """

    turn: int = 0
    grid: str = "full"
    few: Axis = ()

    def allows(self, at: Sizes) -> bool:
        """Is a call of these sizes timed?"""
        # A window reads a part of the cache
        whole, results = altered(self.kind, window=(-1, -1)), self.kind.results
        products = (
            2.5 if results.grad or results.lse else 1.0
        )  # of a training step, five where a forward makes two
        return (
            work(whole, at).bytes <= LARGEST_BYTES
            and products * work(self.kind, at).flops <= LARGEST_FLOPS
        )

    @property
    def allowed(self) -> int:
        """The number of sizes that are timed."""
        return sum(map(self.allows, self.points()))


def powers(low: int, high: int, step: int = 2) -> Axis:
    """low, low * step, ... up to high."""
    return tuple(
        itertools.takewhile(lambda n: n <= high, (float(low * step**i) for i in itertools.count()))
    )


SINGLE = (1.0,)
# Times are nearly linear in the keys of a request, and jump with the batch when it needs another
# wave: at 16 or at 17.
BATCHES = (
    1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 17, 20, 24, 28, 32, 33, 40, 49, 64, 65, 81, 97, 128, 131, 160,
    193, 256,
)  # fmt: skip
KEYS = powers(64, 65536, 4)
COARSE = (powers(1, 256, 4), powers(256, 65536, 4))
FINE = (tuple(map(float, BATCHES)), KEYS)
USUAL = ((1.0, 2.0, 4.0, 8.0, 13.0, 17.0, 33.0, 65.0, 129.0, 256.0), KEYS)
FEW, SOME = powers(1, 16, 4), powers(1, 64, 4)
MANY = powers(2, 2048, 4)
PROMPTS = powers(32, 8192, 4)
PASTS = (1.0, 2.0, 4.0, 16.0, 64.0, 512.0, 4096.0)

LLAMA: Leaves = {**HEADS, "causal": True}
D64: Leaves = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "v_head_dim": 64}
D64_4: Leaves = D64 | {"q_heads": 32}
D64_MHA: Leaves = D64 | {"q_heads": 16, "kv_heads": 16}
D256: Leaves = {"q_heads": 16, "kv_heads": 8, "head_dim": 256, "v_head_dim": 256}
MHA: Leaves = {"q_heads": 32, "kv_heads": 32}
SMALL: Leaves = {"q_heads": 12, "kv_heads": 2}
ONE_KEY_HEAD: Leaves = {"q_heads": 8, "kv_heads": 1}
DEEPSEEK: Leaves = {"q_heads": 16, "kv_heads": 16, "head_dim": 192, "v_head_dim": 128}
GPT_OSS: Leaves = D64 | {"window": (127, -1), "sinks": True}
F32: Leaves = dict.fromkeys(BF16, torch.float32)

TOY: Leaves = {**F32, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
FEWEST, SHORTEST = (1.0, 2.0), (8.0, 16.0)


def toy(kind: Problem) -> Problem:
    """With few and small heads, those of latents as wide as they are, in float32."""
    return altered(kind, **(F32 | {"q_heads": 4} if kind.rope_dim else TOY))


def decoding(kind: Problem) -> Problem:
    """With one new token a request."""
    return altered(kind, queries=ONE, sizes_equal=False)


def decode(
    turn: int,
    kind: Problem,
    batch: Axis = COARSE[0],
    ratio: Axis = COARSE[1],
    /,
    grid: str = "full",
    **more: Any,
) -> Sweep:
    """One new token a request, over its keys."""
    return Sweep(decoding(altered(kind, **more)), batch, SINGLE, ratio, turn, grid)


def extend(
    turn: int,
    kind: Problem,
    batch: Axis = SOME,
    queries: Axis = MANY,
    /,
    grid: str = "full",
    **more: Any,
) -> Sweep:
    """Several new tokens a request, with keys before."""
    return Sweep(altered(kind, **more), batch, queries, PASTS, turn, grid)


def prefill(
    turn: int,
    kind: Problem,
    batch: Axis = FEW,
    queries: Axis = PROMPTS,
    /,
    grid: str = "full",
    **more: Any,
) -> Sweep:
    """As many keys as new tokens."""
    return Sweep(altered(kind, **more), batch, queries, SINGLE, turn, grid)
