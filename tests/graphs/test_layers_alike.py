"""Layers of real models are the same piece to the compiler, one graph to the device, and what they share is worked out once."""

import pytest
import torch
from torch import nn

import attnops
from attnops.graphs import Buckets, piecewise
from attnops.graphs.pieces import eager, structure
from attnops.nn import RotaryEmbedding, SelfAttention
from tests.graphs.helpers import graphed
from tests.graphs.standin import StandIn

pytest.importorskip("transformers", reason="its layers are those of transformers")
from attnops.hf import tiny


def pattern(step):
    """Pieces in order, each by the number of the first that does the same."""
    seen = {}
    [found] = step.programs.values()
    return [seen.setdefault(structure(part), len(seen)) for part in found.split.parts if part.compiled]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("name", "layers", "want"),
    [
        ("llama", 4, [0, 1, 1, 1, 2]),
        ("qwen3", 4, [0, 1, 1, 1, 2]),
        ("gpt_oss", 4, [0, 1, 1, 1, 2]),  # windows are arguments of the calls between
        ("deepseek_v3", 5, [0, 1, 2, 2, 2, 3]),  # a dense layer, then experts
    ],
)
def test_layers_of_hugging_face(name, layers, want):
    model = tiny.model(name, num_hidden_layers=layers)
    attnops.patch(model)
    compiled = []

    def counted(*given):
        compiled.append(1)
        return eager(*given)

    def forward(input_ids, position_ids):
        return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    requests = ("input_ids", "position_ids")
    step = graphed(
        piecewise, forward, Buckets(decode=(2, 4)), tokens=(), requests=requests, inner=lambda *given: compiled.append(1) or eager(*given)
    )
    ids, positions = torch.randint(5, 30, (3, 6)), torch.arange(6).repeat(3, 1)
    with torch.no_grad():
        torch.testing.assert_close(step(ids, positions), forward(ids, positions), rtol=2e-5, atol=2e-5)
    assert pattern(step) == want and len(compiled) == max(want) + 1 == step.report().compiled["decode"] <= 5
    assert step.report().modes == {"decode": "whole"}


class Packed(nn.Module):
    """Layers over packed requests, each of which works out where its tokens are. touch: what is done to the lengths between layers."""

    def __init__(self, layers, touch=lambda cu: None):
        super().__init__()
        rope = RotaryEmbedding(8)
        self.layers = nn.ModuleList(SelfAttention(32, 4, 2, 8, rope=rope) for _ in range(layers))
        self.touch = touch

    def forward(self, hidden, cu):
        for layer in self.layers:
            hidden = hidden + layer(hidden, cu_seqlens=cu, max_seqlen=16)
            self.touch(cu)
        return hidden


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("touch", "times"), [(lambda cu: None, 1), (lambda cu: cu.add_(0), 3), (lambda cu: cu[1:].mul_(1), 3)])
def test_metadata_that_every_layer_asks_for_are_made_once(touch, times):
    torch.manual_seed(0)
    model, device = Packed(3, touch).eval(), StandIn()
    step = graphed(piecewise, model, Buckets(tokens=(8, 16)), tokens=("hidden",), graphs=device)
    hidden, cu = torch.randn(8, 32), torch.tensor([0, 3, 8], dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(step(hidden, cu), model(hidden, cu), rtol=2e-5, atol=2e-5)
    [graph] = device.graphs
    assert sum(name == "attnops::token_rows" for name, _ in graph.log) == times
    assert sum(name == "attnops::varlen_attention" for name, _ in graph.log) == 3
