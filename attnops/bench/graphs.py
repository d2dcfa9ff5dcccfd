"""Suite `graphs`: what it takes to capture decode steps of a Hugging Face model in all default buckets, and what a step costs the host.

Row `..., buckets`: the time of capture, after compilation, and the bytes of all graphs. Row `..., host`: a step's time on the host, which
need not wait for the device. There are no graphs on a CPU, so there the suite has no rows.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

import attnops.hf
from attnops.bench import models
from attnops.bench.report import Case, LeftOut
from attnops.bench.setup import Setup
from attnops.bench.timing import interleaved_us, synchronize
from attnops.bench.verdict import Row

ROWS = 256
"""Of the largest bucket: 35 of them by default."""

LENGTH = 128
"""Of a row's pages: there are more steps than tokens of the prompt."""

MODES = ("piecewise", "breakable")
MODELS = {"toy": "llama", "small": "llama-small", "quick": "llama-3-8b-shape", "full": "llama-3-8b-shape"}


def cases(setup: Setup, device: Any = None) -> dict[str, Case]:
    """Of the suite. device: what captures, where it is not CUDA."""
    name, kept = models.asked(setup, MODELS[setup.size]), models.Kept(setup)
    return {f"{name}, {mode}": partial(measure, setup, kept, name, mode, device) for mode in MODES}


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, mode: Any, device: Any) -> list[Row]:
    """One mode. Raises LeftOut on a CPU, where no device is given."""
    from torch._inductor.utils import fresh_cache

    if not setup.on_gpu and device is None:
        raise LeftOut("there are no CUDA graphs on a CPU")
    model = models.twin(kept(name))
    rows = ROWS if setup.on_gpu else 4
    inner = "inductor" if setup.backend == "inductor" else "eager"
    handle = attnops.hf.patch(model, cache="paged", decode=attnops.hf.Decode(mode, inner=inner, graphs=device))
    cache = handle.new_cache(rows, LENGTH)
    synchronize()
    # Nothing that another suite has compiled is found again.
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
    one = prompt[:, :1].contiguous()
    host = interleaved_us({"step": lambda: handle.step(one, cache)}, repeats=5, inner=4, wait=False)["step"]
    handle.unpatch()
    way = f"attnops_{mode}"
    buckets = Row(f"{name}, buckets", way, round(captured * 1e6), more=more)
    return [buckets, Row(f"{name}, host", way, host["median_us"], host["spread_us"])]
