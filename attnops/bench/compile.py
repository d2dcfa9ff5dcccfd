"""Suite `compile`: the time to compile a decode step, with an empty compile cache and a full one, and the number of compilations.

Rows `..., cold` and `..., warm`: the first call, compilation included; warm after `torch._dynamo.reset()`, with the cache on disk.
Rows `generate ...`: the graphs that a scripted run of `generate()` with several batch sizes and lengths compiles, and how many of them
after the first call. The suites `decode` and `graphs` have the number of pieces of piecewise models.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from attnops.bench import decode, models
from attnops.bench.rows import Case, Row
from attnops.bench.setup import Setup
from attnops.tune.clock import spread, synchronize

SCRIPT = ((2, 9, 4), (1, 9, 4), (3, 12, 5), (2, 30, 6), (1, 17, 8))
"""Rows, prompt tokens and new tokens of the calls of a scripted run."""

CONTEXT = 32
PATCHES = {"hf_compiled": "", "attnops_hf": "hf", "attnops_paged": "paged"}
WAYS = tuple(PATCHES)
ON_GPU = ("hf_compiled", "attnops_paged", "attnops_piecewise")
"""The alternatives on a GPU: Inductor's CUDA graphs over transformers' static cache and over pages, and those of `decode=`."""

LAYERS = 8
"""Default on a GPU; the suite `decode` has the first calls of whole models."""


def cases(setup: Setup) -> dict[str, Case]:
    """Counts and times."""
    name = models.asked(setup)
    kept = models.keeper(replace(setup, layers=setup.layers or LAYERS) if setup.on_gpu else setup)
    counted = {f"{name}, generate, {way}": partial(recompiles, setup, kept, name, way) for way in WAYS}
    timed = {f"{name}, compiled, {way}": partial(times, setup, kept, name, way) for way in (ON_GPU if setup.on_gpu else WAYS)}
    return {**counted, **timed}


def times(setup: Setup, kept: models.Kept, name: str, way: str) -> list[Row]:
    """The time of first calls."""
    from torch._inductor.utils import clear_caches, fresh_cache

    model = kept(name)
    prompt = models.tokens(setup, model, 2, CONTEXT)
    with torch.no_grad(), fresh_cache():
        cold, warm = _first_call(setup, model, way, prompt), []
        for _ in range(1 if setup.quick else 2 if setup.on_gpu else 3):
            clear_caches()
            warm.append(_first_call(setup, model, way, prompt))
    layers = model.config.num_hidden_layers
    times: dict[str, Any] = {"cold": {"median_us": round(cold)}, "warm": spread(warm)}
    return [{"case": f"{name}, {what}", "way": way, **us, "layers": layers} for what, us in times.items()]


def _first_call(setup: Setup, model: Any, way: str, prompt: Tensor) -> float:
    """Microseconds of the first step of a newly patched model."""
    torch._dynamo.reset()
    step = decode.ways_of(replace(setup, ways=(way,)), model, prompt, prompt[:, :1].contiguous())[way]().timed.call
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return (time.perf_counter() - start) * 1e6


def recompiles(setup: Setup, kept: models.Kept, name: str, way: str) -> list[Row]:
    """The graphs of a scripted run, untimed."""
    from transformers import CompileConfig

    model, _ = models.patched(kept(name), PATCHES[way])
    options = {"do_sample": False, "pad_token_id": 0} | ({} if way == "attnops_paged" else {"cache_implementation": "static"})
    script = SCRIPT[:2] if setup.size == "toy" else SCRIPT
    config = CompileConfig(fullgraph=False, backend="eager", mode=None)  # type: ignore[arg-type]
    setattr(config, "_compile_all_devices", True)  # noqa: B010, its declared type is None
    torch._dynamo.reset()
    graphs = [counters["stats"]["unique_graphs"]]
    for batch, length, new in script:
        prompt = models.tokens(setup, model, batch, length)
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, compile_config=config, max_new_tokens=new, min_new_tokens=new, **options)
        graphs.append(counters["stats"]["unique_graphs"])
    figures = {"graphs": graphs[-1] - graphs[0], "recompiles": graphs[-1] - graphs[1], "calls": len(script)}
    return [{"case": f"{name}, generate", "way": way, **figures}]
