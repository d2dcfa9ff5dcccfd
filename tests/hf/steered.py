"""A model with code of a caller's in it, and changes of it that no weight shows. Each is made to a model and to its twin."""

import copy
import dataclasses

import torch
from torch import nn

from attnops.hf import tiny

FACTOR = 1.0
"""A number of the model's file."""

TABLE = {"by": [1.0]}
"""Numbers of the model's file."""


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
        self.function = unchanged

    def scale(self):
        return self.factor * self.count * self.fractions[1] * self.pair[1][0] * self.names["a"]["b"]

    def forward(self, x):
        more = self.settings.scale * self.settings.inner[0] * self.slotted.scale
        out = self.function(bent(self.own(x)) * self.scale() * more)
        return out if self.vector is None else out + self.vector


def model(name="granite", **more):
    found = tiny.model(name, **more)
    layer = found.model.layers[1]
    layer.mlp = Steered(layer.mlp)
    return found


def _mlp(model):
    return model.model.layers[1].mlp


def _vector(model, seed):
    return torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def _forward(self, x):
    return 0.5 * self.own(x)


def _tilted(x):
    return x * 1.5


def _normed(self, hidden_states):
    return self.weight * hidden_states


def _wrapped(mlp):
    own = type(mlp).forward
    mlp.forward = lambda x: 1.25 * own(mlp, x)


HERE = "tests.hf.steered"
# By name, in the order in which they are made: some need the one before.
CHANGES = {
    "a vector is set": lambda m, p: setattr(_mlp(m), "vector", _vector(m, 1)),
    "a vector is replaced": lambda m, p: setattr(_mlp(m), "vector", _vector(m, 2)),
    "a vector is written": lambda m, p: _mlp(m).vector.mul_(-1),
    "a vector has other numbers": lambda m, p: setattr(_mlp(m).vector, "data", _vector(m, 3)),
    "a vector is taken away": lambda m, p: setattr(_mlp(m), "vector", None),
    "a whole number": lambda m, p: setattr(_mlp(m), "count", 2),
    "a fraction in a list": lambda m, p: _mlp(m).fractions.__setitem__(1, 0.5),
    "a list in a tuple": lambda m, p: _mlp(m).pair[1].__setitem__(0, 1.5),
    "a tuple": lambda m, p: setattr(_mlp(m), "pair", (1.0, [0.75])),
    "a dictionary in a dictionary": lambda m, p: _mlp(m).names["a"].update(b=0.7),
    "a field of a dataclass": lambda m, p: setattr(_mlp(m).settings, "scale", 1.4),
    "a list in a dataclass": lambda m, p: _mlp(m).settings.inner.__setitem__(0, 0.8),
    "a dataclass": lambda m, p: setattr(_mlp(m), "settings", Settings(0.6, [1.0])),
    "a slot": lambda m, p: setattr(_mlp(m).slotted, "scale", 1.7),
    "a function": lambda m, p: setattr(_mlp(m), "function", times(0.8)),
    "a function of the same code": lambda m, p: setattr(_mlp(m), "function", times(1.3)),
    "an attribute of a module of the model's": lambda m, p: setattr(m.model.layers[0], "residual_multiplier", 1.3),
    "a field of the config": lambda m, p: setattr(m.config, "logits_scaling", 1.6),
    "an attribute of a class": lambda m, p: p.setattr(Steered, "factor", 0.9),
    "a number of a file": lambda m, p: p.setattr(f"{HERE}.FACTOR", 1.1),
    "a number in a table of a file": lambda m, p: p.setitem(TABLE, "by", [0.9]),
    "a function of a file": lambda m, p: p.setattr(f"{HERE}.bent", _tilted),
    "a method of a class": lambda m, p: p.setattr(Steered, "scale", lambda self: 1.2),
    "a forward of an instance": lambda m, p: _wrapped(_mlp(m)),
    "no forward of an instance": lambda m, p: vars(_mlp(m)).pop("forward"),
    "a forward of a class": lambda m, p: p.setattr(Steered, "forward", _forward),
    "a forward of a class of the model's": lambda m, p: p.setattr(type(m.model.norm), "forward", _normed),
    "a function of the model's file": lambda m, p: p.setattr(
        f"{type(m).__module__}.rotate_half", lambda x: torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    ),
    "a function of torch": lambda m, p: p.setattr(torch.nn.functional, "silu", torch.tanh),
}


def twins(name="granite", **more):
    first = model(name, **more)
    return first, copy.deepcopy(first)
