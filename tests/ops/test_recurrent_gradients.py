"""Gradients of layers that carry a state, from call to call and through the compiler."""

import pytest
import torch
from torch.autograd import grad, gradcheck

from attnops import ops
from attnops.core.errors import InvalidInput
from attnops.testing import Source, make_call
from tests.ops.calls import FUNCTIONS

F64 = torch.float64
CASES = {
    "conv": ("causal_conv1d", (2, 0, 3), 2, 3, {"activation": "silu", "bias": True}),
    "conv_longer_state": ("causal_conv1d", (1, 5, 1), 2, 3, {"kept": 4, "padding": None}),
}


def given(case, fresh=False):
    """(the public function of the tensors that may have a gradient, these tensors). The function
    returns the output, and the state after the tokens."""
    op, *row = CASES[case]
    arguments = dict(make_call(op, Source(3), *row, {"fresh": fresh}, F64).arguments)
    del arguments["output"]
    floats = {n: x for n, x in arguments.items() if torch.is_tensor(x) and x.is_floating_point()}

    def run(*tensors):
        own = dict(zip(floats, tensors, strict=True))
        own["state"] = own["state"].clone()
        return FUNCTIONS[op](**arguments | own), own["state"]

    return run, [x.requires_grad_() for x in floats.values()]


@pytest.mark.parametrize("fresh", [False, True], ids=["", "fresh"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_differences(case, fresh):
    assert gradcheck(*given(case, fresh))


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_goes_through_the_state_of_two_calls(case):
    run, tensors = given(case)
    *inputs, state = tensors

    def twice(*inputs):
        first, after = run(*inputs, state)
        second, last = run(*inputs, after)
        return first, second, last

    assert gradcheck(twice, inputs)


@pytest.mark.parametrize("fresh", [False, True], ids=["", "fresh"])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case, fresh):
    run, tensors = given(case, fresh)

    def loss(*tensors):
        return sum(x.square().sum() for x in run(*tensors))

    want = grad(loss(*tensors), tensors)
    got = grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    torch.testing.assert_close(got, want)
    functional = torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)
    torch.testing.assert_close(functional, want)


def test_a_leaf_is_not_written():
    state = torch.zeros(1, 2, 2, requires_grad=True)
    x, starts = torch.ones(3, 2), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(InvalidInput, match="state: got a leaf that requires grad"):
        ops.causal_conv1d(x, torch.ones(2, 3), state, starts, max_seqlen_q=3)
    assert not state.any()
