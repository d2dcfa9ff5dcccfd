"""Suite `compile`: what compiling a decode step costs, with an empty cache folder and with a full one, and how often it happens.

Rows `..., cold` and `..., warm`: the first call, compilation included; warm is after all compiled code was forgotten, its folder kept.
Rows `generate ...`: graphs that a scripted run of `generate()` of other batches and lengths gives to a backend that only counts, and how
many of them come after the first call. Row `pieces`: parts of a piecewise model that differ, which are compiled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import decoder, models
from attnops.bench.report import Case
from attnops.bench.setup import Setup
from attnops.bench.timing import spread, synchronize
from attnops.bench.verdict import Row
from attnops.graphs import Bucket, Buckets
from attnops.graphs.inputs import Roles
from attnops.graphs.modes import Compiled
from attnops.graphs.pieces import INNER

MODELS = {"toy": "llama", "small": "llama-small", "quick": "llama-3-8b-shape", "full": "llama-3-8b-shape"}
SCRIPT = ((2, 9, 4), (1, 9, 4), (3, 12, 5), (2, 30, 6), (1, 17, 8))
"""Rows, prompt and new tokens of the calls of a scripted run."""

CONTEXT = 32
WAYS = ("hf_compiled", "attnops_hf", "attnops_paged")
ON_GPU = ("hf_compiled", "attnops_paged", "attnops_piecewise")
"""What one would choose there: CUDA graphs by Inductor, over transformers' static cache and over pages, and those of `decode=`."""

LAYERS = 8
"""Of the models on a GPU, where the suite has not been told: whole models' first calls are in the suite `decode`."""


def cases(setup: Setup) -> dict[str, Case]:
    """Of the suite."""
    name = models.asked(setup, MODELS[setup.size])
    kept = models.Kept(replace(setup, layers=setup.layers or LAYERS) if setup.on_gpu else setup)
    counted = {f"{name}, generate, {way}": partial(recompiles, setup, kept, name, way) for way in WAYS}
    timed = {f"{name}, compiled, {way}": partial(times, setup, kept, name, way) for way in (ON_GPU if setup.on_gpu else WAYS)}
    return {**counted, "pieces": partial(pieces, setup), **timed}


class Counter:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: Any) -> Counter:
        return self  # transformers copies its CompileConfig, and a copy would count for itself


def way_of(model: Any, way: str) -> tuple[Any, Callable[[int, int], Any], dict[str, Any]]:
    """A model of its own for one of WAYS: the model, what makes its cache of so many rows and positions, and what `generate` is told."""
    from transformers import StaticCache

    one = models.twin(model)
    if way == "attnops_paged":
        return one, attnops.hf.patch(one, cache="paged").new_cache, {}
    if way == "attnops_hf":
        attnops.hf.patch(one)
    return one, lambda rows, length: StaticCache(config=one.config, max_cache_len=length), {"cache_implementation": "static"}


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
    more, found = {"layers": model.config.num_hidden_layers}, spread(warm)
    return [
        Row(f"{name}, cold", way, round(cold), more=more),
        Row(f"{name}, warm", way, found["median_us"], found.get("spread_us"), more=more),
    ]  # fmt: skip


def _first_call(setup: Setup, model: Any, way: str, prompt: Tensor) -> float:
    """Microseconds of the first step of a model that is patched anew."""
    torch._dynamo.reset()
    if way == "attnops_piecewise":
        one = models.twin(model)
        handle = attnops.hf.patch(one, cache="paged", decode=attnops.hf.Decode("piecewise"))
        cache: Any = handle.new_cache(prompt.shape[0], CONTEXT + 8)
        step: Callable[[Tensor], Any] = partial(handle.step, cache=cache)
    else:
        one, new_cache, _ = way_of(model, way)
        cache = new_cache(prompt.shape[0], CONTEXT + 8)
        forward = setup.compiled(one.forward, mode="reduce-overhead" if setup.on_gpu else "")
        step = partial(forward, past_key_values=cache, use_cache=True)
    one(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    synchronize()
    start = time.perf_counter()
    step(prompt[:, :1].contiguous())
    synchronize()
    return (time.perf_counter() - start) * 1e6


def recompiles(setup: Setup, kept: models.Kept, name: str, way: str) -> list[Row]:
    """Graphs of a scripted run. Nothing is timed."""
    model, _, more = way_of(kept(name), way)
    script = SCRIPT[:2] if setup.size == "toy" else SCRIPT
    counter, first = Counter(), 0
    torch._dynamo.reset()
    for call in script:
        _generate(setup, model, *call, counter, more)
        first = first or counter.graphs
    found = {"graphs": counter.graphs, "recompiles": counter.graphs - first, "calls": len(script)}
    return [Row(f"{name}, generate", way, more=found)]


def _generate(setup: Setup, model: Any, batch: int, length: int, new: int, counter: Counter, more: dict[str, Any]) -> None:
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=False, backend=counter, mode=None)  # type: ignore[arg-type]
    setattr(config, "_compile_all_devices", True)  # noqa: B010, its declared type is None
    prompt = models.tokens(setup, model, batch, length)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "compile_config": config, **more}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def pieces(setup: Setup) -> list[Row]:
    """Of a decode step of `attnops.nn`, cut for the compiler at every attention call: how many parts there are and how many differ."""
    dims, layers = (decoder.TINY, 4) if not setup.on_gpu else (decoder.LLAMA_8B, setup.layers or LAYERS)
    model = decoder.built(layers, dims, setup.device, setup.dtype)
    values = decoder.step_values(layers, dims, 2, CONTEXT, setup.device, setup.dtype)
    values.pop("cache")
    inner = INNER["inductor" if setup.backend == "inductor" else "eager"]
    method = Compiled(model, Roles("batch", ("tokens",), ()), Buckets(decode=(2,)), inner, {})
    start = time.perf_counter()
    with torch.no_grad():
        method.prepare(Bucket(2, 2, "decode"), values)
    synchronize()
    unique, parts = method.pieces()["decode"]
    us = round((time.perf_counter() - start) * 1e6)
    return [Row(f"pieces of {layers} layers", "attnops_piecewise", us, more={"unique_pieces": unique, "pieces": parts, "layers": layers})]
