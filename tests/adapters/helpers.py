"""What the tests of several adapters need: the attnops ops that code calls, and what a compiled
graph holds."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


class Layer(nn.Module):
    """A user's own attention: causal without a mask, with dropout in training."""

    def __init__(self, dropout=0.0, width=32):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout
        self.width = width

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, self.width // 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None
        )
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Calls(TorchDispatchMode):
    """Within the block `names` gets every attnops op that runs, and every attention op of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("attnops::") or "scaled_dot_product" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that keeps the names of each graph's ops."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append(
            [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        )
        return module

    def count(self, name):
        return [sum(name in target for target in graph) for graph in self.graphs]


def block(library):
    """The code of the page's block for a library."""
    [code] = [
        body
        for body in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        if library in body
    ]
    return code


def grads(model, loss):
    """The gradients of a model's parameters by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_grads(got, want):
    """Raise unless the gradients are the same, but for rounding of the largest one."""
    assert got.keys() == want.keys()
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6 * largest)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x)
