"""Suite `generate`: whole calls of a model's `generate()`, greedy, the prompt included, and the
first call of a process.

`hf`: transformers over its dynamic cache with SDPA. `hf_static`: `cache_implementation="static"`,
which transformers compiles on a GPU. `attnops`: `attnops.patch(model)`, no more. `attnops_hf`,
`attnops_paged`: over transformers' cache and over pages, decoding as transformers does.
`attnops_piecewise`, `attnops_breakable`: over pages, decoding in CUDA graphs. `hf_again`: a second
copy of `hf`, which shows how much two copies of one model differ; it runs only if `--ways` names
it. With `--ways` there are more rounds and no first calls.

Times are those of a token, from calls in turns. `cache`, `decode`: as `Patched.took` says.
`plain_steps`: steps that graphs did not serve. `..., first call`: whole calls in fresh processes,
the patch included. `first_s`: with empty caches of Inductor and Triton; `warm_s`: in the next
process, which finds these caches; `second_s`: its second call.

`vllm`, `sglang`: whole calls of other engines, after one another. Their `first_s` includes imports
and the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Point, Setup, models, peers, ways
from attnops.bench.overhead import in_a_process
from attnops.bench.rows import Case, Row, Rows, Way, Ways, time_if_right, with_ratios
from attnops.bench.work import flop_of
from attnops.kernels.shared.launch.beside import BESIDE
from attnops.tune.clock import Timed, seconds, steps_us

NEW = {"toy": 6, "small": 16, "quick": 32, "full": 128}
FIRST_NEW = NEW | {
    "quick": 16,
    "full": 16,
}  # of first calls, which are about the seconds before the tokens
ROUNDS, MORE_ROUNDS = 3, 16
WARM = 2
"""Calls of a patched model after the first one: the prompt of the second is captured, and that of
the third is replayed. Kernels that threads compile are waited for after each: meanwhile calls would
run the model's own layers."""
# Ways whose first call is measured, in two processes each
FIRST = ("hf", "attnops", "hf_static", "attnops_piecewise")


def cases(setup: Setup) -> dict[str, Case]:
    """Other engines first, while this process holds no model; steady calls of every model at its
    prompts; first calls at its first one.

    Raises InvalidInput for a way that this device does not have.
    """
    ways.check(setup, "generate")
    steady = models.over(setup, "generate", measure)
    others = peers.cases(setup, "generate", NEW[setup.size], ROUNDS)
    if setup.ways:
        return others | steady
    first: Row = models.over(setup, "cliffs", first_call)  # has the first point of each model
    known = ways.here(setup, "generate")
    found = {
        f"{case}, first call, {way}": partial(one, way)
        for way in FIRST
        if way in known
        for case, one in first.items()
    }
    return others | steady | found


def arguments(setup: Setup, model: Any, point: Point, new: int = 0) -> Row:
    """Of `generate()` with a random prompt. new: tokens; 0: those of the setup's size."""
    prompt = models.tokens(setup, model, point.batch, point.context)
    # No token has the end's id, so that all calls are equally long, and the stopping test is made.
    given: dict[str, Any] = {
        "max_new_tokens": new or NEW[setup.size],
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": model.config.vocab_size,
    }
    return {"inputs": prompt, "attention_mask": torch.ones_like(prompt), **given}


def prepared(
    setup: Setup, model: Any, way: str, point: Point, new: int = 0
) -> tuple[Callable[..., Any], Any]:
    """(`generate()` of a twin with its arguments, the handle of its patch). new: of `arguments`."""
    how = ways.here(setup, "generate")[way]
    one, handle = models.patched(model, how)
    return partial(one.generate, **arguments(setup, one, point, new), **how.given), handle


