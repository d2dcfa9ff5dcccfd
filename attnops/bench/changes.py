"""The changes that users make between calls, each as the calls of a stream: the suite `cliffs`.

The call at a place of a stream is the same for every way, and can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from attnops.bench import Point, Setup, generate, models
from attnops.bench.rows import LeftOut, Row
from attnops.core.errors import InvalidInput, PatchError
from attnops.core.select import use
from attnops.hf.cache.names import argument

NEW = 3  # tokens of a call
CACHES = 3  # that are in use at a time
ADAPTERS = ("one", "other")
POLICIES: tuple[Row, ...] = ({}, {"deterministic": True})


class Sizes(NamedTuple):
    """Of the streams: their calls; the largest batch, and the tokens of its prompts; the longest
    prompt of many lengths; the longest text."""

    calls: int
    batch: int
    row: int
    prompt: int
    text: int


SIZES = {
    "toy": Sizes(4, 3, 4, 12, 60),
    "small": Sizes(12, 8, 16, 128, 512),
    "quick": Sizes(50, 64, 32, 4096, 8192),
    "full": Sizes(200, 64, 32, 4096, 8192),
}
# The second model, by size of the run. It has other shapes than most first ones.
SECOND = {
    "toy": "qwen3",
    "small": "qwen3",
    "quick": "llama-3.2-1b-shape",
    "full": "llama-3.2-1b-shape",
}

Output = tuple[Tensor, Tensor | None]
"""The text of a call, int64 `[B, S + NEW]`, and the logits of its new tokens, `[B, NEW, V]`: None
unless they are asked for, since `generate()` has a slower loop with them."""


class Slot:
    """A cache, and the next token of its text, `[B, 1]`."""

    def __init__(self, cache: Any, token: Tensor) -> None:
        self.cache, self.token = cache, token


class Side:
    """A way's models, each with the handle of its patch, which is None if it is not patched.

    point: the prompt of calls that do not change it.
    """

    def __init__(self, setup: Setup, point: Point, patched: list[tuple[Any, Any]]) -> None:
        self.setup, self.point, self.patched = setup, point, patched
        self.used = patched[0][0]  # the model of the last call
        self._slots: list[Slot] = []

    @property
    def model(self) -> Any:
        """The first one."""
        return self.patched[0][0]

    def call(
        self, logits: bool = False, *, point: Point | None = None, seed: int = 0, which: int = 0
    ) -> Output:
        """A `generate()` of the model of this number. seed: of the prompt. A model has few
        positions: the prompt is as long as they allow."""
        self.used = model = self.patched[which][0]
        batch, context = point or self.point
        context = min(context, positions(model) - NEW)
        given = generate.arguments(self.setup, model, Point(batch, context), NEW)
        given["inputs"] = models.tokens(self.setup, model, batch, context, seed)
        if not logits:
            return model.generate(**given), None
        found = model.generate(**given, output_logits=True, return_dict_in_generate=True)
        return found.sequences, torch.stack(found.logits, 1)

    def over_caches(self, logits: bool, seed: int) -> Output:
        """A loop of one's own: a new cache takes the place of the oldest one, and all caches make
        their steps in turn. The text is that of the new one."""
        prompt = models.tokens(self.setup, self.model, *self.point, seed)
        self._slots = self._slots[1 - CACHES :]
        cache = self._new_cache()
        found = [self._forward(prompt, cache, logits_to_keep=1)]
        text = [prompt, chosen(found[0])]
        new = Slot(cache, text[-1])
        self._slots.append(new)
        for _ in range(NEW - 1):
            for slot in self._slots:
                step = self._step(slot)
                slot.token = chosen(step)
                if slot is new:
                    found.append(step)
                    text.append(slot.token)
        return torch.cat(text, 1), torch.cat(found, 1)

    def _new_cache(self) -> Any:
        model, handle = self.patched[0]
        if handle is None:
            return transformers.DynamicCache(config=model.config)
        batch, context = self.point
        try:
            return handle.new_cache(batch, context + CACHES * NEW)
        except PatchError as error:
            raise LeftOut(str(error)) from None

    def _forward(self, tokens: Tensor, cache: Any, **more: Any) -> Tensor:
        """Logits of a call of the model."""
        cached = argument(self.model, cache)
        logits: Tensor = self.model(tokens, **cached, use_cache=True, **more).logits
        return logits.clone()

    def _step(self, slot: Slot) -> Tensor:
        """Logits `[B, 1, V]` of the next token: the handle's where it has graphs."""
        _, handle = self.patched[0]
        if handle is None or handle.decode.mode == "hf":
            return self._forward(slot.token, slot.cache)
        step: Tensor = handle.step(slot.token, slot.cache)
        return step.clone()


def chosen(logits: Tensor) -> Tensor:
    """The best token of the last position, `[B, 1]`."""
    return logits[:, -1].argmax(-1, keepdim=True)


