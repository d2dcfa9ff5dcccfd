"""A kernel that may not be captured splits the graph around its call, by its own tag and not the
op's.

Stock Inductor partitions CUDA graphs only; on CPU every node is its own reason to split. Telling
the scheduler that its nodes are GPU nodes makes the partitions of a CPU graph those of a GPU graph.
"""

import re

import pytest
import torch
import torch._inductor.scheduler as scheduler
import torch._inductor.utils as inductor_utils
from torch._inductor import config as inductor

import attnops
from attnops.ops import request_starts
from tests.graphs.models import boundary
from tests.lowering.models import PagedModel, code_of, decode, kernel_calls


@pytest.fixture(autouse=True)
def _partitioned(monkeypatch):
    """Graphs have the partitions that they would have on a GPU."""
    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    inductor_utils.set_customized_partition_wrappers(lambda fn, metadata: fn)
    try:
        with inductor.patch(graph_partition=True, force_disable_caches=True):
            yield
    finally:
        inductor_utils.set_customized_partition_wrappers(None)


@pytest.mark.parametrize(
    ("kernel", "count"), [(boundary(), 3), pytest.param("sdpa", 1, marks=pytest.mark.full)]
)
def test_an_uncapturable_kernel_splits_the_graph(kernel, count):
    """By the kernel's tag."""
    with attnops.use(kernel=kernel):
        code = code_of(PagedModel(2).eval(), *decode())
    assert kernel_calls(code) == [f"paged_attention.{kernel}"] * 2
    assert len(set(re.findall(r"def (partition_\d+)", code))) == count
    packet, unsafe = torch.ops.attnops.paged_attention, torch.Tag.cudagraph_unsafe
    assert (unsafe in getattr(packet, kernel).tags) is (
        count > 1
    ) and unsafe not in packet.default.tags


def test_requests_are_counted_between_graphs():
    """Attention over them is within one, of a size that the count decides."""

    def model(x, where):
        starts = request_starts(where == 0)
        x = x.sin()
        return attnops.varlen_attention(
            x, x, x, starts, starts, max_seqlen_q=6, max_seqlen_k=6, causal=True
        ).cos()

    x, where = torch.randn(6, 2, 8), torch.tensor([[0, 1, 2, 0, 1, 0]])
    graphs, _, between = code_of(model, x, where).partition("class Runner")
    assert [c.split(".")[0] for c in kernel_calls(graphs)] == ["varlen_attention"]
    assert [c.split(".")[0] for c in kernel_calls(between)] == ["request_starts"]
