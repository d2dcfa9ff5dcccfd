"""Suite `graphs`: capture of the decode steps of a Hugging Face model in all default buckets, and the host time of a step.

Row `..., buckets`: the time of capture without compilation, and the memory of all graphs. Row `..., host`: the host time of a step. A CPU
has no graphs, and the suite no rows there.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

import attnops.hf
from attnops.bench import models
from attnops.bench.rows import Case, LeftOut, Row
from attnops.bench.setup import Setup
from attnops.tune.clock import host_us, synchronize

ROWS, LENGTH = 256, 128
"""Rows of the largest of 35 default buckets, and positions of a row: a run has more steps than the prompt tokens."""

MODES = ("piecewise", "breakable")


def cases(setup: Setup, device: Any = None) -> dict[str, Case]:
    """One case a mode. device: the device that captures, unless CUDA."""
    name, kept = models.asked(setup), models.keeper(setup)
    return {f"{name}, {mode}": partial(measure, setup, kept, name, mode, device) for mode in MODES}


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, mode: Any, device: Any) -> list[Row]:
    """One mode. Raises LeftOut on a CPU without a `device`."""
    from torch._inductor.utils import fresh_cache

    if not setup.on_gpu and device is None:
        raise LeftOut("there are no CUDA graphs on a CPU")
    inner = "inductor" if setup.backend == "inductor" else "eager"
    model, handle = models.patched(kept(name), "paged", decode=attnops.hf.Decode(mode, inner=inner, graphs=device))
    cache = handle.new_cache(ROWS if setup.on_gpu else 4, LENGTH)
    synchronize()
    with fresh_cache():
        began = time.perf_counter()
        report = handle.capture(cache)
        synchronize()
        seconds = time.perf_counter() - began
    captured = sum(row.seconds for row in report.rows)
    more = {
        "buckets": len(report.rows), "graph_bytes": report.graph_bytes, "input_bytes": report.input_bytes,
        "compile_s": round(seconds - captured, 2), "pieces": report.parts.get("decode", 0),
        "unique_pieces": report.compiled.get("decode", 0), "mode": report.modes["decode"],
    }  # fmt: skip
    prompt = models.tokens(setup, model, 2, 8)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = prompt[:, :1].contiguous()
    host = host_us({"step": lambda: handle.step(token, cache)}, repeats=5, inner=4, wait=False)["step"]
    handle.unpatch()
    buckets = {"case": f"{name}, buckets", "way": f"attnops_{mode}", "median_us": round(captured * 1e6), **more}
    return [buckets, {"case": f"{name}, host", "way": f"attnops_{mode}", **host}]
