"""Suite `generate`: whole calls of a model's `generate()`, greedy, the prompt included, and the first call of a process.

`hf`: transformers over its dynamic cache with SDPA. `hf_static`: `cache_implementation="static"`, which transformers compiles on a GPU.
`attnops`: `attnops.patch(model)`, no more. `attnops_hf`, `attnops_paged`: over transformers' cache and over pages, decoding as
transformers does. `attnops_piecewise`, `attnops_breakable`: over pages, decoding in CUDA graphs.

Times are those of a token, from calls in turns. `cache`, `decode`: as `Patched.took` says. `plain_steps`: steps that graphs did not
serve. `..., first call`: patch and first call in a fresh process, whole calls: with empty caches of Inductor and Triton, and, `warm_s`, in
the next process, which finds these caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import Point, Setup, models
from attnops.bench.overhead import in_a_process
from attnops.bench.rows import Case, Make, Row, Way, time_if_right, with_ratios
from attnops.hf import Decode
from attnops.tune.clock import Timed, seconds, steps_us

PLACES: models.Places = {
    "toy": {"llama": (Point(2, 12),)}, "small": {"llama-small": (Point(1, 128),)},
    **{size: {"llama-3-8b-shape": (Point(1, 1024), Point(8, 1024))} for size in ("quick", "full")},
}  # fmt: skip
NEW = {"toy": 6, "small": 16, "quick": 32, "full": 128}
WAYS: dict[str, Row | None] = {
    "hf": None, "hf_static": None, "attnops": {}, "attnops_hf": {"cache": "hf", "decode": "hf"},
    "attnops_paged": {"cache": "paged", "decode": "hf"},
}  # fmt: skip
ON_GPU: dict[str, Row | None] = {f"attnops_{mode}": {"cache": "paged", "decode": mode} for mode in ("piecewise", "breakable")}


def cases(setup: Setup) -> dict[str, Case]:
    """Steady calls of every model at its prompts, then the first calls."""
    steady, ways = models.over(setup, PLACES, measure), ways_of(setup)
    first = {name: models.over(setup, PLACES, partial(first_call, way=name)) for name in ways}
    return steady | {f"{case}, first call, {name}": one for name, some in first.items() for case, one in some.items()}


def ways_of(setup: Setup) -> dict[str, Row | None]:
    """The options of `patch` by way; None: not patched."""
    return WAYS | (ON_GPU if setup.on_gpu else {})


def prepared(setup: Setup, model: Any, way: str, point: Point) -> tuple[Callable[..., Any], Any]:
    """(`generate()` of a twin with its arguments, the handle of its patch)."""
    one, options, prompt = models.twin(model), ways_of(setup)[way], models.tokens(setup, model, point.batch, point.context)
    handle = None if options is None else attnops.hf.patch(one, **options)
    # No token has the end's id, so that all calls are equally long, and the stopping test is made.
    given: Row = {"max_new_tokens": NEW[setup.size], "do_sample": False, "pad_token_id": 0, "eos_token_id": model.config.vocab_size}
    given |= {"cache_implementation": "static"} if way == "hf_static" else {}
    return partial(one.generate, prompt, attention_mask=torch.ones_like(prompt), **given), handle


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> list[Row]:
    """The ways at one prompt, in turns."""
    model, new = kept(name), NEW[setup.size]

    def way(name: str) -> Way:
        call, handle = prepared(setup, model, name, point)
        more: Row = {}

        def results() -> tuple[Tensor, Tensor, Tensor]:
            # By default graphs are compiled after some steps, which no timed call should do.
            for _ in range(1 + Decode.compile_after // new if setup.on_gpu else 1):
                text = call()
            if handle is not None:
                plain = {"plain_steps": handle.plain_steps} if handle.graphs else {}
                more.update(cache=handle.took.cache, decode=handle.took.decode, **plain)
            found = call(output_logits=True, return_dict_in_generate=True)
            return text, found.sequences, torch.stack(found.logits, 1)

        return Way(Timed(call, per=new), results, more=more)

    def exactly(text: Tensor) -> Tensor:
        """Exact logits `[B, N, V]` of the new tokens of a text."""
        exact: Tensor = models.widened(model)(text[:, :-1], logits_to_keep=new).logits
        return exact

    hf = way("hf")
    text, _, logits = hf.computed()
    exact = exactly(text)

    def off(got: tuple[Tensor, Tensor, Tensor], want: Tensor) -> float:
        """The largest of: the logits' error, how far tokens are below the best ones, relative to these, and in float32 the other tokens."""
        text, judged, logits = got
        if text.shape != want.shape:
            return inf
        here = exact if torch.equal(text, want) else exactly(text)
        best, chosen = here.amax(-1), here.gather(-1, text[:, -new:, None])[..., 0]
        error = models.distance(model, logits)(logits, here if torch.equal(text, judged) else exactly(judged))
        other = float((text != want).double().mean()) if setup.dtype == torch.float32 else 0.0
        return max(error, other, float(((best - chosen) / best.abs()).max()))

    def figures(us: float, _: Way) -> Row:
        return {"tokens_s": round(point.batch / us * 1e6, 1), "layers": model.config.num_hidden_layers, "new_tokens": new}

    ways: dict[str, Way | Make] = {"hf": hf, **{name: partial(way, name) for name in ways_of(setup) if name != "hf"}}
    allowed = models.budget(model, models.distance(model, logits)(logits, exact))
    clock = partial(steps_us, rounds=3 if setup.quick else 9, cap_s=60.0)
    return with_ratios(time_if_right(f"{name} {point}", ways, text, allowed, clock, off, figures), "hf", "hf_static")


def first_call(setup: Setup, kept: models.Kept, name: str, point: Point, way: str) -> list[Row]:
    """Two processes, one after the other, with the same caches of compilers, which are empty at first."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        cold_s, warm_s = (alone(setup, first_s, setup, name, point, way) for _ in range(2))
    case = {"case": f"{name} {point}, first call", "way": way, "median_us": round(1e6 * cold_s, 2)}
    return [{**case, "first_s": round(cold_s, 3), "warm_s": round(warm_s, 3), "new_tokens": NEW[setup.size]}]


def alone(setup: Setup, function: Callable[..., Any], *given: Any) -> Any:
    """The function's result in a process of its own; at toy size, in this one, because imports would take longer than all else."""
    return function(*given) if setup.size == "toy" else in_a_process(function, *given)


def first_s(setup: Setup, name: str, point: Point, way: str) -> float:
    """Seconds of the patch and the first call of a model that is there."""
    if setup.on_gpu:
        torch.cuda.set_device(setup.device)
    model = models.build(setup, name, point)
    return seconds(lambda: prepared(setup, model, way, point)[0]())
