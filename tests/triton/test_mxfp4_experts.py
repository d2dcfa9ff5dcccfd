"""`triton` of experts with weights of MXFP4: the grid through the interpreter, bits that do not follow the batch, and what is compiled."""

import pytest
import torch

from attnops.kernel import kernels_of
from attnops.problem import Target, pretend
from attnops.select import Policy, select
from attnops.testing import CASES, Source, check_kernel
from attnops.testing.experts import SHAPED, mxfp4_experts
from tests.mates import same_bits
from tests.triton.process import interpreted

SM90 = Target("cuda", 90, assume=("triton",))
BF16 = torch.bfloat16


def kernel():
    return kernels_of("mxfp4_experts")["triton"]


@pytest.mark.parametrize("label", [case.label for case in CASES["mxfp4_experts"]])
@interpreted
def test_grid(label):
    [case] = [c for c in CASES["mxfp4_experts"] if c.label == label]
    with pretend(SM90):
        figures = check_kernel(kernel(), case.call())
    assert {r.field for r in figures.refused} <= {"dtype", "kv_dtype"}, figures
    assert figures.worst <= 1.0, figures
    if figures.refused:
        pytest.skip(str(figures))


@interpreted
def test_a_token_does_not_see_its_mates():
    call = mxfp4_experts(Source(1), 18, (64, 64, 16, 3, 2), BF16, **SHAPED)
    with pretend(SM90):
        assert select(call.problem, Policy(deterministic=True)).kernel is kernel()
    same_bits(call, [(0,), (17,), range(9)], kernel())


@interpreted
def test_numbers_far_out_of_range_read_nothing():
    call = mxfp4_experts(Source(1), 3, (64, 64, 16, 3, 2))
    index = call.arguments["top_k_index"]
    index[0, 0], index[1, 1], index[2] = 2**62, -(2**62), 6
    kernel().run(call.record)
    got = call.arguments["output"].clone()
    kernels_of("mxfp4_experts")["reference"].run(call.record)
    torch.testing.assert_close(got, call.arguments["output"])
    assert not got[2].any()
