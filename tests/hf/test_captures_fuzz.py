"""Random changes of a model between two calls of generate(), compared with a twin that is not patched."""

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_modules

from attnops.hf.paged import prompt
from tests.hf import steered
from tests.hf.helpers import LIMIT, relative
from tests.hf.steered import Settings, Steered, times
from tests.hf.test_captures import CALL, MODES, Doubled, captures, logits, patched

CHANGES = {"auto": 30, "breakable": 30, "piecewise": 6}
"""Of one case of each mode: 60 in `make test`, which leaves out the compiled ones, of seconds each."""

SEEDS = {"auto": 17, "breakable": 17, "piecewise": 84}
"""Of each mode 500 changes and more in all."""


class Drawn:
    """Makes random changes to models alike. monkeypatch: takes those of classes, files and torch back."""

    def __init__(self, seed, models, monkeypatch):
        self.draw, self.models, self.patch = random.Random(seed), models, monkeypatch
        self.hooks, self.states = [], 0
        self.kinds = (
            self.attribute, self.attribute, self.vector, self.in_place, self.of_all, self.function, self.forward, self.weight, self.buffer,
            self.adapter, self.config, self.hook, self.kept_hook, self.flag, self.unread, self.wrong, self.around,
        )  # fmt: skip

    def number(self):
        return self.draw.choice([0.5, 0.75, 1.25, 1.5])

    def change(self):
        """Returns (its name, a context for the call that follows)."""
        kind = self.draw.choice(self.kinds)
        return kind.__name__, kind() or contextlib.nullcontext()

    def mlps(self):
        return [model.model.layers[1].mlp for model in self.models]

    def attribute(self):
        name, by = self.draw.choice(["count", "fractions", "pair", "names", "settings"]), self.number()
        for mlp in self.mlps():
            made = {
                "count": 2, "fractions": [1.0, by], "pair": (by, [by]), "names": {"a": {"b": by}}, "settings": Settings(by),
            }  # fmt: skip
            setattr(mlp, name, made[name])

    def vector(self):
        vector = self.draw.choice([None, torch.full((self.models[0].config.hidden_size,), self.number())])
        for mlp in self.mlps():
            mlp.vector = copy.deepcopy(vector)

    def in_place(self):
        which, by = self.draw.randrange(5), self.number()
        for mlp in self.mlps():
            if which == 0:
                mlp.fractions[1] = by
            elif which == 1:
                mlp.pair[1][0] = by
            elif which == 2:
                mlp.names["a"]["b"] = by
            elif which == 3:
                mlp.slotted.scale = by
            elif mlp.vector is not None:
                mlp.vector.mul_(by)

    def of_all(self):
        """Of a class or a file."""
        by = self.number()
        which = self.draw.randrange(5)
        if which == 0:
            self.patch.setattr(Steered, "factor", by)
        elif which == 1:
            self.patch.setattr(steered, "FACTOR", by)
        elif which == 2:
            self.patch.setitem(steered.TABLE, "by", [by])
        elif which == 3:
            self.patch.setattr(steered, "bent", lambda x: x * by)
        else:
            self.patch.setattr(Steered, "scale", lambda self: by)

    def function(self):
        made = times(self.number())
        for mlp in self.mlps():
            mlp.function = made

    def forward(self):
        by, taken = self.number(), "forward" in vars(self.mlps()[0])
        for mlp in self.mlps():
            if taken:
                del mlp.forward
            else:
                mlp.forward = _scaled(mlp, by)

    def weight(self):
        which, seed = self.draw.randrange(4), self.draw.randrange(100)
        for model in self.models:
            model.lm_head.weight = own = nn.Parameter(model.lm_head.weight.detach().clone())  # not that of the embedding
            new = own.detach() + 0.1 * torch.randn(own.shape, generator=torch.Generator().manual_seed(seed))
            if which == 0:
                model.lm_head.weight = nn.Parameter(new)
            elif which == 1:
                own.data = new
            elif which == 2:
                own.data.copy_(new)
            else:
                model.lm_head = nn.Linear(own.shape[1], own.shape[0], bias=False)
                model.lm_head.load_state_dict({"weight": new})

    def buffer(self):
        by, anew = self.number(), self.draw.random() < 0.5
        for model in self.models:
            rotation = model.model.rotary_emb
            if anew:
                rotation.inv_freq = rotation.inv_freq * by
            else:
                rotation.inv_freq.mul_(by)

    def adapter(self):
        """Switch to another, as PEFT does it."""
        name = self.draw.choice([*ADAPTERS, None])
        for model in self.models:
            model.model.layers[0].mlp.up_proj.active = [name] if name else []

    def config(self):
        name, by = self.draw.choice(["logits_scaling", "residual_multiplier"]), self.number()
        for model in self.models:
            if name == "logits_scaling":
                model.config.logits_scaling = by
            else:
                model.model.layers[0].residual_multiplier = by

    def hook(self):
        """For one call: of one module, or of all."""
        return self._with_hooks(self.number(), self.draw.random() < 0.3)

    @contextlib.contextmanager
    def _with_hooks(self, by, every):
        hooks = self._hooked(by, every)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooked(self, by, every):
        def scaled(module, given, out):
            return by * out if isinstance(module, Steered) else None

        if every:
            return [of_modules.register_module_forward_hook(scaled)]
        return [mlp.register_forward_hook(scaled) for mlp in self.mlps()]

    def kept_hook(self):
        """Until another change takes it away again."""
        if not self.hooks:
            self.hooks = self._hooked(self.number(), self.draw.random() < 0.5)
        else:
            self.close()

    def close(self):
        """What monkeypatch does not take back."""
        while self.hooks:
            self.hooks.pop().remove()

    def flag(self):
        """A state that was not there before, for `check_flag`."""
        self.states += 1
        for mlp in self.mlps():
            mlp.state = self.states

    def unread(self):
        """What no code reads."""
        name, value = self.draw.choice(["a", "b"]), self.draw.choice([0, 0.5, "word", None, [1, 2]])
        for mlp in self.mlps():
            setattr(mlp, name, copy.copy(value))

    def wrong(self):
        """For one call: stock raises, in the prompt or after it."""
        return self._with(*self.draw.choice(WRONG))

    @contextlib.contextmanager
    def _with(self, name, value):
        kept = [getattr(mlp, name) for mlp in self.mlps()]
        for mlp in self.mlps():
            setattr(mlp, name, copy.deepcopy(value))
        try:
            yield
        finally:
            for mlp, before in zip(self.mlps(), kept, strict=True):
                setattr(mlp, name, before)

    def around(self):
        """For one call: a function mode."""
        return Doubled()


