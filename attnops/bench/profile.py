"""GPU time of a step by kind of kernel, and the gaps between kernels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from attnops.tune.clock import Timed

# The first pattern that a kernel's name matches gives its kind; other kernels are glue.
KINDS = (
    ("glue", re.compile(r"^triton_(poi|red|per|for)_")),  # Inductor names a fused kernel after all its parts
    ("attention", re.compile(r"flash", re.IGNORECASE)),  # built from cutlass
    ("matmul", re.compile(r"gemm|gemv|nvjet|splitk|cublas|cutlass|_mm_|triton_tem", re.IGNORECASE)),
    ("attention", re.compile(r"attend|combine|attention|fmha|mla|xqa|sdpa|prepare_varlen|lean_reduction", re.IGNORECASE)),
)


class Ran(NamedTuple):
    """A kernel that ran, in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """matmul, attention or glue."""
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "glue")


def shares(kernels: list[Ran]) -> dict[str, float]:
    """Microseconds by kind, and `gaps`. Overlapping time counts for the kernel that started first: the other waits for it."""
    found = {"matmul": 0.0, "attention": 0.0, "glue": 0.0, "gaps": 0.0}
    at = min((kernel.start for kernel in kernels), default=0.0)
    for kernel in sorted(kernels, key=lambda k: (k.start, k.end)):
        found["gaps"] += max(0.0, kernel.start - at)
        found[kind_of(kernel.name)] += max(0.0, kernel.end - max(at, kernel.start))
        at = max(at, kernel.end)
    return found


def launched(step: Timed) -> list[Ran]:
    """The kernels of one call on the GPU, as torch's profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    if step.before is not None:
        step.before()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.call()
        torch.cuda.synchronize()
    events: Any = seen.events()
    found = [Ran(e.name, e.time_range.start, e.time_range.end) for e in events if str(e.device_type).endswith("CUDA")]
    return [k for k in found if not k.name.startswith(("##", "Torch-Compiled Region"))]


def profiled(step: Timed) -> dict[str, float]:
    """`us_matmul`, `us_attention`, `us_glue`, `us_gaps` and `kernels` of a step on a GPU."""
    kernels = launched(step)
    return {f"us_{kind}": round(us / step.per, 1) for kind, us in shares(kernels).items()} | {"kernels": round(len(kernels) / step.per)}
