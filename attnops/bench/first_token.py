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
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Point, Setup, generate, models, peers, ways
from attnops.bench.rows import WRONG, Case, Row, Rows, digits, with_ratios
from attnops.bench.work import experts
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
    """The calls of one way so far: their times, the logits of their new tokens, and how many
    prompts a graph ran. verdict: error and budget, or what was wrong."""

    def __init__(self, call: Callable[..., Any], handle: Any) -> None:
        self._call, self._handle = call, handle
        self.us: list[float] = []
        self.logits: list[Tensor] = []
        self.captured = 0
        self.verdict: Row = {}

    def add(self, prompt: Tensor) -> None:
        """Make one."""
        took, logits = timed(self._call, prompt)
        self.us.append(took)
        self.logits.append(logits)
        if self._handle is not None:
            self.captured += self._handle.took.prompt == "captured"

    def figures(self) -> Row:
        """Those of a row."""
        if "wrong" in self.verdict:
            return self.verdict
        worst = round(max(self.us), 2)
        return {**self.verdict, **spread(self.us), "worst_us": worst, "captured": self.captured}


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, most: int, case: str) -> Rows:
    """The ways at prompts of random lengths up to `most`, in turns. A way whose logits are wrong
    has no time."""
    model, some = kept(name), random.Random(0)
    names = dict.fromkeys(("hf", *ways.chosen(setup, SUITE)))
    calls = {way: Calls(*generate.prepared(setup, model, way, Point(1, most), 1)) for way in names}
    lengths = [some.randint(2, most) for _ in range(LENGTHS[setup.size])]
    prompts = [models.tokens(setup, model, 1, length, seed=length) for length in lengths]
    for prompt in prompts:
        for each in calls.values():
            each.add(prompt)
    judge = by_median if experts(model.config) else by_length
    judge(model, prompts, calls)
    layers = {"layers": model.config.num_hidden_layers}
    rows = [{"case": case, "way": way, **layers, **calls[way].figures()} for way in names]
    return with_ratios(rows, "hf", "hf_static")


def by_length(model: Any, prompts: list[Tensor], calls: dict[str, Calls]) -> None:
    """Logits are wrong that are further from those of transformers than twice the budget, which is
    that of the first prompt: two ways that are both right may differ by so much."""
    want = calls["hf"].logits
    exact = models.exactly(model, prompts[0])
    allowed = 2 * models.budget(model, models.distance(model, exact)(want[0], exact))
    for each in calls.values():
        for prompt, got, its in zip(prompts, each.logits, want, strict=True):
            if (error := models.distance(model, its)(got, its)) > allowed:
                text = f"off by {error:.3g}, allowed {allowed:.3g}, at {prompt.shape[1]} tokens"
                each.verdict = {"wrong": WRONG + text}
                break


def by_median(model: Any, prompts: list[Tensor], calls: dict[str, Calls]) -> None:
    """The median prompt counts, by its distance from exact logits: where two experts tie, rounding
    chooses between them, and the logits of one prompt are far off in any way. Zeros, and the logits
    of another text, are further off than that, and wrong at any length."""
    exact = [models.exactly(model, prompt) for prompt in prompts]
    errors = {
        way: [models.distance(model, e)(got, e) for got, e in zip(each.logits, exact, strict=True)]
        for way, each in calls.items()
    }
    allowed, most = models.budget(model, median(errors["hf"])), max(models.MOST, *errors["hf"])
    for way, each in calls.items():
        error, worst = median(errors[way]), max(errors[way])
        if error > allowed:
            text = f"off by {error:.3g}, allowed {allowed:.3g}, at half of the lengths"
            each.verdict = {"wrong": WRONG + text}
        elif worst > most:
            at = prompts[errors[way].index(worst)].shape[1]
            text = f"off by {worst:.3g}, allowed {most:.3g}, at {at} tokens"
            each.verdict = {"wrong": WRONG + text}
        else:
            each.verdict = {"error": digits(error), "budget": digits(allowed)}


def timed(call: Callable[..., Any], prompt: Tensor) -> tuple[float, Tensor]:
    """(microseconds of a call with this prompt, the logits of its new token)."""
    found: list[Any] = []
    given = {"inputs": prompt, "attention_mask": torch.ones_like(prompt)}
    more = {"output_logits": True, "return_dict_in_generate": True}
    took = 1e6 * seconds(lambda: found.append(call(**given, **more)))
    return took, torch.stack(found[0].logits, 1)
