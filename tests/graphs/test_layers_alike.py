"""What layers share is worked out once."""

import pytest
import torch
from torch import nn

from attnops.graphs import Buckets, piecewise
from attnops.nn import RotaryEmbedding, SelfAttention
from tests.graphs.helpers import close, graphed
from tests.graphs.standin import StandIn


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
        close(step(hidden, cu), model(hidden, cu))
    [graph] = device.graphs
    assert sum(name == "attnops::token_rows" for name, _ in graph.log) == times
    assert sum(name == "attnops::varlen_attention" for name, _ in graph.log) == 3
