"""Numbers of float16 past 65,504 between the two products of experts, and before the activation of
a linear layer."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.ops.case_data import F16
from attnops.testing import Source, make_call
from tests.checks import results
from tests.triton.process import interpreted

MOST = 65504.0
OSS = {"interleaved": True, "bias": True, "alpha": 1.702, "offset": 1.0}
SHAPES = {"plain": {}, "oss": OSS, "gelu": {"activation": "gelu"}}


def of_experts(tokens, more):
    """Both products overflow: gates, factors and results of either sign, and results of which two
    add up to 0."""
    call = make_call("experts", Source(1), tokens, (24, 20, 28, 4, 2), F16, **more)
    x = call.arguments["x"].sign() * 200
    gate_up = call.arguments["gate_up"].sign() * 200
    gate_up[0] *= 1e-3  # an expert within the range
    down = call.arguments["down"].sign() * 0.5
    down[1] = -down[2]
    index = torch.tensor([[1, 2], [0, 3], [2, 1]])[:tokens]
    weights = torch.full((tokens, 2), 0.01)
    return call.with_(x=x, gate_up=gate_up, down=down, top_k_index=index, top_k_weights=weights)


def of_linear(rows):
    call = make_call("linear", Source(1), rows, 24, 40, F16, activation="silu", residual=True)
    x, weight = call.arguments["x"].sign() * 200, call.arguments["weight"].sign() * 200
    weight[40:] = 0  # a factor of 0 beside a gate past the range
    weight[60:] = call.arguments["weight"][60:].sign() * 200
    weight[20:40] = 0  # and a gate of 0 beside such a factor
    return call.with_(x=x, weight=weight)


def output_of(name, call):
    return results(kernels_of(call.op)[name].run, call)["output"].float()


def check(name, call):
    found, want = output_of(name, call), output_of("reference", call)
    assert torch.isfinite(want).all()
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts(shape, tokens):
    call = of_experts(tokens, SHAPES[shape])
    check("aten", call)
    assert output_of("reference", call).abs().max() < 20 * MOST * 0.01 * 0.5 * 2 * 1.01, (
        "the sum of saturated results"
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_linear(rows):
    check("aten", of_linear(rows))


@pytest.mark.parametrize("rows", [1, 3])
@interpreted
def test_triton(rows):
    check("triton", of_linear(rows))
    for more in SHAPES.values():
        check("triton", of_experts(rows, more))
