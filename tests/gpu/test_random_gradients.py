"""500 random gradients a GPU: every kernel of the gradients against the reference in float64, and that against autograd of the formula."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target
from attnops.testing import Call, Features, Mismatch, check_kernel
from tests.formula import agrees
from tests.fuzz import OPS, TILES, drawn
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
"""Kernels compile for seconds for each kind of rules, so that lengths are drawn and rules are not."""
COMPILED = {"fa4": ("d64", "sinks", "d96", "d128", "cap", "d192-128", "d256", "both sides"), "flex": ("d64", "chunk", "mask", "sinks")}
COUNT, LEAST = 500, 130
"""Problems, and tokens that the longest request has at least: `fa4` compiles once more for fewer than a tile."""


def problem(seed: int, device: str) -> tuple[str, Call]:
    """The kind of the call, and the call, dense or packed."""
    name, op = list(KINDS)[seed % len(KINDS)], OPS[seed // len(KINDS) % 2]
    return name, drawn(random.Random(seed), DeviceSource(seed, device), KINDS[name], TILES, op, LEAST)


def checked(kernel: Kernel, seeds: range, device: str) -> dict[str, Any]:
    """The figures of `kernel` over the problems of its op. A mismatch is counted, and the others run all the same."""
    ran, refused, wrong, worst = 0, list[str](), list[str](), 0.0
    for seed in seeds:
        name, call = problem(seed, device)
        if call.op != kernel.op or name not in COMPILED.get(kernel.name, KINDS):
            continue
        try:
            if kernel.judge:
                agrees(call)
            figures = check_kernel(kernel, call)
        except Mismatch as mismatch:
            wrong.append(f"seed {seed}, {name}: {mismatch}")
            continue
        if figures.refused:
            refused.append(f"{name}: {figures}")
        else:
            ran, worst = ran + 1, max(worst, figures.worst)
    done: dict[str, Any] = {"problems": ran, "refused": len(refused), "wrong": len(wrong), "worst_share_of_budget": round(worst, 4)}
    return done | ({"first_wrong": wrong[0][:300]} if wrong else {"why_refused": refused[0][:300]} if refused and not ran else {})


@pytest.mark.parametrize("kernel", [pytest.param(k, id=f"{op}.{k.name}") for op in OPS for k in kernels_of(op).values()])
def test_random_gradients(kernel: Kernel, found: dict[str, Any]) -> None:
    if absent := kernel.absences(Target.of(torch.device("cuda", 0))):
        pytest.skip("; ".join(map(str, absent))[:300])
    done = checked(kernel, range(COUNT), "cuda")
    found.setdefault("random_gradients", {})[f"{kernel.op}.{kernel.name}"] = done
    assert not done["wrong"], done
    if not done["problems"]:
        pytest.skip(f"takes no problem on this GPU: {done.get('why_refused', '')}")
