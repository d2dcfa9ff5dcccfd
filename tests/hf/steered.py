"""A model that runs a caller's code, and changes of it that weights mostly do not show. A test
makes each to a model and to its twin."""

import copy
import dataclasses
from types import SimpleNamespace

import torch
from torch import nn

from attnops.hf import tiny

FACTOR = 1.0
"""A number of the model's file."""

TABLE = {"by": [1.0]}
"""Numbers of the model's file."""

ADAPTERS = ("first", "second", "third")


def bent(x):
    return x * FACTOR * TABLE["by"][0]


def unchanged(x):
    return x


def times(by):
    return lambda x: x * by


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


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


class Steered(nn.Module):
    """An MLP with more around it."""

    factor = 1.0

    def __init__(self, own):
        super().__init__()
        self.own = own
        self.vector = None
        self.count = 1
        self.fractions = [1.0, 1.0]
        self.pair = (1.0, [1.0])
        self.names = {"a": {"b": 1.0}}
        self.settings, self.slotted = Settings(), Slotted()
        self.space = SimpleNamespace(scale=1.0)
        self.function = unchanged

    def scale(self):
        return self.factor * self.count * self.fractions[1] * self.pair[1][0] * self.names["a"]["b"]

    def forward(self, x):
        more = self.settings.scale * self.settings.inner[0] * self.slotted.scale
        out = self.function(bent(self.own(x)) * self.scale() * more)
        return out if self.vector is None else out + self.vector


def model(name="granite", **more):
    found = tiny.model(name, tie_word_embeddings=False, **more)
    first, last = found.model.layers[0].mlp, found.model.layers[1]
    first.up_proj, last.mlp = Adapted(first.up_proj), Steered(last.mlp)
    return found


def twins():
    first = model()
    return first, copy.deepcopy(first)


def mlp_of(model):
    return None if model is None else model.model.layers[1].mlp


def _vector(model, by):
    return torch.randn(
        model.config.hidden_size, generator=torch.Generator().manual_seed(int(100 * by))
    )


def _write(model, by, anew=False):
    """In place, where there is a vector. anew: in other memory."""
    vector = mlp_of(model).vector
    if vector is not None and anew:
        vector.data = vector * by
    elif vector is not None:
        vector.mul_(by)


def _other(model, by):
    """Other numbers for the head."""
    own = model.lm_head.weight.detach()
    return own + 0.1 * torch.randn(
        own.shape, generator=torch.Generator().manual_seed(int(100 * by))
    )


def _another_head(model, by):
    weight = _other(model, by)
    model.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.lm_head.load_state_dict({"weight": weight})


