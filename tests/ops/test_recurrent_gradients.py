"""Gradients of layers that carry a state, against autograd of the reference in float64."""

import pytest
import torch
from torch.autograd import grad
from torch.autograd.graph import allow_mutation_on_saved_tensors

from attnops import ops
from attnops.core.errors import InvalidInput
from attnops.ops import OPS
from attnops.testing import Call, Source, make_call
from tests.ops.calls import FUNCTIONS

F32, BF16 = torch.float32, torch.bfloat16
RULE, SCAN, HEADS = "gated_delta_rule", "mamba2_scan", (1, 2, 3, 2)
STEPS = {"dt_bias": True, "dt_softplus": True, "d": True}
CASES = {
    "rule": (RULE, (2, 0, 3), *HEADS, {"normalize": True}),
    "rule_of_chunks": (RULE, (66, 1, 130), *HEADS, {"padding": None}),
    "scan": (SCAN, (2, 0, 3), *HEADS, STEPS | {"dt_min": 0.5, "dt_max": 1.2}),
    "scan_of_chunks": (SCAN, (66, 1, 130), *HEADS, STEPS | {"padding": None}),
    "scan_of_plain_steps": (SCAN, (2, 0, 3), *HEADS),
    "conv": ("causal_conv1d", (2, 0, 3), 2, 3, {"activation": "silu", "bias": True}),
    "conv_longer_state": ("causal_conv1d", (1, 5, 1), 2, 3, {"kept": 4, "padding": None}),
}
WAYS = {"": (1, False), "fresh": (1, True), "two_calls": (2, False)}


def exact(op, **arguments):
    """The reference as a function, which torch differentiates."""
    like = next(arguments[n] for n in ("x", "value") if n in arguments)
    output = torch.empty_like(like)
    OPS[op].reference(Call(op, arguments | {"output": output}).record)
    return output


def public(op, **arguments):
    arguments.pop("scale", None)  # it is the default
    return FUNCTIONS[op](**arguments)


def of(case, dtype, way):
    """(the case's calls as a function of how a call is run and of its tensors of floats, these
    tensors). The function returns a number in which no two results have one weight."""
    (op, *row), (calls, fresh) = CASES[case], WAYS[way]
    call = make_call(op, Source(3), *row, {"fresh": fresh}, dtype)
    arguments = {n: x for n, x in call.arguments.items() if n != "output"}
    floats = {n: x for n, x in arguments.items() if torch.is_tensor(x) and x.is_floating_point()}
    floats = {
        n: torch.where(call.free[n], 0, x) if n in call.free else x for n, x in floats.items()
    }

    def run(how, *tensors):
        own = arguments | dict(zip(floats, tensors, strict=True))
        own["state"] = own["state"].clone()
        results = [how(op, **own) for _ in range(calls)] + [own["state"]]
        return sum((x.flatten() * torch.arange(x.numel()).cos()).sum() for x in results)

    return run, [x.requires_grad_() for x in floats.values()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "most"), [(F32, 2e-5), (BF16, 3e-2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_autograd_of_the_reference(case, dtype, most, way):
    run, tensors = of(case, dtype, way)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    with allow_mutation_on_saved_tensors():
        expected = grad(run(exact, *wide), wide, materialize_grads=True)
    found = grad(run(public, *tensors), tensors)
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() <= most * want.norm()


@pytest.mark.parametrize("way", ["", "fresh"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_and_functional(case, way):
    run, tensors = of(case, F32, way)

    def loss(*tensors):
        return run(public, *tensors)

    want = grad(loss(*tensors), tensors)
    compiled = grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    torch.testing.assert_close(compiled, want)
    functional = torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)
    torch.testing.assert_close(functional, want)


@pytest.mark.parametrize("field", ["output", "state"])
def test_a_leaf_is_not_written(field):
    written = {"output": torch.zeros(3, 2), "state": torch.zeros(1, 2, 2)}
    written[field].requires_grad_()
    x, starts = torch.ones(3, 2), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=f"{field}: got a leaf that requires grad"):
        ops.causal_conv1d(x, torch.ones(2, 3), cu_seqlens_q=starts, max_seqlen_q=3, **written)
    assert not any(t.any() for t in written.values())


def test_no_token_is_taken_back_in_training():
    x, starts = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 3], dtype=torch.int32)
    kept = {"kept_x": torch.zeros(1, 3, 2), "accepted": torch.zeros(1, 2, dtype=torch.int32)}
    with pytest.raises(InvalidInput, match="accepted: got a tensor, want None, where a gradient"):
        ops.causal_conv1d(x, torch.ones(2, 3), torch.zeros(1, 2, 2), starts, max_seqlen_q=3, **kept)
