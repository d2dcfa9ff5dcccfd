"""Suite `prefill`: the time to the first token of whole Hugging Face models: prompts over an empty cache, logits of the last token.

`hf_eager`: transformers with SDPA. `hf_compiled`: its forward compiled. `attnops_eager`, `attnops_compiled`: the same model, patched.
Every call makes its cache anew. Logits are compared as those of the suite `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import models
from attnops.bench.report import Case
from attnops.bench.setup import Point, Setup
from attnops.bench.timing import Timed, steps_us
from attnops.bench.verdict import Row, Way, judged, ratio_to

SHORT, LONG = Point(1, 512), Point(1, 4096)
PLACES: models.Places = {
    "toy": {"llama": (Point(2, 12),)},
    "small": {name: (Point(1, 128), Point(4, 256)) for name in ("llama", "llama-small")},
    "quick": {"llama-3-8b-shape": (SHORT, LONG)},
    "full": {"llama-3-8b-shape": (SHORT, LONG)},
}


def cases(setup: Setup) -> dict[str, Case]:
    """Of the suite."""
    return models.over(setup, PLACES, measure)


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> list[Row]:
    """One model at one point."""
    model = kept(name)
    prompt = models.tokens(setup, model, point.batch, point.context)
    patched = models.twin(model)
    attnops.hf.patch(patched)
    # A cache that is made inside the graph is not one of its inputs: prompts of one length have one graph.
    ways = {
        "hf_eager": first_token(model, prompt), "hf_compiled": first_token(setup.compiled(model.forward), prompt),
        "attnops_eager": first_token(patched, prompt), "attnops_compiled": first_token(setup.compiled(patched.forward), prompt),
    }  # fmt: skip
    with torch.no_grad():
        want, eager = models.exactly(model, prompt[: models.EXACT]), ways["hf_eager"].timed.call()
        distance = models.distance(model, eager)
        allowed = models.budget(model, distance(eager, want))
    clock = partial(steps_us, cap_s=4.0)
    rows = judged(
        f"{name} {point}", ways, want, allowed, clock, distance,
        lambda us: {"tokens_s": round(point.batch * point.context / us * 1e6, 1), "layers": model.config.num_hidden_layers},
    )  # fmt: skip
    return ratio_to(ratio_to(rows, "hf_eager", "of_hf_eager"), "hf_compiled", "of_hf_compiled")


def first_token(forward: Callable[..., Any], prompt: Tensor) -> Way:
    """The logits of the last token of each prompt."""

    def call() -> Tensor:
        out: Tensor = forward(prompt, use_cache=True, logits_to_keep=1).logits
        return out

    return Way(Timed(call))
