"""Suite `prefill`: the time to the first token of Hugging Face models: prompts over an empty cache, logits of the last token.

`hf_eager`: transformers with SDPA. `hf_compiled`: its forward compiled. `attnops_eager`, `attnops_compiled`: the same model, patched.
Every call makes its cache anew. Logits are compared as in the suite `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnops.bench import models
from attnops.bench.rows import Case, Row, Way
from attnops.bench.setup import Point, Setup
from attnops.tune.clock import Timed

ON_GPU = {"llama-3-8b-shape": (Point(1, 512), Point(1, 4096))}
PLACES: models.Places = {
    "toy": {"llama": (Point(2, 12),)},
    "small": {name: (Point(1, 128), Point(4, 256)) for name in ("llama", "llama-small")},
    "quick": ON_GPU,
    "full": ON_GPU,
}


def cases(setup: Setup) -> dict[str, Case]:
    """Every model at its points."""
    return models.over(setup, PLACES, measure)


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> list[Row]:
    """One model at one point."""
    model = kept(name)
    prompt, (patched, _) = models.tokens(setup, model, point.batch, point.context), models.patched(model, "hf")

    def first_token(forward: Callable[..., Any]) -> Way:
        # The graph makes the cache itself, so prompts of one length share a graph.
        return Way(Timed(lambda: forward(prompt, use_cache=True, logits_to_keep=1).logits))

    def figures(us: float, way: Way) -> dict[str, float]:
        return {"tokens_s": round(point.batch * point.context / us * 1e6, 1), "layers": model.config.num_hidden_layers}

    ways = {
        "hf_eager": first_token(model), "hf_compiled": first_token(setup.compiled(model.forward)),
        "attnops_eager": first_token(patched), "attnops_compiled": first_token(setup.compiled(patched.forward)),
    }  # fmt: skip
    return models.compared(f"{name} {point}", model, ways, prompt, None, figures)
