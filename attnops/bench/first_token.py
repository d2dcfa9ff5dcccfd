"""Suite `first_token`: calls of `generate()` for one new token.

The ways are those of the suite `generate`. `1x128` and other points: prompts of one size, from
the third call on. `50 lengths`: prompts of one row whose lengths are random, each length once, so
that the times have what a new size costs. `worst_us`: the longest call. `captured`: the prompts
that a graph ran. `of_matmul`: as in the suite `prefill`.

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
from attnops.bench.rows import WRONG, Case, Row, Rows, with_ratios
from attnops.tune.clock import seconds, spread

SUITE = "first_token"
LENGTHS = {"toy": 3, "small": 8, "quick": 20, "full": 50}
"""Random lengths of prompts, by size of the run."""


def cases(setup: Setup) -> dict[str, Case]:
    """Other engines first, while this process holds no model; the points of every model; and random
    lengths up to those of its longest prompt of one row, but of none that is `Point.long`.

    Raises InvalidInput for a way that this device does not have.
    """
    ways.check(setup, SUITE)
    places = models.points_of(setup, SUITE)
    # One model is in memory at a time: all cases of a model follow each other.
    kept = models.keeper(setup, models.largest(p for points in places.values() for p in points))
    found = peers.cases(setup, SUITE, 1, generate.ROUNDS)
    for name, points in places.items():
        for point in points:
            found[f"{name} {point}"] = partial(
                generate.measure, setup, kept, name, point, suite=SUITE, alone=True
            )
        most = max((point.context for point in points if not point.long), default=0)
        if not most:
            continue
        case = f"{name} {LENGTHS[setup.size]} lengths up to {most}"
        found[case] = partial(measure, setup, kept, name, most, case)
    return found


class Calls:
    """The calls of one way so far: their times, how many prompts a graph ran, and what was wrong
    with one of them."""

    def __init__(self, call: Callable[..., Any], handle: Any) -> None:
        self._call, self._handle = call, handle
        self.us: list[float] = []
        self.captured, self.wrong = 0, ""

    def add(self, prompt: Tensor) -> Tensor:
        """Make one, and return the logits of its new token."""
        took, logits = timed(self._call, prompt)
        self.us.append(took)
        if self._handle is not None:
            self.captured += self._handle.took.prompt == "captured"
        return logits

    def figures(self) -> Row:
        """Those of a row."""
        if self.wrong:
            return {"wrong": WRONG + self.wrong}
        worst = round(max(self.us), 2)
        return {**spread(self.us), "worst_us": worst, "captured": self.captured}


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, most: int, case: str) -> Rows:
    """The ways at prompts of random lengths up to `most`, in turns. A way whose logits are further
    from those of transformers than twice its budget has no time."""
    model, some = kept(name), random.Random(0)
    names = dict.fromkeys(("hf", *ways.chosen(setup, SUITE)))
    calls = {way: Calls(*generate.prepared(setup, model, way, Point(1, most), 1)) for way in names}
    allowed = 0.0
    for length in (some.randint(2, most) for _ in range(LENGTHS[setup.size])):
        prompt = models.tokens(setup, model, 1, length, seed=length)
        logits = {way: each.add(prompt) for way, each in calls.items()}
        want = logits.pop("hf")
        off = models.distance(model, want)
        allowed = allowed or twice_the_budget(model, prompt, want)
        for way, got in logits.items():
            if (error := off(got, want)) > allowed:
                text = f"off by {error:.3g}, allowed {allowed:.3g}, at {length} tokens"
                calls[way].wrong = calls[way].wrong or text
    layers = {"layers": model.config.num_hidden_layers}
    rows = [{"case": case, "way": way, **layers, **calls[way].figures()} for way in names]
    return with_ratios(rows, "hf", "hf_static")


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
    exact = models.exactly(model, prompt)
    return 2 * models.budget(model, models.distance(model, logits)(logits, exact))
