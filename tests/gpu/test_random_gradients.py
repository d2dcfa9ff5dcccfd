"""500 random gradients a GPU: every kernel of the gradients against the reference in float64, and
that against autograd of the formula."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, kernels_of
from attnops.testing import Call, Features
from tests.formula import agrees
from tests.fuzz import OPS, TILES, drawn
from tests.gpu.helpers import figures_of, judge, need
from tests.gpu.wide import DeviceSource

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2, causal=True)
KINDS = {
    "d64": PLAIN,
    "sinks": replace(PLAIN, window=(90, -1), sinks=BF16, q_heads=6),
    "d96": replace(PLAIN, head_dim=96, kv_heads=4, dtype=F16),
    "d128": replace(PLAIN, head_dim=128, q_heads=8, kv_heads=1),
    "cap": replace(PLAIN, head_dim=128, softcap=8.0, window=(150, -1), sinks=F32),
    "d192-128": replace(PLAIN, head_dim=192, v_head_dim=128, kv_heads=4),
    "d256": replace(PLAIN, head_dim=256),
    "all keys": replace(PLAIN, causal=False, head_dim=128, dtype=F16),
    "both sides": replace(PLAIN, causal=False, window=(100, 30)),
    "chunk": replace(PLAIN, chunk=100, q_heads=8),
    "mask": replace(PLAIN, mask="additive", mask_shape="hq", sinks=F32),
    "bool": replace(PLAIN, mask="bool", head_dim=128, causal=False),
    "float32": replace(PLAIN, dtype=F32, softcap=5.0, sinks=F32),
}
"""Kernels compile for seconds for each kind of rules, so that lengths are drawn and rules are
not."""
COMPILED = {
    "fa4": ("d64", "sinks", "d96", "d128", "cap", "d192-128", "d256", "both sides"),
    "flex": ("d64", "chunk", "mask", "sinks"),
}
COUNT, LEAST = 500, 130
"""Problems, and tokens that the longest request has at least: `fa4` compiles once more for fewer
than a tile."""


def problem(seed: int, device: str) -> tuple[str, Call]:
    """The kind of the call, and the call, dense or packed."""
    name, op = list(KINDS)[seed % len(KINDS)], OPS[seed // len(KINDS) % 2]
    return name, drawn(
        random.Random(seed), DeviceSource(seed, device), KINDS[name], TILES, op, LEAST
    )


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, id=f"{op}.{k.name}") for op in OPS for k in kernels_of(op).values()]
)
def test_random_gradients(kernel: Kernel, found: dict[str, Any]) -> None:
    need(kernel)

    def calls() -> Iterator[tuple[str, Callable[[], Call]]]:
        for seed in range(COUNT):
            name, call = problem(seed, "cuda")
            if call.op == kernel.op and name in COMPILED.get(kernel.name, KINDS):
                yield (
                    f"seed {seed}, {name}",
                    partial(agreed if kernel.judge else lambda given: given, call),
                )

    done = figures_of(kernel, calls(), [])
    found["random_gradients"] = {f"{kernel.op}.{kernel.name}": done}
    judge(done)


def agreed(call: Call) -> Call:
    """The call, on which the reference agrees with autograd of the formula. Raises Mismatch."""
    agrees(call)
    return call
