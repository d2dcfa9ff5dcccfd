"""Gradients of `triton` through the interpreter: every case of the grid, and calls of several
tiles; a request alone and among others."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.core.select import select
from attnops.ops.attention.varlen import VarlenAttentionBackward
from attnops.ops.case_data import BF16, F16, F32
from attnops.testing import Features, Source, gradient_call, make_call
from tests.formula import agrees
from tests.fuzz import TILES, drawn, features
from tests.mates import POLICY, only, rows_of
from tests.triton.checks import check as checked
from tests.triton.process import interpreted

OPS = ("attention_backward", "varlen_attention_backward")


def check(call):
    if (figures := checked(call)).refused:
        pytest.skip(str(figures))


PLAIN = Features(dtype=F16, head_dim=16, q_heads=4, kv_heads=2, causal=True)
LONG = {
    "plain": PLAIN,
    "all_keys": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(90, -1)),
    "window_both": replace(PLAIN, causal=False, window=(70, 40), softcap=5.0),
    "chunk": replace(PLAIN, chunk=100),
    "sinks": replace(PLAIN, sinks=F32, dtype=F32),
    "dims": replace(PLAIN, head_dim=40, v_head_dim=24),  # 40 is read as 32 + 16
    "mask": replace(PLAIN, mask="bool"),
    "bias": replace(PLAIN, mask="additive", window=(90, -1), softcap=5.0),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LONG)
@interpreted
def test_several_tiles(name):
    f = LONG[name]
    packed = make_call(
        "varlen_attention", Source(1), (150, 3, 0, 260), (290, 160, 9, 130), f, padding=(2, 3)
    )
    check(gradient_call(Source(2), packed, lse_grad=f.causal))
    dense = make_call(
        "attention",
        Source(1),
        2,
        140,
        300,
        replace(f, chunk=0),
        kv_start=(5, 200),
        kv_end=(300, 290),
        index=torch.int32,
    )
    check(gradient_call(Source(2), dense, mask_grad=f.mask == "additive"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shape", ["b", "hq", ""])
@interpreted
def test_a_mask_gets_the_sum_over_all_that_it_serves(shape):
    f = replace(PLAIN, dtype=F32, mask="additive", mask_shape=shape, sinks=F32)
    check(
        gradient_call(Source(2), make_call("attention", Source(1), 2, 70, 100, f), mask_grad=True)
    )


@interpreted
def test_without_keys_the_sinks_have_the_gradient_of_the_log_sum_exp():
    f = replace(PLAIN, sinks=F32)
    check(gradient_call(Source(2), make_call("attention", Source(1), 2, 5, 0, f), lse_grad=True))
    check(
        gradient_call(
            Source(2),
            make_call("varlen_attention", Source(1), (5, 2), (0, 0), f, padding=(0, 0)),
            lse_grad=True,
        )
    )


@pytest.mark.parametrize("keys", [0, 9])
@interpreted
def test_no_result_is_returned_twice(keys):
    """Neither mask nor sinks: both results are empty, and each is a tensor of its own."""
    call = gradient_call(
        Source(2), make_call("attention", Source(1), 2, 9, keys, replace(PLAIN, causal=False))
    )
    results = kernels_of(call.op)["triton"].run(call.record)
    assert len({id(x) for x in results}) == len(results)


@pytest.mark.sweep(40)
@pytest.mark.parametrize("seed", range(150))
@interpreted
def test_random_calls(seed):
    """Some of several tiles."""
    draw = random.Random(seed)
    call = drawn(draw, Source(seed), features(draw, (F32, F16, BF16), (1, 16, 24, 40, 48)), TILES)
    agrees(call)
    check(call)


@interpreted
def test_requests_have_the_bits_they_have_alone():
    forward = make_call(
        "varlen_attention",
        Source(1),
        (150, 3, 1, 140),
        (150, 160, 9, 140),
        replace(PLAIN, lse=True),
        padding=(0, 0),
    )
    grads = partial(_grads, torch.randn(294, 4, 16).half())
    among = grads(forward, range(4))
    keys = forward.arguments["cu_seqlens_k"].tolist()
    for group in ((0,), (3,), (2, 1)):
        rows = rows_of(forward, group)
        columns = torch.cat([torch.arange(keys[b], keys[b + 1]) for b in group])
        for whole, alone, at in zip(
            among, grads(forward, group), (rows, columns, columns), strict=True
        ):
            assert torch.equal(whole[at], alone)


def _grads(weight, forward, group):
    call, rows = only(forward, list(group)), rows_of(forward, list(group))
    given = dict(call.arguments)
    given.pop("return_lse", None)
    output, lse = torch.ops.attnops.varlen_attention.default(
        **given, return_lse=True, policy=POLICY
    )
    tensors = [given.pop(n) for n in ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")]
    back = VarlenAttentionBackward(
        weight[rows], None, *tensors[:3], output, lse, *tensors[3:], **given, policy=POLICY
    )
    return kernels_of("varlen_attention_backward")["triton"].run(back)[:3]


@pytest.mark.parametrize("op", OPS)
def test_a_deterministic_policy_has_gradients_on_a_gpu(op):
    installed = Target("cuda", 90, ("sgl_kernel", "triton"), "NVIDIA H200")
    f = replace(PLAIN, head_dim=128, lse=True)
    sizes = ((9, 3), (9, 30)) if op.startswith("varlen") else (2, 9, 9)
    forward = make_call(op.removesuffix("_backward"), Source(1), *sizes, f)
    with pretend(installed):
        problem = gradient_call(Source(2), forward).problem
    assert select(problem, POLICY).kernel is kernels_of(op)["triton"]
    fastest = {
        "attention_backward": "cudnn",
        "varlen_attention_backward": "aten_flash",
    }  # by the H200's times
    assert select(problem).kernel is kernels_of(op)[fastest[op]]
