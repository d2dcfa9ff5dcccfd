"""`cudnn` through a stand-in of the ops it wraps: dense calls, their gradients, refusals."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.testing import Features, Source, check_kernel, gradient_call, make_call

NAME = "cudnn"
BF16, F16 = torch.bfloat16, torch.float16
SM90 = Target("cuda", 90, assume=())
PLAIN = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2)


def cudnn(op):
    return kernels_of(op)["cudnn"]


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_head_dims_and_groups(standin, causal, heads, dims):
    f = Features(dtype=F16, head_dim=dims[0], v_head_dim=dims[1], q_heads=heads[0], kv_heads=heads[1], causal=causal, lse=True)
    call = make_call("attention", Source(3), 2, 9, 9 if causal else 20, f)
    for one in (call, gradient_call(Source(4), call)):
        figures = check_kernel(cudnn(one.op), one)
        assert not figures.refused and figures.worst <= 1.0, figures
    assert standin == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]


def test_a_torch_without_a_new_cudnn_is_refused_by_name(monkeypatch):
    here = Target("cuda", 90)
    for available, version, fine in ((False, None, False), (True, 90800, False), (True, 91002, True)):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert [r.field for r in cudnn("attention").absences(here)] == ([] if fine else ["cudnn"])
