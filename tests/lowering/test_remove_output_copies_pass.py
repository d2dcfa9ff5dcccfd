"""Which copies into an output are taken out of a graph that is lowered in place: those that nothing else can tell from none."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnops.lowering import remove_output_copies_pass as outputs

X = torch.randn(3, 4)


def whole(x, out):
    out.copy_(x * 2)


def an_input(x, out):
    out.copy_(x)


def another_dtype(x, out):
    out.copy_((x * 2).double())


def read_elsewhere(x, out):
    y = x * 2
    out.copy_(y)
    return y + 1


def part_of_a_tensor(x, out):
    out.copy_(torch.cat([x, x])[:3])


def an_output_that_is_read(x, out):
    y = out + 1
    out.copy_(x * 2)
    return y


def taken(run, monkeypatch, empty=True, out=None):
    """The graph of `run`, and what the pass takes of it."""
    monkeypatch.setattr(outputs, "_is_empty", lambda box: empty)
    graph = make_fx(run, tracing_mode="fake")(X, torch.empty(3, 4) if out is None else out).graph
    found = outputs.remove_output_copies_pass(graph, ["x", "out"])
    return found, [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]


def test_a_copy_is_taken(monkeypatch):
    [(output, result)], copies = taken(whole, monkeypatch)
    assert output == "out" and result.target is torch.ops.aten.mul.Tensor and not copies


KEPT = (an_input, another_dtype, read_elsewhere, part_of_a_tensor, an_output_that_is_read)


@pytest.mark.parametrize("run", KEPT)
def test_a_copy_that_counts_stays(run, monkeypatch):
    found, copies = taken(run, monkeypatch)
    assert not found and len(copies) == 1


def test_a_copy_into_other_strides_stays(monkeypatch):
    found, copies = taken(whole, monkeypatch, out=torch.empty(4, 3).t())
    assert not found and len(copies) == 1


def test_a_copy_into_memory_that_was_written_stays(monkeypatch):
    found, copies = taken(whole, monkeypatch, empty=False)
    assert not found and len(copies) == 1
