"""Suites `decode`: a step of one new token a request over a full cache, and `prefill`: the time to
the first token, of whole models.

`hf_eager`: transformers with SDPA over its dynamic cache. `hf_compiled`: over its static cache,
compiled as `generate()` does it. `attnops_eager`, `attnops_hf`, `attnops_paged`: the same model,
patched; over transformers' static cache and over pages, compiled. `attnops_piecewise`,
`attnops_breakable`: over pages, in CUDA graphs (`attnops.patch(..., decode=)`). `hf_tuned`,
`attnops_tuned`: `hf_compiled` and `attnops_piecewise` with Inductor's coordinate descent.
`attnops_apart`: `attnops_piecewise` with torch's own linears, and with rotation, write and
attention of a step apart, by policy. `attnops_linears` and `attnops_one_launch`: with one of the
two. The ways in NAMED run only if `--ways` names them. `attnops_mxfp4`, of a gpt-oss:
`attnops_piecewise` after `attnops.hf.pack_experts`; the experts of every way then have the values
that MXFP4 has.

A measurement is as many steps one after the other as there are tokens, with one wait for the device
at the end. `synchronised_us`: of a step where the host waits after each. `vllm`, `sglang`: a step
of other engines, from a call of `generate` without its first tokens.

The logits of every way are compared with those of the same weights in float32 (of float32 in
float64), whose attention goes in chunks of queries, so that long contexts fit into memory.

Points with requests of 16k tokens or more are `Point.long`: one way is in memory at a time. There
steps follow a cache of random keys and values, and of a prompt the last 4,096 tokens after such a
cache are compared with exact logits, and the whole prompt with transformers. Both are compared
after a short random cache, too (`attnops.bench.random_caches`). Models with windows or latents
compute their prompts.

`first_s`: the first steps, compilation and capture included, with an empty compile cache.
`of_bandwidth`: the bytes a step must read over its time, as a share of the bandwidth measured in
the same run. `us_...`: GPU time by kind of kernel, and the gaps between kernels.

`prefill` has prompts over an empty cache and the last token's logits. Those of several rows are
padded on the left: rows have an eighth of the tokens to all of them. `hf_compiled` and
`attnops_compiled` are the compiled forward of the plain and the patched model; their cache is made
anew by every call. `attnops_paged` and `attnops_prompt` are over pages, as `generate()` runs
prompts before and after it compiles their layers; `first_s` is that of as many calls as a capture
needs. `of_matmul`: the products and the attention of tokens that are no padding over their time, as
a share of the rate measured in the same run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, StaticCache

from attnops.bench import Point, Setup, models, peers, random_caches, ways
from attnops.bench.rows import Case, Row, Rows, Way, Ways
from attnops.bench.ways import How
from attnops.bench.work import bytes_of, flop_of
from attnops.core.private_torch import fresh_cache
from attnops.core.select import use
from attnops.hf.cache.names import argument
from attnops.hf.steps.prompt import CAPTURE_AFTER
from attnops.tune.clock import Timed, seconds, steps_us, synchronize

# Tokens of a run. On a GPU only the first launch waits for the host, so more tokens reduce its
# share. A cache with windows can be rewound by fewer than 32 tokens.
NEW, NEW_ON_GPU, NEW_IN_WINDOWS = 4, 40, 16
LESS, ROUNDS = 8, 5  # of other engines: a call's first tokens, whose time does not count; rounds

Ran = tuple[float, float, str]  # a kernel that ran: its start and end in microseconds, and its name
# The first pattern that a kernel's name matches gives its kind; other kernels are glue.
KINDS = {
    r"^triton_(poi|red|per|for)_": "glue",  # Inductor names a fused kernel after all its parts
    r"flash|attend|combine|attention|fmha|mla|xqa|sdpa": "attention",
    r"prepare_varlen|lean_reduction|^decode$": "attention",
    r"gemm|gemv|nvjet|splitk|cublas|cutlass|_mm_|triton_tem|^(one|few)_(row|token)": "matmul",
}


def cases(setup: Setup) -> dict[str, Case]:
    """Other engines first, while this process holds no model; every model at its points.

    Raises InvalidInput for a way that this device does not have.
    """
    ways.check(setup, "decode")
    others = peers.cases(
        setup, "decode", LESS + (NEW_ON_GPU if setup.on_gpu else NEW), ROUNDS, LESS
    )
    return others | models.over(setup, "decode", measure)


def prefill_cases(setup: Setup) -> dict[str, Case]:
    """Every model at its prompts."""
    return models.over(setup, "prefill", prefill)


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> Rows:
    """One model at one point."""
    model = kept(name)
    count = (
        (NEW_IN_WINDOWS if getattr(model.config, "sliding_window", None) else NEW_ON_GPU)
        if setup.on_gpu
        else NEW
    )
    prompt, new = (
        models.tokens(setup, model, point.batch, n, seed)
        for seed, n in enumerate((point.context, count))
    )
    random = random_caches.serve(model.config, point)
    made: Ways = {**ways_of(setup, model, prompt, new, random)}
    with torch.no_grad():
        eager = None if point.long else models.first_of(made)
    more = partial(
        figures, setup, model, eager, point.batch, {"of_bandwidth": bytes_of(model, point)}
    )
    exactly = models.exact_steps if random else models.exactly
    exact = partial(exactly, model, prompt[: models.EXACT], new[: models.EXACT])
    return models.compared(f"{name} {point}", model, made, exact, more, alone=point.long)


def figures(
    setup: Setup,
    model: Any,
    eager: Way | None,
    tokens: int,
    work: dict[str, int],
    us: float,
    way: Way,
) -> Row:
    """The figures of a way that takes `us` for `tokens`. eager: the way without a profile. work: as
    of `Setup.shares`."""
    found = {
        "tokens_s": round(tokens / us * 1e6, 1),
        "layers": model.config.num_hidden_layers,
        **setup.shares(us, **work),
    }
    if setup.on_gpu and way is not eager:
        found |= profiled(way.timed)
        if way.timed.waiting is not None:
            waited = steps_us({"": replace(way.timed, call=way.timed.waiting)}, rounds=5, cap_s=1.0)
            found["synchronised_us"] = waited[""]["median_us"]
    return found


def ways_of(
    setup: Setup, model: Any, prompt: Tensor, new: Tensor, random: bool
) -> dict[str, Callable[[], Way]]:
    """The makers of the chosen implementations of the step, over a full cache. random: not of the
    prompt, but of as many random keys and values."""
    # In a full run these are as long to compile as `hf_compiled`, and slower than the graphs.
    slow = ("attnops_hf", "attnops_paged") if setup.size == "full" else ()
    packed = model.config.model_type == "gpt_oss"
    chosen = ways.chosen(setup, "decode", "hf_eager").items()
    left = (
        ()
        if setup.ways
        else [name for name, how in chosen if name in slow or (how.packed and not packed)]
    )
    return {
        name: partial(way_of, setup, model, prompt, new, how, random)
        for name, how in chosen
        if name not in left
    }


def way_of(
    setup: Setup, model: Any, prompt: Tensor, new: Tensor, how: How, random: bool = False
) -> Way:
    """Steps for the tokens of `new`, one after the other, after `prompt`. random: the result has
    those after a random cache of the prompt's size, and those after a short one."""
    one, handle = models.patched(model, how)
    compiled, graphs, policy = how.compiled, (how.patch or {}).get("decode"), how.policy
    length, more = prompt.shape[1] + new.shape[1] + 1, Row()

    @use(**policy)
    def fill() -> None:
        one(prompt, **argument(one, cache), use_cache=True, logits_to_keep=1)

    with use(**policy):
        if (how.patch or {}).get("cache") == "paged":
            cache = handle.new_cache(prompt.shape[0], length)
        else:
            cache = (
                DynamicCache(config=one.config)
                if compiled is None
                else StaticCache(config=one.config, max_cache_len=length)
            )
        forward = one if compiled is None else setup.compiled(one.forward, **compiled)
        if random:
            random_caches.fill(cache, model, prompt.shape[0], prompt.shape[1], model.dtype)
        else:
            fill()
    rewind = models.rewinder(cache, fill)

    def step(at: int, over: Any = cache) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        token = new[:, at : at + 1]
        return (
            handle.step(token, over)
            if graphs
            else forward(token, **argument(one, over), use_cache=True).logits
        )

    def steps(after: Callable[[], None] | None = None) -> None:
        with use(**policy):
            for at in range(new.shape[1]):
                step(at)
                if after is not None:
                    after()

    def every(over: Any) -> Tensor:
        return torch.cat([step(at, over).clone() for at in range(new.shape[1])], 1)

    def found() -> Tensor:
        rewind()
        return every(cache)

    def after_a_short_one() -> Tensor:
        """In the same graphs, where there are any."""
        rows, whole = prompt.shape
        fill = partial(random_caches.fill, model=model, rows=rows, dtype=model.dtype)
        short = random_caches.short_of(whole)
        if isinstance(cache, DynamicCache):
            other = DynamicCache(config=one.config)
            fill(other, length=short)
            return every(other)
        cache.reset()
        fill(cache, length=short)
        made = every(cache)
        cache.reset()
        fill(cache, length=whole)
        return made

    @use(**policy)
    def logits() -> Tensor:
        made = settled(setup, found, more)
        if graphs:
            seen = handle.graphs.report()
            pieces, unique = seen.parts.get("decode", 0), seen.compiled.get("decode", 0)
            more.update(pieces=pieces, unique_pieces=unique, mode=seen.modes["decode"])
        return torch.stack([made, after_a_short_one()]) if random else made

    return Way(Timed(steps, rewind, new.shape[1], partial(steps, synchronize)), logits, more=more)


