"""Suite `compile`: the time to compile a decode step, with an empty compile cache and a full one, and the number of compilations.

Rows `..., cold` and `..., warm`: the first call, compilation included; warm after `torch._dynamo.reset()`, with the cache on disk.
Rows `generate ...`: the graphs that a scripted run of `generate()` with several batch sizes and lengths compiles, and how many of them
after the first call. Row `pieces`: the pieces of a piecewise model, and the unique ones, which are compiled.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from attnops.bench import decode, memory, models
from attnops.bench.rows import Case, Row
from attnops.bench.setup import Setup
from attnops.cache import PagedCache
from attnops.graphs import Bucket, Buckets
from attnops.graphs.graphed import Setup as Captures
from attnops.graphs.inputs import Roles
from attnops.graphs.modes import Compiled
from attnops.graphs.pieces import INNER
from attnops.nn import RotaryEmbedding, SelfAttention
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
    """Counts, pieces and times."""
    name = models.asked(setup)
    kept = models.Kept(replace(setup, layers=setup.layers or LAYERS) if setup.on_gpu else setup)
    counted = {f"{name}, generate, {way}": partial(recompiles, setup, kept, name, way) for way in WAYS}
    timed = {f"{name}, compiled, {way}": partial(times, setup, kept, name, way) for way in (ON_GPU if setup.on_gpu else WAYS)}
    return {**counted, "pieces": partial(pieces, setup), **timed}


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
    return [Row(f"{name}, generate", way, more=figures)]


TINY, LLAMA_8B = (64, 4, 2, 96, 128), (4096, 32, 8, 14336, 128256)
"""Widths of the residual stream, heads, key heads, width of the MLP, vocabulary."""


class Decoder(nn.Module):
    """A Llama of `attnops.nn` over a `PagedCache`."""

    def __init__(self, layers: int, dims: tuple[int, ...]) -> None:
        super().__init__()
        hidden, heads, kv_heads, inner, vocab = dims
        rope = RotaryEmbedding(hidden // heads)
        self.embed, self.norm, self.head = nn.Embedding(vocab, hidden), nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.layers: Any = nn.ModuleList()
        for _ in range(layers):
            parts = {"before": nn.RMSNorm(hidden), "after": nn.RMSNorm(hidden), "down": nn.Linear(inner, hidden, bias=False)}
            parts |= {"attention": SelfAttention(hidden, heads, kv_heads, rope=rope), "up": nn.Linear(hidden, 2 * inner, bias=False)}
            self.layers.append(nn.ModuleDict(parts))

    def forward(self, tokens: Tensor, batch: Any, k_pages: tuple[Tensor, ...], v_pages: tuple[Tensor, ...]) -> Any:
        """Logits `[T, vocab]` of tokens int64 `[T]`; pages of every layer."""
        x = self.embed(tokens)
        for layer, keys, values in zip(self.layers, k_pages, v_pages, strict=True):
            x = x + layer["attention"](layer["before"](x), batch=batch, k_pages=keys, v_pages=values)
            gate, up = layer["up"](layer["after"](x)).chunk(2, -1)
            x = x + layer["down"](nn.functional.silu(gate) * up)
        return self.head(self.norm(x))


def pieces(setup: Setup) -> list[Row]:
    """A decode step of `attnops.nn`, split at every attention call: the number of pieces, and of unique ones."""
    dims, layers, requests = (TINY, 4, 2) if not setup.on_gpu else (LLAMA_8B, setup.layers or LAYERS, 2)
    with torch.device("meta"):
        need = memory.needed(Decoder(layers, dims).to(setup.dtype))
    if (there := memory.free(setup.device)) is not None:
        memory.refuse(f"{layers} layers of a decoder of {dims[0]}", need, there)
    with setup.device:
        model = Decoder(layers, dims).to(setup.dtype).eval().requires_grad_(False)
    cache = PagedCache(
        layers, requests * 2 + 1, CONTEXT // 2, num_kv_heads=dims[2], head_dim=dims[0] // dims[1], max_requests=requests,
        max_pages_per_request=2, dtype=setup.dtype, device=setup.device,
    )  # fmt: skip
    batch = cache.batch([cache.alloc(CONTEXT - 1) for _ in range(requests)])
    tokens = torch.zeros(requests, dtype=torch.int64, device=setup.device)
    values = {"tokens": tokens, "batch": batch, "k_pages": cache.k_pages, "v_pages": cache.v_pages}
    inner = INNER["inductor" if setup.backend == "inductor" else "eager"]
    method = Compiled(model, Captures(Roles("batch", ("tokens",)), Buckets(decode=(requests,))), inner=inner)
    start = time.perf_counter()
    with torch.no_grad():
        method.prepare(Bucket(requests, requests, "decode"), values)
    synchronize()
    unique, parts = method.pieces()["decode"]
    us = round((time.perf_counter() - start) * 1e6)
    return [Row(f"pieces of {layers} layers", "attnops_piecewise", us, more={"unique_pieces": unique, "pieces": parts, "layers": layers})]
