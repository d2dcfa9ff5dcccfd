"""Where the time of a step goes on a GPU: kernels by kind, and what lies between them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from attnops.bench.timing import Timed

KINDS = (
    ("matmul", re.compile(r"gemm|gemv|nvjet|splitk|cublas|cutlass(?!.*flash)|_mm_|triton_tem", re.IGNORECASE)),
    ("attention", re.compile(r"flash|attend|combine|attention|fmha|mla|xqa|sdpa|prepare_varlen|lean_reduction", re.IGNORECASE)),
)
"""The first whose pattern a kernel's name has; all others are glue."""

FUSED = re.compile(r"^triton_(poi|red|per|for)_")
"""Inductor names what it fuses by all that is in it, attention's allocations among them."""


class Ran(NamedTuple):
    """A kernel that ran. In microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """matmul, attention or glue."""
    if FUSED.match(name):
        return "glue"
    # A flash kernel is built of cutlass' parts.
    return "attention" if "flash" in name.lower() else next((kind for kind, pattern in KINDS if pattern.search(name)), "glue")


def shares(kernels: list[Ran]) -> dict[str, float]:
    """Microseconds by kind, and `gaps`. Of kernels that overlap the time is that of the one which began first: the other waits for it."""
    found = {"matmul": 0.0, "attention": 0.0, "glue": 0.0, "gaps": 0.0}
    if not kernels:
        return found
    kernels = sorted(kernels, key=lambda k: (k.start, k.end))
    at = kernels[0].start
    for kernel in kernels:
        found["gaps"] += max(0.0, kernel.start - at)
        at = max(at, kernel.start)
        found[kind_of(kernel.name)] += max(0.0, kernel.end - at)
        at = max(at, kernel.end)
    return found


def profiled(step: Timed) -> dict[str, float]:
    """`us_matmul`, `us_attention`, `us_glue`, `us_gaps` and `kernels` of a step, as torch's profiler saw them on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    if step.before is not None:
        step.before()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.call()
        torch.cuda.synchronize()
    events: Any = seen.events()
    kernels = [Ran(e.name, e.time_range.start, e.time_range.end) for e in events if str(e.device_type).endswith("CUDA")]
    return {f"us_{kind}": round(us / step.per, 1) for kind, us in shares(kernels).items()} | {"kernels": round(len(kernels) / step.per)}