def _turned(model):
    """The same numbers at the same address, in another order."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def _scaled(mlp, by):
    return lambda x: by * type(mlp).forward(mlp, x)


def _without_forward(mlp):
    vars(mlp).pop("forward", None)


HERE = "tests.hf.steered"
IN_PLACE = ("numbers of a parameter", "numbers of a buffer")
"""What the same graphs read."""


def changes(model, patch, by):
    """By name a call that changes something. patch: pytest's monkeypatch, for what is not the
    model's own. by: a number that is not 1."""
    mlp = mlp_of(model)
    return {
        "a vector is set": lambda: setattr(mlp, "vector", _vector(model, by)),
        "a vector is replaced": lambda: setattr(mlp, "vector", _vector(model, by / 2)),
        "a vector is written": lambda: _write(model, by),
        "a vector has other numbers": lambda: _write(model, by, anew=True),
        "a vector is taken away": lambda: setattr(mlp, "vector", None),
        "a whole number": lambda: setattr(mlp, "count", 2),
        "a list": lambda: setattr(mlp, "fractions", [1.0, by]),
        "a fraction in a list": lambda: mlp.fractions.__setitem__(1, by / 2),
        "a tuple": lambda: setattr(mlp, "pair", (by, [by])),
        "a list in a tuple": lambda: mlp.pair[1].__setitem__(0, by / 2),
        "a dictionary in a dictionary": lambda: mlp.names["a"].update(b=by),
        "a field of a dataclass": lambda: setattr(mlp.settings, "scale", by),
        "a list in a dataclass": lambda: mlp.settings.inner.__setitem__(0, by),
        "a dataclass": lambda: setattr(mlp, "settings", Settings(by / 2)),
        "a slot": lambda: setattr(mlp.slotted, "scale", by),
        "a function": lambda: setattr(mlp, "function", times(by)),
        "a function of the same code": lambda: setattr(mlp, "function", times(by / 2)),
        "an attribute of a module of the model's": lambda: setattr(
            model.model.layers[0], "residual_multiplier", by
        ),
        "a field of the config": lambda: setattr(model.config, "logits_scaling", by),
        "an adapter": lambda: setattr(
            model.model.layers[0].mlp.up_proj, "active", [ADAPTERS[int(2 * by) % 3]]
        ),
        "a parameter": lambda: setattr(model.lm_head, "weight", nn.Parameter(_other(model, by))),
        "the memory of a parameter": lambda: setattr(
            model.lm_head.weight, "data", _other(model, by / 2)
        ),
        "numbers of a parameter": lambda: model.lm_head.weight.data.copy_(_other(model, by)),
        "another head": lambda: _another_head(model, by),
        "a buffer": lambda: setattr(
            model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * by
        ),
        "numbers of a buffer": lambda: model.model.rotary_emb.inv_freq.mul_(by),
        "an attribute of a class": lambda: patch.setattr(Steered, "factor", by),
        "a number of a file": lambda: patch.setattr(f"{HERE}.FACTOR", by),
        "a number in a table of a file": lambda: patch.setitem(TABLE, "by", [by]),
        "a function of a file": lambda: patch.setattr(f"{HERE}.bent", times(by)),
        "a method of a class": lambda: patch.setattr(Steered, "scale", lambda self: by),
        "a forward of an instance": lambda: setattr(mlp, "forward", _scaled(mlp, by)),
        "no forward of an instance": lambda: _without_forward(mlp),
    }


def last_changes(model, patch, by):
    """Nothing comes through after them."""
    return {
        "a weight is turned": lambda: _turned(model),
        "a forward of a class": lambda: patch.setattr(
            Steered, "forward", lambda self, x: by * self.own(x)
        ),
        "a forward of a class of the model's": lambda: patch.setattr(
            type(model.model.norm), "forward", lambda self, x: self.weight * x
        ),
        "a function of the model's file": lambda: patch.setattr(
            f"{type(model).__module__}.rotate_half", lambda x: x.flip(-1)
        ),
        "a function of torch": lambda: patch.setattr(torch.nn.functional, "silu", torch.tanh),
    }


def unfelt_changes(model, patch, by):
    """They change no number, or are for the caller."""
    mlp = mlp_of(model)
    return {
        "a hook": lambda: mlp.register_forward_hook(lambda *_: None),
        "a hook before": lambda: mlp.register_forward_pre_hook(lambda *_: None),
        "the training mode": lambda: mlp.train(),
        "a class": lambda: setattr(
            model.model.norm, "__class__", type("Norm", (type(model.model.norm),), {})
        ),
        "its own forward on an instance": lambda: setattr(mlp, "forward", mlp.forward),
        "a bias": lambda: model.lm_head.register_parameter(
            "bias", nn.Parameter(torch.zeros(model.lm_head.out_features))
        ),
        "a further parameter": lambda: model.lm_head.register_parameter(
            "further", nn.Parameter(torch.zeros(1))
        ),
        "a longer list": lambda: mlp.fractions.append(1.0),
        "a field of a namespace": lambda: setattr(mlp.space, "scale", by),
    }


CHANGES, LAST, UNFELT = (tuple(of(None, None, 1)) for of in (changes, last_changes, unfelt_changes))


def make(what, model, patch, by):
    every = (
        changes(model, patch, by)
        | last_changes(model, patch, by)
        | unfelt_changes(model, patch, by)
    )
    every[what]()
