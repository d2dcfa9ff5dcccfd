"""Which copies into an output are taken out of a graph that is lowered in place: those that nothing
else can tell from none."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnops.lowering import remove_output_copies_pass as outputs


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


@pytest.mark.parametrize(
    "run",
    [whole, an_input, another_dtype, read_elsewhere, part_of_a_tensor, an_output_that_is_read],
)
@pytest.mark.parametrize("memory", ["empty", "written", "of other strides"])
def test_a_copy_is_taken_unless_it_counts(run, memory, monkeypatch):
    monkeypatch.setattr(outputs, "_is_empty", lambda box: memory != "written")
    output = torch.empty(4, 3).t() if memory == "of other strides" else torch.empty(3, 4)
    graph = make_fx(run, tracing_mode="fake")(torch.randn(3, 4), output).graph
    found = outputs.remove_output_copies_pass(graph, ["x", "out"])
    taken = run is whole and memory == "empty"
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) == (
        not taken
    )
    assert [(output, result.target) for output, result in found] == [
        ("out", torch.ops.aten.mul.Tensor)
    ] * taken
