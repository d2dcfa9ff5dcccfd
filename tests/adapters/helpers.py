"""What the tests of several adapters need: the attnops ops that code calls, and what a compiled graph holds."""

import re
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


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
        self.graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    def count(self, name):
        return [sum(name in target for target in graph) for graph in self.graphs]


def block(library):
    """The code of the page's block for a library."""
    [code] = [body for body in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if library in body]
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
