"""What layers share is worked out once."""

import pytest
import torch

from attnops.graphs import Buckets, piecewise
from attnops.ops import token_rows
from tests.graphs.helpers import close, graphed
from tests.graphs.standin import StandIn

TOUCHES = [(lambda cu: None, 1), (lambda cu: cu.add_(0), 3), (lambda cu: cu[1:].mul_(1), 3)]
"""What is done to the lengths between layers, and how often metadata of theirs are made then."""


@pytest.mark.parametrize(("touch", "times"), TOUCHES)
def test_metadata_that_every_layer_asks_for_are_made_once(touch, times):
    def layers(x, cu):
        for _ in range(3):
            x = torch.sin(x + token_rows(cu, x.shape[0]))
            touch(cu)
        return x

    device = StandIn()
    step = graphed(piecewise, layers, Buckets(tokens=(8, 16)), tokens=("x",), graphs=device)
    x, cu = torch.randn(8), torch.tensor([0, 3, 8], dtype=torch.int32)
    close(step(x, cu), layers(x, cu))
    [graph] = device.graphs
    assert sum(name == "attnops::token_rows" for name, _ in graph.log) == times
