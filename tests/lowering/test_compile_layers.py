"""N identical layers compile once."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

import attnops
from attnops.core.errors import InvalidInput
from tests.lowering.models import HQ, D, Dense, PagedModel, decode, prefill


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layers", [2, 8, 24])
def test_identical_layers_give_one_piece(layers):
    pieces = []

    def backend(gm, inputs):
        pieces.append(gm.code)
        return gm.forward

    model, given = PagedModel(layers).eval(), decode()
    with torch.no_grad():
        want = model(*given)
        model.clear()
        names = attnops.compile_layers(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(model(*given), want)
        model.clear()
        model(*prefill())
    assert len(names) == layers and names[-1] == f"layers.{layers - 1}"
    assert len(pieces) <= 5, f"{layers} identical layers gave {len(pieces)} pieces"


def test_unequal_problems_give_unequal_pieces():
    backend = EagerAndRecordGraphs()
    model = nn.ModuleList([Dense(0.0), Dense(0.0), Dense(3.0)])
    attnops.compile_layers(nn.ModuleDict({"layers": model}), backend=backend)
    with torch.no_grad():
        for layer in model:
            layer(torch.randn(2, 8, HQ * D))
    assert len(backend.graphs) == 2


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InvalidInput, match=r"model: got Linear, want a module with an nn.ModuleList"):
        attnops.compile_layers(nn.Linear(2, 2))
