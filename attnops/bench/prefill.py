"""Suite `prefill`: the time to the first token of Hugging Face models: prompts over an empty cache, logits of the last token.

`hf_eager`: transformers with SDPA. `hf_compiled`: its forward compiled. `attnops_eager`, `attnops_compiled`: the same model, patched.
Every call makes its cache anew. Logits are compared as in the suite `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import models
from attnops.bench.rows import Case, Row, Way, time_if_right, with_ratios
from attnops.bench.setup import Point, Setup
from attnops.tune.clock import Timed, steps_us

SHORT, LONG = Point(1, 512), Point(1, 4096)
PLACES: models.Places = {
    "toy": {"llama": (Point(2, 12),)},
    "small": {name: (Point(1, 128), Point(4, 256)) for name in ("llama", "llama-small")},
    "quick": {"llama-3-8b-shape": (SHORT, LONG)},
    "full": {"llama-3-8b-shape": (SHORT, LONG)},
}


def cases(setup: Setup) -> dict[str, Case]:
    """Every model at its points."""
    return models.over(setup, PLACES, measure)


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> list[Row]:
    """One model at one point."""
    model = kept(name)
    prompt, patched = models.tokens(setup, model, point.batch, point.context), models.twin(model)
    attnops.hf.patch(patched)

    def first_token(forward: Callable[..., Any]) -> Way:
        # The graph makes the cache itself, so prompts of one length share a graph.
        return Way(Timed(lambda: forward(prompt, use_cache=True, logits_to_keep=1).logits))

    ways = {
        "hf_eager": first_token(model), "hf_compiled": first_token(setup.compiled(model.forward)),
        "attnops_eager": first_token(patched), "attnops_compiled": first_token(setup.compiled(patched.forward)),
    }  # fmt: skip
    with torch.no_grad():
        eager: Tensor = ways["hf_eager"].timed.call()
    want, distance, allowed = models.expected(model, eager, prompt)
    layers = model.config.num_hidden_layers
    rows = time_if_right(
        f"{name} {point}", ways, want, allowed, partial(steps_us, cap_s=4.0), distance,
        lambda us: {"tokens_s": round(point.batch * point.context / us * 1e6, 1), "layers": layers},
    )  # fmt: skip
    return with_ratios(rows, "hf_eager", "hf_compiled")
