"""Suite `cliffs`: seconds of a call right after a change, and of the same call again.

The changes meet one patched model that is warm, so that its steps are compiled and captured.
`first_s`: the call after the change, the change included. `then_s`: the same call again. `cost_s`:
the difference. Without a change, steps that began without a compiler are compiled once, in the call
that reaches their number: `steps are compiled`. `attnops`: `attnops.patch(model)`, no more.
`attnops_piecewise`, `attnops_breakable`: with `decode=`. `attnops_paged`, on a CPU: over pages
without graphs. The suite `generate` judges the results of such calls, and has the first call of a
process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

import attnops.hf
from attnops.bench import Point, Setup, generate, models, ways
from attnops.bench.rows import Case, LeftOut, Row, Rows
from attnops.core.select import use
from attnops.hf.cache.names import argument
from attnops.tune.clock import Run, seconds

STEPS = 4  # of a loop over a cache
ADAPTERS = ("one", "other")


class Warm(NamedTuple):
    """A patched model that is warm."""

    setup: Setup
    model: Any
    handle: Any
    point: Point

    def generate(self, batch: int = 1, context: int = 1) -> Any:
        """A call with so many times the rows and the prompt's tokens."""
        point = Point(batch * self.point.batch, context * self.point.context)
        return self.model.generate(**generate.arguments(self.setup, self.model, point))

    def filled(self) -> Any:
        """A new cache with the prompt in it, and with room for further steps."""
        cache = self.handle.new_cache(self.point.batch, self.point.context + 4 * STEPS)
        self.model(
            models.tokens(self.setup, self.model, *self.point),
            **argument(self.model, cache),
            use_cache=True,
            logits_to_keep=1,
        )
        return cache

    def steps(self, *caches: Any) -> None:
        """`STEPS` steps over all caches in turn: the handle's where it has graphs."""
        token = models.tokens(self.setup, self.model, self.point.batch, 1)
        for cache in STEPS * caches:
            if self.handle.decode.mode == "hf":
                self.model(token, **argument(self.model, cache), use_cache=True)
            else:
                self.handle.step(token, cache)

    def in_a_thread(self) -> Any:
        """A call in a new thread, whose device is not yet this one's."""
        more: Row = (
            {"initializer": torch.cuda.set_device, "initargs": (self.setup.device,)}
            if self.setup.on_gpu
            else {}
        )
        with ThreadPoolExecutor(1, **more) as pool:
            return pool.submit(self.generate).result()

    def switched(self) -> Any:
        """A call with the other adapter."""
        self.model.set_adapter(ADAPTERS[1])
        return self.generate()

    def deterministic(self) -> Any:
        """A call under that policy."""
        with use(deterministic=True):
            return self.generate()


CHANGES: dict[str, Callable[[Warm], Run]] = {
    "a second cache of the same size": lambda warm: lambda: warm.steps(warm.filled()),
    "two caches in turn": lambda warm: partial(warm.steps, warm.filled(), warm.filled()),
    "eight times the batch": lambda warm: partial(warm.generate, batch=8),
    "a longer text than the pages hold": lambda warm: partial(warm.generate, context=4),
    "a second thread": lambda warm: warm.in_a_thread,
    "another policy": lambda warm: warm.deterministic,
}
ADAPTER = "another adapter"
SWITCH = "steps are compiled"


def cases(setup: Setup) -> dict[str, Case]:
    """All changes of a way, and another adapter, at the first prompt of each model of the suite
    `generate`."""
    measured: dict[str, Any] = models.over(setup, "cliffs", measure)
    asked = [(way, adapters) for way in ways.here(setup, "cliffs") for adapters in (False, True)]
    return {
        f"{case}, {way}" + (f", {ADAPTER}" if adapters else ""): partial(
            one, way=way, adapters=adapters
        )
        for way, adapters in asked
        for case, one in measured.items()
    }


@torch.no_grad()
def measure(
    setup: Setup,
    kept: models.Kept,
    name: str,
    point: Point,
    way: str = "attnops",
    adapters: bool = False,
) -> Rows:
    """The changes of one way, one after the other. adapters: of another adapter alone.

    Raises LeftOut without a peft that transformers takes.
    """
    one = models.twin(kept(name))
    if adapters:
        add_adapters(one)
    rows = []
    with attnops.hf.patch(one, **(ways.WAYS["cliffs"][way].patch or {})) as handle:
        warm = Warm(setup, one, handle, point)
        for _ in range(generate.warm_calls(setup)):
            warm.generate()
        if not adapters and handle.decode.mode == "auto":
            rows.append(
                row_of(
                    f"{name} {point}, {SWITCH}", way, seconds(warm.generate), seconds(warm.generate)
                )
            )
        else:
            warm.generate()
        warm.steps(warm.filled())
        for change, make in (
            {ADAPTER: lambda warm: warm.switched} if adapters else CHANGES
        ).items():
            run = make(warm)
            rows.append(row_of(f"{name} {point}, {change}", way, seconds(run), seconds(run)))
            warm.generate()
    return rows


def row_of(case: str, way: str, first_s: float, then_s: float) -> Row:
    """The row of a call, and of the same call again."""
    figures = {"first_s": first_s, "then_s": then_s, "cost_s": first_s - then_s}
    return {
        "case": case,
        "way": way,
        "median_us": round(1e6 * first_s, 2),
        **{figure: round(s, 3) for figure, s in figures.items()},
    }


def add_adapters(model: Any) -> None:
    """Both, the first one in use."""
    if find_spec("peft") is None:
        raise LeftOut("peft is not installed")
    from peft import LoraConfig
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import peft_utils

    try:
        peft_utils.check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        raise LeftOut(str(error)) from None
    for adapter in ADAPTERS:
        model.add_adapter(LoraConfig(r=8, target_modules=["q_proj", "v_proj"]), adapter)
    model.set_adapter(ADAPTERS[0])
