"""GPU time of a step by kind of kernel, and the gaps between kernels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from attnops.tune.clock import Timed

# The first pattern that a kernel's name matches gives its kind; other kernels are glue.
KINDS = {
    r"^triton_(poi|red|per|for)_": "glue",  # Inductor names a fused kernel after all its parts
    r"flash|attend|combine|attention|fmha|mla|xqa|sdpa|prepare_varlen|lean_reduction": "attention",
    r"gemm|gemv|nvjet|splitk|cublas|cutlass|_mm_|triton_tem": "matmul",
}


class Ran(NamedTuple):
    """A kernel that ran, in microseconds."""

    name: str
    start: float
    end: float


def shares(kernels: list[Ran]) -> dict[str, float]:
    """Microseconds by kind, and `gaps`. Overlapping time counts for the kernel that started first: the other waits for it."""
    found = {"matmul": 0.0, "attention": 0.0, "glue": 0.0, "gaps": 0.0}
    at = min((kernel.start for kernel in kernels), default=0.0)
    for name, start, end in sorted(kernels, key=lambda k: (k.start, k.end)):
        kind = next((kind for pattern, kind in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "glue")
        found["gaps"] += max(0.0, start - at)
        found[kind] += max(0.0, end - max(at, start))
        at = max(at, end)
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
