"""Patched modules of torch's and of a user's own on a real GPU, beside their own attention."""

from typing import Any

import pytest
import torch
from torch import nn

import attnops
from tests.adapters.helpers import Calls, Layer, grads

DEVICE = "cuda"
WIDTH = 256
MODELS = {
    "own": lambda: nn.Sequential(*(Layer(width=WIDTH) for _ in range(2))),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True),
        2,
        enable_nested_tensor=False,
    ),
}


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name: str, how: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE, torch.float32 if how == "autocast" else torch.bfloat16)
    x = torch.randn(3, 77, WIDTH, device=DEVICE, dtype=next(model.parameters()).dtype)

    def run(module: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
            return module(x)

    want = run(model)
    want_grads = grads(model, want.float().square().mean())
    with attnops.patch(model):
        with Calls() as calls:
            run(model)
        assert calls.names == ["attnops::attention"] * 2
        got = run(torch.compile(model, fullgraph=True) if how == "compiled" else model)
        got_grads = grads(model, got.float().square().mean())
    largest = max(float(grad.abs().max()) for grad in want_grads.values())
    worst = (
        max(float((got_grads[n] - grad).abs().max()) for n, grad in want_grads.items()) / largest
    )
    assert worst < 1e-1
    assert float((got - want).detach().abs().max() / want.detach().abs().max()) < 2e-2
