"""Fusing linears of a model of many layers takes as long as there are layers, and not as long as their square."""

import sys

import torch
from torch import nn

from attnops.nn import pack_linears
from tests.lowering.test_fuse_linears import Fusing, K, Three

fuse = sys.modules["attnops.lowering.fuse_linears"]


def looks(layers, monkeypatch):
    """How many times the value of a node is looked at, with all groups fused."""
    count = 0
    real = fuse._fake

    def counted(node):
        nonlocal count
        count += 1
        return real(node)

    model = nn.Sequential(*(Three(lambda q, k, v: torch.cat([q, k + v], -1)[..., :K]) for _ in range(layers)))
    for layer in model:
        pack_linears(layer)
    backend = Fusing()
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(fuse, "_fake", counted)
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, K))
    assert backend.linears == [layers]
    return count


def test_every_layer_adds_as_much(monkeypatch):
    few, more, many = (looks(layers, monkeypatch) for layers in (2, 6, 10))
    assert many - more == more - few
