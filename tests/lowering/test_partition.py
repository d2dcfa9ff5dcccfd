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

from attnops.kernel import Capture, kernels_of, register
from tests.lowering.models import PagedModel, compiled_code, decode, kernel_calls


@pytest.fixture(scope="module")
def uncapturable():
    name = "uncapturable"
    if name not in kernels_of("paged_attention"):
        register(replace(kernels_of("paged_attention")["reference"], name=name, capture=Capture.NEVER, cost_us=lambda p: 1e9))
    return name


def partitions(kernel, monkeypatch):
    import torch._inductor.scheduler as scheduler

    import attnops

    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    wrap = inductor_utils.CUDAGraphWrapperMetadata
    assert wrap is not None
    inductor_utils.set_customized_partition_wrappers(lambda fn, metadata: fn)
    try:
        model, given = PagedModel(3).eval(), decode()
        with torch.no_grad(), attnops.use(kernel=kernel), inductor.patch(graph_partition=True, force_disable_caches=True):
            want = model(*given)
            model.clear()
            got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    finally:
        inductor_utils.set_customized_partition_wrappers(None)
    torch.testing.assert_close(got, want)
    assert kernel_calls(code) == [f"paged_attention.{kernel}"] * 3
    return len(set(re.findall(r"def (partition_\d+)", code)))


def test_an_uncapturable_kernel_splits_the_graph(uncapturable, monkeypatch):
    assert partitions(uncapturable, monkeypatch) == 4


def test_a_capturable_kernel_does_not(monkeypatch):
    assert partitions("sdpa", monkeypatch) == 1


def test_the_tag_is_the_kernels(uncapturable):
    packet = torch.ops.attnops.paged_attention
    assert torch.Tag.cudagraph_unsafe in getattr(packet, uncapturable).tags
    assert torch.Tag.cudagraph_unsafe not in packet.sdpa.tags and torch.Tag.cudagraph_unsafe not in packet.default.tags