def settled(setup: Setup, run: Callable[[], Tensor], more: Row, calls: int = 1) -> Tensor:
    """The result of the code that is timed, after runs that compile and capture. `first_s` of
    `more`: seconds of the first `calls`."""
    with fresh_cache() if setup.on_gpu else nullcontext():
        more.setdefault("first_s", round(seconds(run, calls), 2))
        seconds(run)
        return run()


def prefill(setup: Setup, kept: models.Kept, name: str, point: Point) -> Rows:
    """The time to the first token of one model at one point."""
    model, rows = kept(name), max(1, point.batch - 1)
    lengths = [
        point.context - point.context * 7 * row // (8 * rows) for row in range(point.batch)
    ]  # without padding
    prompt = models.tokens(setup, model, *point)
    before = point.context - torch.tensor(lengths, device=setup.device)[:, None]
    mask = (torch.arange(point.context, device=setup.device) >= before).long()
    given: dict[str, Any] = (
        {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        if len(lengths) > 1
        else {}
    )

    def first_token(forward: Callable[..., Any]) -> Any:
        # The graph makes the cache itself, so prompts of one length share a graph.
        return forward(prompt, use_cache=True, logits_to_keep=1, **given).logits

    random = random_caches.serve(model.config, point)

    def way(how: How) -> Way:
        if how.device:
            return _prompt(setup, model, prompt, given, how, random)
        one, _ = models.patched(model, how) if how.patch else (model, None)
        forward = one if how.compiled is None else setup.compiled(one.forward, **how.compiled)

        def both() -> Tensor:
            empty = partial(DynamicCache, config=one.config)
            tails = random_caches.logits_after(forward, one, empty, prompt, one.dtype)
            return torch.cat([tails, first_token(forward).expand_as(tails)], 1)

        return Way(Timed(partial(first_token, forward)), both if random else None)

    known = ways.here(setup, "prefill")
    asked = {
        "hf_eager",
        *({*setup.ways} & {*ways.WAYS["prefill"]} or known),
    }  # `--ways` may name those of decode alone
    made: Ways = {name: partial(way, how) for name, how in known.items() if name in asked}
    eager = None if point.long else models.first_of(made)
    work = {"of_matmul": flop_of(model, lengths)}
    more = partial(figures, setup, model, eager, sum(lengths), work)
    first = {name: rows[: models.EXACT] for name, rows in given.items()}
    exactly = models.exact_tail if random else models.exactly
    exact = partial(exactly, model, prompt[: models.EXACT], **({} if random else first))
    return models.compared(f"{name} {point}", model, made, exact, more, alone=point.long)


def _prompt(
    setup: Setup, model: Any, prompt: Tensor, given: dict[str, Any], how: How, random: bool
) -> Way:
    """The prompt over pages, whose compiled layers every call finds compiled, and captured where
    they are. random: its last tokens after a random cache are compared, too."""
    one, handle = models.patched(model, how)
    cache, more = handle.new_cache(prompt.shape[0], prompt.shape[1] + 1), Row()

    def emptied() -> Any:
        cache.reset()
        return cache

    def first_token() -> Tensor:
        cache.reset()
        found: Tensor = one(
            prompt, **argument(one, cache), use_cache=True, logits_to_keep=1, **given
        ).logits
        return found

    if handle.decode.mode == "piecewise":
        first_token()
        handle.step(prompt[:, :1], cache)  # steps are compiled first

    def both() -> Tensor:
        whole = settled(setup, first_token, more, CAPTURE_AFTER + 1)
        if not random:
            return whole
        tails = random_caches.logits_after(one, one, emptied, prompt, one.dtype)
        return torch.cat([tails, whole.expand_as(tails)], 1)

    return Way(Timed(first_token), both, more=more)


def profiled(timed: Timed) -> Row:
    """Microseconds of a step by kind, and its kernels."""
    ran = launched(timed)
    return {f"us_{kind}": round(spent / timed.per, 1) for kind, spent in shares(ran).items()} | {
        "kernels": round(len(ran) / timed.per)
    }


def shares(kernels: list[Ran]) -> dict[str, float]:
    """Microseconds by kind, and `gaps`. Overlapping time counts for the kernel that started first:
    the other waits for it."""
    found = {"matmul": 0.0, "attention": 0.0, "glue": 0.0, "gaps": 0.0}
    at = min(kernels, default=(0.0,))[0]
    for start, end, name in sorted(kernels):
        kind = next(
            (kind for pattern, kind in KINDS.items() if re.search(pattern, name, re.IGNORECASE)),
            "glue",
        )
        found["gaps"] += max(0.0, start - at)
        found[kind] += max(0.0, end - max(at, start))
        at = max(at, end)
    return found


def launched(step: Timed) -> list[Ran]:
    """The kernels of one call on the GPU, as torch's profiler sees them."""
    if step.before is not None:
        step.before()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.call()
        torch.cuda.synchronize()
    events: Any = [e for e in seen.events() or () if str(e.device_type).endswith("CUDA")]
    return [
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if not e.name.startswith(("##", "Torch-Compiled Region"))
    ]