def positions(model: Any) -> int:
    """Those that a model has; of one that does not say, more than any suite asks for."""
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 20)


Turn = Callable[[Side, bool], Output]
"""A call of a stream by a side, with its logits or without."""


def lengths(sizes: Sizes, at: int, some: Random) -> Turn:
    """Prompts of one row, of random lengths."""
    point = Point(1, some.randint(1, sizes.prompt))
    return partial(Side.call, point=point, seed=at)


def batches(sizes: Sizes, at: int, some: Random) -> Turn:
    """Short prompts of so many rows."""
    point = Point(some.randint(1, sizes.batch), sizes.row)
    return partial(Side.call, point=point, seed=at)


def texts(sizes: Sizes, at: int, some: Random) -> Turn:
    """Prompts of one row. The logarithm of the length is evenly spread: most prompts are short, and
    some are longer than all before."""
    point = Point(1, round(sizes.text ** some.random()))
    return partial(Side.call, point=point, seed=at)


def caches(sizes: Sizes, at: int, some: Random) -> Turn:
    """Loops over caches in turn."""
    return partial(Side.over_caches, seed=at)


def policies(sizes: Sizes, at: int, some: Random) -> Turn:
    """Policies in turn."""

    def turn(side: Side, logits: bool) -> Output:
        with use(**POLICIES[at % 2]):
            return side.call(logits)

    return turn


def threads(sizes: Sizes, at: int, some: Random) -> Turn:
    """A new thread for each call."""

    def turn(side: Side, logits: bool) -> Output:
        device = side.setup.device
        begin = partial(torch.cuda.set_device, device) if side.setup.on_gpu else None
        with ThreadPoolExecutor(1, initializer=begin) as pool:
            return pool.submit(side.call, logits).result()

    return turn


def adapters(sizes: Sizes, at: int, some: Random) -> Turn:
    """Adapters in turn."""

    def turn(side: Side, logits: bool) -> Output:
        side.model.set_adapter(ADAPTERS[at % 2])
        return side.call(logits)

    return turn


def dtypes(sizes: Sizes, at: int, some: Random) -> Turn:
    """The model's weights in two dtypes in turn."""

    def turn(side: Side, logits: bool) -> Output:
        side.model.to(other_dtype(side.setup) if at % 2 == 0 else side.setup.dtype)
        return side.call(logits)

    return turn


def in_both_dtypes(setup: Setup, model: Any) -> list[Any]:
    """The model, which gets numbers that both dtypes of `dtypes` hold, so that no turn rounds them:
    the frequencies of a rotation are of float32."""
    for dtype in 2 * (other_dtype(setup), setup.dtype):
        model.to(dtype)
    return [model]


def other_dtype(setup: Setup) -> torch.dtype:
    """The one that a stream changes to."""
    return torch.float16 if setup.on_gpu else torch.bfloat16


def two_models(sizes: Sizes, at: int, some: Random) -> Turn:
    """Two models in turn."""
    return partial(Side.call, which=at % 2)


def one(setup: Setup, model: Any) -> list[Any]:
    """The model alone."""
    return [model]


def adapted(setup: Setup, model: Any) -> list[Any]:
    """The model with both adapters, the first one in use. Raises LeftOut without a peft that
    transformers takes, or linears for it."""
    if find_spec("peft") is None:
        raise LeftOut("peft is not installed")
    from peft import LoraConfig
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import peft_utils

    # Without random weights both adapters would give what the model gives.
    how = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = models.twin(model)
    try:
        peft_utils.check_peft_version(MIN_PEFT_VERSION)
        for adapter in ADAPTERS:
            found.add_adapter(how, adapter)
    except ValueError as error:
        raise LeftOut(str(error)) from None
    found.set_adapter(ADAPTERS[0])
    return [found]


def beside_another(setup: Setup, model: Any, name: str = "") -> list[Any]:
    """The model and another. Raises LeftOut where memory does not hold it."""
    try:
        return [model, models.build(setup, name or SECOND[setup.size])]
    except InvalidInput as error:
        raise LeftOut(str(error)) from None


class Kind(NamedTuple):
    """A stream. turn: its call at a place. models: those that a side has a twin of."""

    turn: Callable[[Sizes, int, Random], Turn]
    models: Callable[[Setup, Any], list[Any]] = one


KINDS = {
    "new prompt lengths": Kind(lengths),
    "batches": Kind(batches),
    "longer texts": Kind(texts),
    "caches": Kind(caches),
    "policies": Kind(policies),
    "threads": Kind(threads),
    "adapters": Kind(adapters, adapted),
    "dtypes": Kind(dtypes, in_both_dtypes),
    "two models": Kind(two_models, beside_another),
}


def largest(sizes: Sizes, point: Point) -> Point:
    """The point of a stream that takes the most memory."""
    others = Point(1, sizes.text), Point(sizes.batch, sizes.row), point
    return max(others, key=lambda each: each.batch * each.context)
