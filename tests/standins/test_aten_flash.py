"""`aten_flash` as on CUDA, through a stand-in of the ops it wraps: dense and packed calls, their gradients, refusals."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import problem_of
from attnops.core.select import choose, select
from attnops.ops import OPS as OPS_BY_NAME
from attnops.testing import Features, Source, check_kernel, gradient_call, make_call

NAME = "aten_flash"
BF16, F16 = torch.bfloat16, torch.float16


def flash(op):
    return kernels_of(op)["aten_flash"]


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 2), (-1, 1), (0, 0), (40, 40)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
def test_ragged_requests_with_windows_and_gradients(standin, heads, causal, window):
    f = Features(dtype=BF16, head_dim=64, q_heads=heads[0], kv_heads=heads[1], causal=causal, window=window, lse=True)
    call = make_call("varlen_attention", Source(3), (5, 0, 1, 20, 4), (5, 3, 7, 4, 0), f, padding=(3, 4))
    for one in (call, gradient_call(Source(4), call)):
        figures = check_kernel(flash(one.op), one)
        assert not figures.refused and figures.worst <= 1.0, figures
    assert set(standin) == {"_flash_attention_forward", "_flash_attention_backward"}


@pytest.mark.parametrize("window", [(33, -1), (-1, 8)], ids=str)
def test_a_dense_window_with_more_queries_than_keys_is_refused_on_cuda(standin, window):
    query, key = (torch.empty(2, n, 2, 64, dtype=BF16, device="meta") for n in (130, 70))
    problem = problem_of(OPS_BY_NAME["attention"].call(query, key, key, scale=0.1, window_left=window[0], window_right=window[1]))
    assert "window" in {r.field for r in select(problem).refused["aten_flash"]}


def test_one_query_a_request_and_an_idle_one(standin):
    f = Features(dtype=F16, head_dim=64, q_heads=4, kv_heads=2, causal=True, lse=True)
    for padding in ((0, 0), (1, 2)):
        call = make_call("varlen_attention", Source(3), (1, 0, 1), (5, 3, 7), f, padding=padding)
        assert check_kernel(flash("varlen_attention"), call).worst <= 1.0


@pytest.mark.parametrize("tokens", [(2, 4096), (1, 16384), (8, 1024)], ids=str)
def test_a_backward_on_an_h200_is_not_the_references(standin, tokens):
    """The estimate, too, says that FlashAttention is faster than formulas."""
    batch, length = tokens
    q, k = (torch.empty(batch * length, h, 128, dtype=BF16, device="meta") for h in (32, 8))
    lse, cu = q.new_empty(q.shape[:2], dtype=torch.float32), torch.empty(batch + 1, dtype=torch.int32, device="meta")
    args = (q, None, q, k, k, q, lse, cu, cu)
    statics = {"max_seqlen_q": length, "max_seqlen_k": length, "scale": 0.1, "causal": True}
    packed = problem_of(OPS_BY_NAME["varlen_attention_backward"].call(*args, **statics))
    assert choose(packed).name == "aten_flash"
    dense = tuple(x if x is None else x.unflatten(0, (batch, length)) for x in args[:7])
    found = choose(problem_of(OPS_BY_NAME["attention_backward"].call(*dense, scale=0.1, causal=True)))
    assert found.name == "cudnn"