@torch.no_grad()
def measure(
    setup: Setup,
    kept: models.Kept,
    name: str,
    point: Point,
    suite: str = "generate",
    alone: bool = False,
) -> Rows:
    """The ways of a suite at one prompt, in turns. alone: calls of one token."""
    model, new = kept(name), 1 if alone else NEW[setup.size]

    def way(name: str) -> Way:
        call, handle = prepared(setup, model, name, point, new)
        more: Row = {}

        def results() -> tuple[Tensor, Tensor, Tensor]:
            for _ in range(1 if handle is None else 1 + WARM):
                text = call()
                wait_for_kernels()
            if handle is not None:
                plain = {"plain_steps": handle.plain_steps} if handle.graphs else {}
                took = handle.took
                more.update(cache=took.cache, decode=took.decode, **plain)
                if took.prompt:
                    more["prompt"] = took.prompt
            found = call(output_logits=True, return_dict_in_generate=True)
            return text, found.sequences, torch.stack(found.logits, 1)

        return Way(Timed(call, per=new), results, more=more)

    exactly = partial(models.exact_of, model, new=new)
    flop = flop_of(model, [point.context] * point.batch)
    hf = way("hf")
    # Two calls on a GPU may choose other tokens where two are nearly as good, so logits are
    # compared with those of their own text.
    _, text, logits = hf.computed()
    exact = exactly(text)

    def off(got: tuple[Tensor, Tensor, Tensor], want: Tensor) -> float:
        """The largest of: the logits' error, how far tokens are below the best ones, relative to
        these, and in float32 the other tokens."""
        text, judged, logits = got
        if text.shape != want.shape:
            return inf
        here = exact if torch.equal(text, want) else exactly(text)
        error = models.distance(model, logits)(
            logits, here if torch.equal(text, judged) else exactly(judged)
        )
        other = float((text != want).double().mean()) if setup.dtype == torch.float32 else 0.0
        return max(error, other, models.below_the_best(here, text))

    def figures(us: float, _: Way) -> Row:
        return {
            "tokens_s": round(point.batch / us * 1e6, 1),
            "layers": model.config.num_hidden_layers,
            "new_tokens": new,
            **(setup.shares(us, of_matmul=flop) if alone else {}),
        }

    others: Ways = {name: partial(way, name) for name in ways.chosen(setup, suite) if name != "hf"}
    allowed = models.budget(model, models.distance(model, logits)(logits, exact))
    clock = partial(steps_us, rounds=MORE_ROUNDS if setup.ways else ROUNDS, cap_s=40.0)
    return with_ratios(
        time_if_right(f"{name} {point}", {"hf": hf, **others}, text, allowed, clock, off, figures),
        "hf",
        "hf_static",
    )


def wait_for_kernels() -> None:
    """Wait for those that threads compile."""
    for launch in BESIDE.pending():
        launch.done.wait()


def first_call(
    setup: Setup, kept: models.Kept, name: str, point: Point, way: str = "attnops"
) -> Rows:
    """Two processes, one after the other, with the same caches of compilers, which are empty at
    first.

    At toy size this process, because imports would take longer than all else.
    """
    from attnops.core.private_torch import fresh_cache

    run: Callable[..., tuple[float, float]] = (
        calls_s if setup.size == "toy" else partial(in_a_process, calls_s)
    )
    with fresh_cache():
        (cold_s, _), (warm_s, second_s) = (run(setup, name, point, way) for _ in range(2))
    case = {
        "case": f"{name} {point}, first call",
        "way": way,
        "median_us": round(1e6 * cold_s, 2),
        "new_tokens": FIRST_NEW[setup.size],
    }
    return [
        {
            **case,
            "first_s": round(cold_s, 3),
            "warm_s": round(warm_s, 3),
            "second_s": round(second_s, 3),
        }
    ]


def calls_s(setup: Setup, name: str, point: Point, way: str) -> tuple[float, float]:
    """Seconds of the patch and the first call of a model that is there, and of the second call."""
    if setup.on_gpu:
        torch.cuda.set_device(setup.device)
    model, calls = models.build(setup, name, point), list[Callable[..., Any]]()

    def first() -> None:
        calls.append(
            partial(prepared(setup, model, way, point)[0], max_new_tokens=FIRST_NEW[setup.size])
        )
        calls[0]()

    return seconds(first), seconds(calls[0])