class Interrupted(Exception):
    """Of a caller's own code."""


def no_step(x):
    if x.shape[-2] == 1:
        raise Interrupted
    return x


WRONG: tuple[tuple[str, Any], ...] = (
    ("fractions", []),
    ("fractions", None),
    ("vector", torch.zeros(3)),
    ("settings", None),
    ("names", {}),
    ("function", no_step),
    ("function", None),
)
"""Attributes with which the model's forward raises."""

ADAPTERS = ("first", "second", "third")


class Adapted(nn.Module):
    """A linear that adds the output of each active adapter."""

    def __init__(self, own):
        super().__init__()
        self.own, self.active = own, []
        sizes = own.in_features, own.out_features
        self.deltas = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name in ADAPTERS})

    def forward(self, x):
        out = self.own(x)
        for name in self.active:
            out = out + self.deltas[name](x)
        return out


def flip():
    """A flag that changes nothing on a CPU."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = not before


def check_flag(handle, model):
    """Another value of the flag is captured for, and the value from before meets its graphs."""
    before, mode, made = handle.graphs, handle.took.decode, captures(handle)
    if mode == "hf":
        return
    flip()
    outcome(model)
    assert captures(handle) > made
    flip()
    outcome(model)
    # Steps of each state are compiled after as many.
    assert handle.graphs is before or handle.took.decode != mode


def _scaled(mlp, by):
    return lambda x: by * type(mlp).forward(mlp, x)


@pytest.fixture(autouse=True)
def _flags():
    """monkeypatch cannot take a flag of torch's backends back: they are no attributes."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


CASES = [
    pytest.param(mode, seed, marks=[pytest.mark.full] * (seed > 0 or mode == "piecewise")) for mode in MODES for seed in range(SEEDS[mode])
]


def outcome(model):
    try:
        return logits(model, *CALL)
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize(("mode", "seed"), CASES)
def test_random_changes(mode, seed, monkeypatch):
    monkeypatch.setattr(prompt, "CAPTURED", (32,))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    model, twin = models = twins()
    drawn, done = Drawn(seed, models, monkeypatch), []
    with contextlib.closing(drawn), patched(model, mode) as handle:
        assert relative(outcome(model), outcome(twin)) < LIMIT
        for _ in range(CHANGES[mode]):
            what, around = drawn.change()
            done.append(what)
            with around:
                want, got = outcome(twin), outcome(model)
            if isinstance(want, torch.Tensor):
                assert isinstance(got, torch.Tensor) and relative(got, want) < LIMIT, done
            else:
                assert got is want, done
            if what == "flag":
                check_flag(handle, model)


def twins():
    model = steered.model(tie_word_embeddings=False)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Adapted(mlp.up_proj)
    return model, copy.deepcopy(model)
