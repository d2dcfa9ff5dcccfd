"""Random changes of a model between two calls of generate(), compared with a twin that is not
patched."""

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
from torch.nn.modules import module as of_modules

from tests.hf import steered
from tests.hf.decoding import captures, logits
from tests.hf.helpers import LIMIT, near, relative
from tests.hf.steered import Steered, mlp_of
from tests.hf.test_captures import CALL, Doubled, both, short

assert short, "a fixture"

COUNTS = {"auto": 30, "breakable": 30, "piecewise": 6}
"""Changes of one case of each mode: 60 in `make test`, which leaves out the compiled ones, of
seconds each."""

SEEDS = {"auto": 17, "breakable": 17, "piecewise": 84}
"""Of each mode 500 changes and more in all."""


class Interrupted(Exception):
    """Of a caller's own code."""


def no_step(x):
    if x.shape[-2] == 1:
        raise Interrupted
    return x


WRONG: tuple[tuple[str, Any], ...] = (
    ("fractions", []),
    ("vector", torch.zeros(3)),
    ("settings", None),
    ("names", {}),
    ("function", no_step),
)
"""Attributes with which the model's forward raises, in the prompt or after it."""


class Drawn:
    """Makes random changes to models alike. monkeypatch: takes those of classes and files back."""

    def __init__(self, seed, models, monkeypatch):
        self.draw, self.models, self.patch = random.Random(seed), models, monkeypatch
        self.hooks, self.states = [], 0
        own = (self.hook, self.kept_hook, self.flag, self.wrong, Doubled)
        self.kinds = [*steered.CHANGES, *2 * own]

    def change(self):
        """Returns (its name, a context for the call that follows)."""
        kind = self.draw.choice(self.kinds)
        if not isinstance(kind, str):
            return kind.__name__, kind() or contextlib.nullcontext()
        by = self.draw.choice([0.5, 0.75, 1.25, 1.5])
        for model in self.models:
            steered.make(kind, model, self.patch, by)
        return f"{kind}: {by}", contextlib.nullcontext()

    @contextlib.contextmanager
    def hook(self):
        """For one call: of one module, or of all."""
        with contextlib.ExitStack() as stack:
            for hook in self._hooked():
                stack.enter_context(hook)
            yield

    def _hooked(self):
        by = self.draw.choice([0.5, 1.5])

        def scaled(module, given, out):
            return by * out if isinstance(module, Steered) else None

        if self.draw.random() < 0.5:
            return [of_modules.register_module_forward_hook(scaled)]
        return [mlp_of(model).register_forward_hook(scaled) for model in self.models]

    def kept_hook(self):
        """Until another change takes it away again."""
        if self.hooks:
            self.close()
        else:
            self.hooks = self._hooked()

    def close(self):
        """What monkeypatch does not take back."""
        while self.hooks:
            self.hooks.pop().remove()

    def flag(self):
        """A state that was not there before, for `check_flag`."""
        self.states += 1
        for model in self.models:
            mlp_of(model).state = self.states

    @contextlib.contextmanager
    def wrong(self):
        """For one call."""
        name, value = self.draw.choice(WRONG)
        kept = [getattr(mlp_of(model), name) for model in self.models]
        for model in self.models:
            setattr(mlp_of(model), name, copy.deepcopy(value))
        yield
        for model, before in zip(self.models, kept, strict=True):
            setattr(mlp_of(model), name, before)


def flip():
    """A flag that changes nothing on a CPU."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (
        not matmul.allow_bf16_reduced_precision_reduction
    )


def check_flag(handle, model):
    """Another value of the flag is captured for, and the value from before meets its graphs."""
    before, mode, made = handle.graphs, handle.took.decode, captures(handle)
    if mode == "hf":
        return
    flip()
    try:
        outcome(model)
    finally:
        flip()
    assert captures(handle) > made
    outcome(model)
    # Steps of each state are compiled after as many.
    assert handle.graphs is before or handle.took.decode != mode


CASES = [
    pytest.param(mode, seed, marks=[pytest.mark.full] * (seed > 0 or mode == "piecewise"))
    for mode in SEEDS
    for seed in range(SEEDS[mode])
]


def outcome(model):
    try:
        return logits(model, *CALL)
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize(("mode", "seed"), CASES)
def test_random_changes(mode, seed, monkeypatch):
    model, twin = models = steered.twins()
    drawn, done = Drawn(seed, models, monkeypatch), []
    with contextlib.closing(drawn), both(mode, model, twin) as pair:
        near(outcome(model), outcome(twin))
        for _ in range(COUNTS[mode]):
            what, around = drawn.change()
            done.append(what)
            with around:
                want, got = outcome(twin), outcome(model)
            if isinstance(want, torch.Tensor):
                assert isinstance(got, torch.Tensor) and relative(got, want) < LIMIT, done
            else:
                assert got is want, done
            if what == "flag":
                check_flag(pair.handle, model)
