"""Suites `compile`: the time of a decode step's compilation, and `graphs`: the time and the memory
of its capture.

`..., cold` and `..., warm`: the first call, compilation included, with an empty compile cache, and
after `torch.compiler.reset()` with the cache on disk. `..., buckets`: capture in all default
buckets, without compilation, and the memory of all graphs. `..., host`: the host time of a step. A
CPU has no graphs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from attnops.bench import Setup, decode, models, ways
from attnops.bench.rows import Case, LeftOut, Rows
from attnops.bench.ways import How
from attnops.core.private_torch import clear_caches, fresh_cache
from attnops.hf import Decode
from attnops.hf.cache.names import argument
from attnops.tune.clock import host_us, seconds, spread, synchronize

LAYERS = 8  # default on a GPU; the suite `decode` has the first calls of whole models
MODES = ("piecewise", "breakable")
# Rows of the largest of 35 default buckets, and positions of a row: a run has more steps than the
# prompt tokens
ROWS, LENGTH = 256, 128


def cases(setup: Setup) -> dict[str, Case]:
    """First calls."""
    name = models.asked(setup)
    kept = models.keeper(replace(setup, layers=setup.layers or LAYERS) if setup.on_gpu else setup)
    return {
        f"{name}, compiled, {way}": partial(times, setup, kept, name, way)
        for way in ways.here(setup, "compile")
    }


def times(setup: Setup, kept: models.Kept, name: str, way: str) -> Rows:
    """The time of first calls of a newly patched model."""
    model, us = kept(name), list[float]()
    prompt = models.tokens(setup, model, 2, 32)
    token = prompt[:, :1].contiguous()
    with torch.no_grad(), fresh_cache():
        for _ in range(2 if setup.quick else 3 if setup.on_gpu else 4):
            clear_caches()
            torch.compiler.reset()
            step = decode.way_of(setup, model, prompt, token, ways.WAYS["compile"][way]).timed.call
            us.append(1e6 * seconds(step))
    found, layers = {"cold": spread(us[:1]), "warm": spread(us[1:])}, model.config.num_hidden_layers
    return [
        {"case": f"{name}, {start}", "way": way, **row, "layers": layers}
        for start, row in found.items()
    ]


def graph_cases(setup: Setup, device: Any = None) -> dict[str, Case]:
    """One case a mode. device: the device that captures, unless CUDA."""
    name, kept = models.asked(setup), models.keeper(setup)
    return {f"{name}, {mode}": partial(capture, setup, kept, name, mode, device) for mode in MODES}


@torch.no_grad()
def capture(setup: Setup, kept: models.Kept, name: str, mode: Any, device: Any) -> Rows:
    """One mode. Raises LeftOut on a CPU without a `device`."""
    if not setup.on_gpu and device is None:
        raise LeftOut("there are no CUDA graphs on a CPU")
    inner = "inductor" if setup.backend == "inductor" else "eager"
    model, handle = models.patched(
        kept(name), How({**ways.PAGED, "decode": Decode(mode, inner=inner, graphs=device)})
    )
    cache = handle.new_cache(ROWS if setup.on_gpu else 4, LENGTH)
    with fresh_cache():
        began = perf_counter()
        report = handle.capture(cache)
        synchronize()
    captured, took = sum(row.seconds for row in report.rows), perf_counter() - began
    more = {
        "buckets": len(report.rows),
        "graph_bytes": report.graph_bytes,
        "input_bytes": report.input_bytes,
        "compile_s": round(took - captured, 2),
        "pieces": report.parts.get("decode", 0),
        "unique_pieces": report.compiled.get("decode", 0),
        "mode": report.modes["decode"],
    }
    prompt = models.tokens(setup, model, 2, 8)
    model(prompt, **argument(model, cache), use_cache=True, logits_to_keep=1)
    token = prompt[:, :1].contiguous()
    host = host_us({"step": lambda: handle.step(token, cache)}, repeats=5, inner=4, wait=False)[
        "step"
    ]
    handle.unpatch()
    buckets = {
        "case": f"{name}, buckets",
        "way": f"attnops_{mode}",
        "median_us": round(captured * 1e6),
        **more,
    }
    return [buckets, {"case": f"{name}, host", "way": f"attnops_{mode}", **host}]
