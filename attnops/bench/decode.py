"""Suite `decode`: a step of one new token a request, over a cache that is full already, of whole Hugging Face models.

`hf_eager`: transformers with SDPA over its dynamic cache. `hf_compiled`: over its static cache, compiled as `generate()` does it.
`attnops_eager`, `attnops_hf`, `attnops_paged`: the same model, patched; over transformers' static cache and over pages, compiled.
All are fed the same random tokens, and the logits of a few steps are compared with those of `hf_eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import models
from attnops.bench.report import collect
from attnops.bench.setup import Point, Setup
from attnops.bench.timing import Timed, steps_us
from attnops.bench.verdict import Row, Way, judged, ratio_to

NEW = 4
"""Tokens of a run. Pages of a window let fewer than 32 be taken back."""

MODELS = {
    "toy": ("llama",),
    "small": ("llama", "llama-small"),
    "quick": ("llama-3-8b-shape",),
    "full": ("llama-3-8b-shape", "qwen3-4b-shape"),
}
POINTS = {
    "toy": (Point(2, 12),),
    "small": (Point(1, 128), Point(4, 128)),
    "quick": (Point(1, 1024), Point(8, 1024)),
    "full": (Point(1, 1024), Point(8, 1024), Point(32, 2048)),
}


def run(setup: Setup) -> dict[str, Any]:
    """The suite."""
    kept = models.Kept(setup)
    names = (setup.model,) if setup.model else MODELS[setup.size]
    points = setup.points or POINTS[setup.size]
    return collect(setup, {f"{n} {p}": partial(measure, setup, kept, n, p) for n in names for p in points})


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> list[Row]:
    """One model at one point."""
    model = kept(name)
    prompt, new = (models.tokens(setup, model, point.batch, n, seed) for seed, n in enumerate((point.context, NEW)))
    ways = ways_of(setup, model, prompt, new)
    base = ways["hf_eager"]
    with torch.no_grad():
        want = base.result() if base.result is not None else None
    rows = judged(f"{name} {point}", ways, want, models.budget(model), steps_us, models.distance(model), lambda us: _more(model, point, us))
    return ratio_to(ratio_to(rows, "hf_eager", "of_hf_eager"), "hf_compiled", "of_hf_compiled")


def _more(model: Any, point: Point, us: float) -> dict[str, float]:
    return {"tokens_s": round(point.batch / us * 1e6, 1), "layers": model.config.num_hidden_layers}


def ways_of(setup: Setup, model: Any, prompt: Tensor, new: Tensor) -> dict[str, Way]:
    """Every way of making the step, its cache full."""
    from transformers import DynamicCache, StaticCache

    length = prompt.shape[1] + new.shape[1] + 1
    mode = "reduce-overhead" if setup.on_gpu else ""
    ours, paged = models.twin(model), models.twin(model)
    attnops.hf.patch(ours)
    handle = attnops.hf.patch(paged, cache="paged")

    def static(of: Any) -> Any:
        return StaticCache(config=of.config, max_cache_len=length)

    def compiled(of: Any) -> Callable[..., Any]:
        return setup.compiled(of.forward, mode=mode)

    makers: dict[str, Callable[[], Way]] = {
        "hf_eager": lambda: stepping(model, model, DynamicCache(config=model.config), prompt, new),
        "hf_compiled": lambda: stepping(model, compiled(model), static(model), prompt, new),
        "attnops_eager": lambda: stepping(ours, ours, DynamicCache(config=ours.config), prompt, new),
        "attnops_hf": lambda: stepping(ours, compiled(ours), static(ours), prompt, new),
        "attnops_paged": lambda: stepping(paged, compiled(paged), handle.new_cache(prompt.shape[0], length), prompt, new),
    }
    return {name: _made(make) for name, make in makers.items()}


def _made(make: Callable[[], Way]) -> Way:
    """The way, or one that raises what making it raised."""
    try:
        with torch.no_grad():
            return make()
    except Exception as error:
        failure = error

        def raise_it() -> Tensor:
            raise failure

        return Way(Timed(raise_it), raise_it)


def stepping(model: Any, step: Callable[..., Any], cache: Any, prompt: Tensor, new: Tensor) -> Way:
    """The tokens of `new` one after the other behind `prompt`, from the same place each time."""
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    rewind = _rewind(cache, new.shape[1])

    def one(at: int) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out: Tensor = step(new[:, at : at + 1], past_key_values=cache, use_cache=True).logits
        return out

    def all_of_them() -> None:
        for at in range(new.shape[1]):
            one(at)

    def logits() -> Tensor:
        # The first times compile and capture: what is timed later is what is compared.
        for _ in range(3):
            rewind()
            found = [one(at).clone() for at in range(new.shape[1])]
        return torch.cat(found, 1)

    return Way(Timed(all_of_them, before=rewind, per=new.shape[1]), logits)


def _rewind(cache: Any, steps: int) -> Callable[[], None]:
    if not isinstance(cache, attnops.hf.PagedModelCache):
        return models.Rewound(cache)
    start = int(cache.get_seq_length())

    def back() -> None:
        if (more := int(cache.get_seq_length()) - start) > 0:
            cache.crop(-more)

    return back
