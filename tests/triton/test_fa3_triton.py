"""`fa3_triton`: Triton's part through the interpreter, FlashAttention-3's through a stand-in of its
op."""

from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest

from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import select
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Source, check_kernel, make_call
from tests.mates import POLICY, same_bits
from tests.standins.sgl_kernel_fa3 import installed
from tests.triton.process import interpreted

KERNEL = kernels_of("mla_attention")["fa3_triton"]
PACKAGES = ("sgl_kernel", "triton")


@contextmanager
def standin():
    if find_spec("sgl_kernel"):
        pytest.skip("sgl_kernel is installed, and a stand-in under its name would hide it")
    with installed() as calls, pretend(Target("cuda", 90, assume=PACKAGES)):
        yield calls


def call(q_lens, seq_lens, heads=16, page=16, padding=2):
    return make_call(
        "mla_attention",
        Source(0),
        q_lens,
        seq_lens,
        page,
        replace(DEEPSEEK, q_heads=heads, lse=True),
        padding,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("heads", "q_lens"), [(16, (3, 20, 0, 8, 9)), (16, (1, 2, 1)), (128, (9, 12)), (3, (12,))]
)
@interpreted
def test_the_length_of_a_request_decides_who_serves_it(heads, q_lens):
    with standin() as calls:
        given = call(q_lens, tuple(n + 33 * b for b, n in enumerate(q_lens, 1)), heads)
        assert check_kernel(KERNEL, given).worst <= 1.0
    assert [c["seqused_q"].tolist() for c in calls] == [[n if n > 8 else 0 for n in q_lens]] * (
        max(q_lens) > 8
    )
    assert all(c["num_splits"] == 1 and c["leftpad_k"] is not None for c in calls)


@interpreted
def test_an_upper_bound_above_the_tokens_serves_all():
    with standin():
        assert (
            check_kernel(KERNEL, call((2, 3), (9, 40), padding=0).with_(max_seqlen_q=64)).worst
            <= 1.0
        )


@pytest.mark.full
@interpreted
def test_requests_have_the_bits_they_have_alone():
    with standin():
        same_bits(
            call((3, 20, 1, 9), (70, 90, 130, 9), padding=0), [(0,), (1,), (2, 0), (3, 1)], KERNEL
        )


@pytest.mark.parametrize("heads", [16, 128])
def test_a_deterministic_policy_chooses_it(heads):
    with pretend(Target("cuda", 90, PACKAGES, "NVIDIA H200")):
        decode, many = call((1,) * 8, (70,) * 8, heads).problem, Extent.of(4096)
        for problem in (
            decode,
            altered(decode, tokens=many, batch=Extent.of(1), queries=many, context=many),
        ):
            assert select(problem, POLICY).kernel is KERNEL
            assert select(problem).kernel is not KERNEL
