"""The most the device does, measured in the run: bandwidth of a pass over memory, and the rate of a large matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnops.bench.setup import Setup
from attnops.bench.timing import kernels_us

Ceilings = dict[str, float]


def a_pass(device: torch.device | str, nbytes: int) -> Callable[[], Any]:
    """A call that reads `nbytes` and writes as many, by a kernel: `copy_` in a CUDA graph is a copy node, which on an H200 is slower."""
    given, into = (torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: torch.neg(given, out=into)


def measure(setup: Setup) -> Ceilings:
    """`bandwidth_tb_s`, TB/s read and written, and `matmul_tflop_s`, TFLOP/s of a product in the setup's dtype."""
    found = _rates(setup)
    if setup.on_gpu:
        torch.cuda.empty_cache()  # another process may measure the rest
    return found


def _rates(setup: Setup) -> Ceilings:
    nbytes, side = (1 << 30, 8192) if setup.on_gpu else (1 << 21, 256) if setup.quick else (1 << 27, 1024)
    x, y = (torch.randn(side, side, device=setup.device).to(setup.dtype) for _ in range(2))
    runs = {"pass": a_pass(setup.device, nbytes), "product": lambda: x @ y}
    for run in runs.values():
        run()
    us = {name: found["median_us"] for name, found in kernels_us(setup.device, runs, rounds=11).items()}
    return {
        "bandwidth_tb_s": round(2 * nbytes / us["pass"] / 1e6, 4), "matmul_tflop_s": round(2 * side**3 / us["product"] / 1e6, 4),
    }  # fmt: skip
