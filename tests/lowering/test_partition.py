"""A kernel that may not be captured splits the graph around its call, by its own tag and not the op's.

Stock Inductor partitions CUDA graphs only; on CPU every node is its own reason to split. Telling the scheduler that its nodes are
GPU nodes makes the partitions of a CPU graph those of a GPU graph.
"""

import re
from dataclasses import replace

import pytest
import torch
import torch._inductor.utils as inductor_utils
from torch._inductor import config as inductor

import attnops
from attnops.core.kernel import Capture, kernels_of, register
from attnops.ops import request_starts
from tests.lowering.models import PagedModel, compiled_code, decode, kernel_calls


@pytest.fixture(scope="module")
def uncapturable():
    name = "uncapturable"
    if name not in kernels_of("paged_attention"):
        register(replace(kernels_of("paged_attention")["reference"], name=name, capture=Capture.NEVER, cost_us=lambda p: 1e9))
    return name


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


def test_an_uncapturable_kernel_splits_the_graph(uncapturable, monkeypatch):
    assert partitions(uncapturable, monkeypatch) == 3


@pytest.mark.full
def test_a_capturable_kernel_does_not(monkeypatch):
    assert partitions("sdpa", monkeypatch) == 1


def test_the_tag_is_the_kernels(uncapturable):
    packet = torch.ops.attnops.paged_attention
    assert torch.Tag.cudagraph_unsafe in getattr(packet, uncapturable).tags
    assert torch.Tag.cudagraph_unsafe not in packet.sdpa.tags and torch.Tag.cudagraph_unsafe not in packet.default.tags


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
