"""`cudnn` through a stand-in of the ops it wraps: dense calls, their gradients, refusals."""

import pytest
import torch

import attnops
from attnops.kernel import kernels_of
from attnops.problem import Extent, Target, altered, pretend
from attnops.select import select
from attnops.testing import CASES, Features, Source, builders, check_kernel
from tests.checks import right_or_skipped
from tests.standins.cudnn import installed
from tests.standins.test_aten_flash import narrow

OPS = ("attention", "attention_backward")
BF16, F16 = torch.bfloat16, torch.float16
SM90 = Target("cuda", 90, assume=())
PLAIN = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2)


@pytest.fixture
def standin():
    with installed() as calls, pretend(SM90):
        yield calls


def cudnn(op):
    return kernels_of(op)["cudnn"]


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for op in OPS for c in CASES[op]])
def test_grid(standin, case):
    right_or_skipped(cudnn(case.op), narrow(case.call()))


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_head_dims_and_groups(standin, causal, heads, dims):
    f = Features(dtype=F16, head_dim=dims[0], v_head_dim=dims[1], q_heads=heads[0], kv_heads=heads[1], causal=causal, lse=True)
    call = builders.dense(Source(3), 2, 9, 9 if causal else 20, f)
    for one in (call, builders.backward(Source(4), call)):
        figures = check_kernel(cudnn(one.op), one)
        assert not figures.refused and figures.worst <= 1.0, figures
    assert standin == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]


def test_rows_that_do_not_start_at_16_bytes_are_copied(standin):
    call = builders.dense(Source(1), 2, 5, 5, PLAIN)
    odd = call.map(lambda n, t: torch.cat([t, t[..., :1]], -1)[..., :-1] if n in ("query", "value") else t)
    for one in (odd, builders.backward(Source(4), odd)):
        figures = check_kernel(cudnn(one.op), one)
        assert not figures.refused and figures.worst <= 1.0


def test_a_training_step_is_two_calls_of_aten(standin):
    q, k, v = (torch.randn(2, 6, n, 64, dtype=BF16, requires_grad=True) for n in (8, 2, 2))
    with attnops.use(kernel=dict.fromkeys(OPS, "cudnn")):
        attnops.attention(q, k, v, causal=True).sum().backward()  # a gradient without strides
    assert standin == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


PROBLEM = altered(builders.backward(Source(0), builders.dense(Source(0), 2, 9, 9, PLAIN)).problem, target=SM90)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target": Target("cuda", 75, assume=())}, "target"), ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtype"),
        ({"head_dim": 264, "v_head_dim": 264}, "head_dim, v_head_dim"), ({"head_dim": 60}, "head_dim"), ({"v_head_dim": 4}, "v_head_dim"),
        ({"target": Target("cuda", 100, assume=()), "head_dim": 192}, "head_dim, v_head_dim"), ({"mask": "bool"}, "mask"),
        ({"causal": True, "sizes_equal": False}, "sizes_equal"), ({"window": (3, -1)}, "windowed"), ({"sinks": True}, "sinks"),
        ({"softcap": True}, "softcap"), ({"kv_range": True}, "kv_range"), ({"lse_grad": True}, "lse_grad"),
        ({"queries": Extent.of(1)}, "queries"), ({"context": Extent.of(1)}, "context"),
    ],
)  # fmt: skip
def test_refusals(change, field):
    assert not cudnn("attention_backward").refusals(PROBLEM)
    assert field in [r.field for r in cudnn("attention_backward").refusals(altered(PROBLEM, **change))]


def test_bits_may_differ_from_run_to_run():
    assert "batch_invariant" in [r.field for r in select(PROBLEM, "deterministic").refused["cudnn"]]


def test_a_torch_without_a_new_cudnn_is_refused_by_name(monkeypatch):
    here = Target("cuda", 90)
    for available, version, fine in ((False, None, False), (True, 90800, False), (True, 91002, True)):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert [r.field for r in cudnn("attention").absences(here)] == ([] if fine else ["cudnn"])
