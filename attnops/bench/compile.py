"""Suites `compile`: the time and the number of compilations of a decode step, and `graphs`: the time and the memory of its capture.

`compile` has rows `..., cold` and `..., warm`: the first call, compilation included, with an empty compile cache, and after
`torch._dynamo.reset()` with the cache on disk.
Rows `generate ...`: the graphs that a scripted run of `generate()` with several batch sizes and lengths compiles, and how many of them
after the first call. The suites `decode` and `graphs` have the number of pieces of piecewise models.

`graphs` has rows `..., buckets`: capture in all default buckets, without compilation, and the memory of all graphs, and rows
`..., host`: the host time of a step. A CPU has no graphs, and the suite no rows there.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import attnops.hf
from attnops.bench import Setup, decode, models
from attnops.bench.rows import Case, LeftOut, Row
from attnops.tune.clock import host_us, spread, synchronize

SCRIPT = ((2, 9, 4), (1, 9, 4), (3, 12, 5), (2, 30, 6), (1, 17, 8))  # rows, prompt tokens and new tokens of the calls of a scripted run

CONTEXT = 32
PATCHES = {"hf_compiled": "", "attnops_hf": "hf", "attnops_paged": "paged"}
WAYS = tuple(PATCHES)
# The alternatives on a GPU: Inductor's CUDA graphs over transformers' static cache and over pages, and those of `decode=`.
ON_GPU = ("hf_compiled", "attnops_paged", "attnops_piecewise")

LAYERS = 8  # default on a GPU; the suite `decode` has the first calls of whole models

MODES = ("piecewise", "breakable")
ROWS, LENGTH = 256, 128  # rows of the largest of 35 default buckets, and positions of a row: a run has more steps than the prompt tokens


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


def graph_cases(setup: Setup, device: Any = None) -> dict[str, Case]:
    """One case a mode. device: the device that captures, unless CUDA."""
    name, kept = models.asked(setup), models.keeper(setup)
    return {f"{name}, {mode}": partial(capture, setup, kept, name, mode, device) for mode in MODES}


@torch.no_grad()
def capture(setup: Setup, kept: models.Kept, name: str, mode: Any, device: Any) -> list[Row]:
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
