"""A kernel that may not be captured splits the graph around its call, by its own tag and not the op's.

Stock Inductor partitions CUDA graphs only; on CPU every node is its own reason to split. Telling the scheduler that its nodes are
GPU nodes makes the partitions of a CPU graph those of a GPU graph.
"""

import re

import pytest
import torch
import torch._inductor.utils as inductor_utils
from torch._inductor import config as inductor

import attnops
from attnops.ops import request_starts
from tests.graphs.models import boundary
from tests.lowering.models import PagedModel, compiled_code, decode, kernel_calls


def partitioned(call, monkeypatch):
    """The result, and the code of the first call of something compiled, in the partitions that a GPU would have."""
    import torch._inductor.scheduler as scheduler

    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    wrap = inductor_utils.CUDAGraphWrapperMetadata
    assert wrap is not None
    inductor_utils.set_customized_partition_wrappers(lambda fn, metadata: fn)
    try:
        with torch.no_grad(), inductor.patch(graph_partition=True, force_disable_caches=True):
            return compiled_code(call)
    finally:
        inductor_utils.set_customized_partition_wrappers(None)


def partitions(kernel, monkeypatch):
    model, given = PagedModel(2).eval(), decode()
    with attnops.use(kernel=kernel):
        with torch.no_grad():
            want = model(*given)
        model.clear()
        got, code = partitioned(lambda: torch.compile(model, fullgraph=True)(*given), monkeypatch)
    torch.testing.assert_close(got, want)
    assert kernel_calls(code) == [f"paged_attention.{kernel}"] * 2
    return len(set(re.findall(r"def (partition_\d+)", code)))


@pytest.mark.parametrize(("kernel", "count"), [(boundary(), 3), pytest.param("sdpa", 1, marks=pytest.mark.full)])
def test_an_uncapturable_kernel_splits_the_graph(kernel, count, monkeypatch):
    """By the kernel's tag."""
    assert partitions(kernel, monkeypatch) == count
    packet, unsafe = torch.ops.attnops.paged_attention, torch.Tag.cudagraph_unsafe
    assert (unsafe in getattr(packet, kernel).tags) is (count > 1) and unsafe not in packet.default.tags


def test_requests_are_counted_between_graphs(monkeypatch):
    """Attention over them is within one, of a size that the count decides."""

    def model(x, where):
        starts = request_starts(where == 0)
        x = x.sin()
        return attnops.varlen_attention(x, x, x, starts, starts, max_seqlen_q=6, max_seqlen_k=6, causal=True).cos()

    x, where = torch.randn(6, 2, 8), torch.tensor([[0, 1, 2, 0, 1, 0]])
    got, code = partitioned(lambda: torch.compile(model, fullgraph=True)(x, where), monkeypatch)
    torch.testing.assert_close(got, model(x, where))
    graphs, _, between = code.partition("class Runner")
    assert [c.split(".")[0] for c in kernel_calls(graphs)] == ["varlen_attention"]
    assert [c.split(".")[0] for c in kernel_calls(between)] == ["request_starts"]
