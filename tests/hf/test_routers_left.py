"""Routers and experts that are left as they are, and what the report says of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import attnops
from attnops.hf import tiny
from attnops.nn.steady import class_of
from tests.hf.test_routers import PARTS


class Tagged(torch.Tensor):
    """As a quantised weight."""


def changed(module, how, name):
    weight = getattr(module, name)
    if how == "quantised":
        setattr(module, name, nn.Parameter(weight.data.as_subclass(Tagged), requires_grad=False))
    elif how == "parametrised":
        nn.utils.parametrize.register_parametrization(module, name, nn.Identity())
    elif how == "float64":
        module.to(torch.float64)
    elif how == "instance":
        module.forward = module.forward
    elif how == "compiled":
        module.compile(backend="eager")
    elif how == "offloaded":
        module._hf_hook = SimpleNamespace(offload=True)
    elif how == "activation":
        module.act_fn = nn.Tanh()
    elif how == "shapes":
        module.down_proj = nn.Parameter(weight[:, :, 1:].clone())
    else:
        module.config._experts_implementation = how


LEFT = {
    "quantised": "no plain parameters",
    "parametrised": "no plain parameters",
    "float64": "float64",
}
OF_ROUTERS = {"instance": "forward is replaced", "compiled": "or compiled"}
ELSE = {
    "offloaded": "offloaded",
    "activation": "no activation of the op",
    "shapes": "have the shapes",
    "sonicmoe": "'sonicmoe'",
}
WHY = [
    (part, *row)
    for part, own in zip(PARTS, (OF_ROUTERS, ELSE), strict=True)
    for row in {**LEFT, **own}.items()
]


@pytest.mark.parametrize(("part", "change", "why"), WHY)
def test_layers_that_are_left_say_why(part, change, why):
    model = tiny.model("mixtral")
    changed(part.of(model.model.layers[0]), change, part.weight.rpartition(".")[2])
    before = [(type(m), vars(m).keys()) for m in model.modules()]
    with attnops.patch(model) as handle:
        [left] = [note for note in part.notes(handle) if "left as they are" in note]
        assert why in left
    assert [(type(m), vars(m).keys()) for m in model.modules()] == before


Mixtral: Any = type(tiny.model("mixtral").model.layers[0].mlp.gate)


class Squared(Mixtral):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.square(), index


class Second(Mixtral):
    """The second best to the third."""

    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights, (index + 1) % 4


class Counting(Mixtral):
    """It writes, which the op would not."""

    def forward(self, hidden_states):
        self.seen.add_(1)
        return super().forward(hidden_states)


@pytest.mark.parametrize("cls", [Squared, Second, Counting])
def test_rules_that_the_op_has_not(cls):
    model = tiny.model("mixtral")
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = cls
    gate.register_buffer("seen", torch.zeros(()))
    with attnops.patch(model) as handle:
        first, second = PARTS[0].notes(handle)
        assert (
            first.startswith("routers of 1 of 2 layers: ")
            and f"the op does not choose as {cls.__name__} does" in second
        )
        assert class_of(gate) is cls


@pytest.mark.parametrize("name", ["phimoe", "llama4", "longcat_flash"])
def test_families_that_are_left_say_why(name):
    with attnops.patch(tiny.model(name)) as handle:
        [note] = PARTS[0].notes(handle)
        assert "are left as they are: " in note
