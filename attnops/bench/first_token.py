"""Suite `first_token`: calls of `generate()` for one new token.

The ways are those of the suite `generate`. `1x128` and other points: prompts of one size, from
the third call on. `50 lengths`: prompts of one row whose lengths are random, each length once, so
that the times have what a new size costs. `worst_us`: the longest call. `captured`: the prompts
that a graph ran.

`vllm`, `sglang`: the same points by other engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Point, Setup, generate, models, peers, ways
from attnops.bench.rows import Case, Row, Rows, with_ratios
from attnops.tune.clock import seconds, spread

SUITE = "first_token"
LENGTHS = {"toy": 3, "small": 8, "quick": 20, "full": 50}
"""Random lengths of prompts, by size of the run."""


def cases(setup: Setup) -> dict[str, Case]:
    """Other engines first, while this process holds no model; the points of every model; and random
    lengths up to those of its longest prompt of one row.

    Raises InvalidInput for a way that this device does not have.
    """
    ways.check(setup, SUITE)
    others = peers.cases(setup, SUITE, 1, generate.ROUNDS)
    steady = models.over(setup, SUITE, partial(generate.measure, suite=SUITE, one=1))
    found: dict[str, Case] = {}
    for name, points in models.points_of(setup, SUITE).items():
        most = max(point.context for point in points)
        kept = models.keeper(setup, Point(1, most))
        case = f"{name} {LENGTHS[setup.size]} lengths up to {most}"
        found[case] = partial(measure, setup, kept, name, most, case)
    return others | steady | found


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, most: int, case: str) -> Rows:
    """The ways at prompts of random lengths up to `most`, in turns. A way whose logits are further
    from those of transformers than twice its budget has no time."""
    model, some = kept(name), random.Random(0)
    lengths = [some.randint(2, most) for _ in range(LENGTHS[setup.size])]
    chosen = {"hf": None, **ways.chosen(setup, SUITE)}
    runs = {way: generate.prepared(setup, model, way, Point(1, most), 1) for way in chosen}
    us: dict[str, list[float]] = {way: [] for way in chosen}
    rows: dict[str, Row] = {way: {"case": case, "way": way} for way in chosen}
    captured = dict.fromkeys(chosen, 0)
    allowed = 0.0
    for length in lengths:
        prompt = models.tokens(setup, model, 1, length, seed=length)
        want: Tensor | None = None
        for way, (call, handle) in runs.items():
            took, logits = timed(call, prompt)
            us[way].append(took)
            captured[way] += handle is not None and handle.took.prompt == "captured"
            if want is None:
                want = logits
                allowed = allowed or twice_the_budget(model, prompt, logits)
            elif (error := models.distance(model, want)(logits, want)) > allowed:
                rows[way].setdefault(
                    "wrong", f"wrong: off by {error:.3g}, allowed {allowed:.3g}, at {length} tokens"
                )
    for way, row in rows.items():
        if "wrong" not in row:
            row |= {**spread(us[way]), "worst_us": round(max(us[way]), 2)}
            row |= {"captured": captured[way], "layers": model.config.num_hidden_layers}
    return with_ratios(list(rows.values()), "hf", "hf_static")


def timed(call: Callable[..., Any], prompt: Tensor) -> tuple[float, Tensor]:
    """(microseconds of a call with this prompt, the logits of its new token)."""
    found: list[Any] = []
    given = {"inputs": prompt, "attention_mask": torch.ones_like(prompt)}
    more = {"output_logits": True, "return_dict_in_generate": True}
    took = 1e6 * seconds(lambda: found.append(call(**given, **more)))
    return took, torch.stack(found[0].logits, 1)


def twice_the_budget(model: Any, prompt: Tensor, logits: Tensor) -> float:
    """The largest distance between the logits of two ways that are both right. logits: those of
    transformers."""
    exact = models.widened(model)(prompt, logits_to_keep=1).logits
    return 2 * models.budget(model, models.distance(model, logits)(logits, exact))
