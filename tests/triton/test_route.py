"""`triton` of routing: the grid through the interpreter, numbers that are none, and what ptxas
makes of it."""

import math

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.ops.case_data import BF16
from attnops.ops.experts.cases import NORMAL, SIGMOID, V2, V3
from attnops.testing import CASES
from tests.triton.checks import check
from tests.triton.compiling import built, launched, waits_first
from tests.triton.process import compiled, interpreted


def case(label):
    return next(c for c in CASES["route"] if c.label == label).call()


@pytest.mark.parametrize(
    "rule",
    [{}, NORMAL, {**NORMAL, "eps": 0.1}, SIGMOID, V2, {n: v for n, v in V3.items() if n != "bias"}],
    ids=str,
)
@interpreted
def test_numbers_that_are_none(rule):
    """Experts and weights are the reference's, NaN for NaN."""
    torch.manual_seed(0)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    logits = odd[torch.randint(6, (40, 24))]
    logits[:3] = odd[:3, None]
    logits[3] = odd[3:5].repeat(12)
    call = case("plain").with_(
        logits=logits, weights=torch.empty(40, 4), index=torch.full((40, 4), -7), **rule
    )
    results = {}
    for name in ("reference", "triton"):
        kernels_of("route")[name].run(call.record)
        results[name] = call.arguments["weights"].clone(), call.arguments["index"].clone()
    assert torch.equal(*(index for _, index in results.values()))
    torch.testing.assert_close(results["triton"][0], results["reference"][0], equal_nan=True)


@interpreted
def test_experts_chosen_by_a_bias_far_below_the_largest():
    """Their exponentials beside that of the largest logit are 0, and cancel."""
    call = case("plain")
    logits, bias = torch.zeros(40, 24), torch.zeros(24)
    logits[:, 0], logits[:, 5:9], bias[5:9] = 200.0, torch.randn(40, 4), 10.0
    given = {
        "logits": logits,
        "bias": bias,
        "weights": torch.empty(40, 4),
        "index": torch.empty(40, 4, dtype=torch.int64),
        **NORMAL,
    }
    check(call.with_(**given))


@pytest.mark.parametrize("label", ["qwen3", "gpt_oss", "deepseek_v3", "deepseek_v2", "most"])
@pytest.mark.parametrize("arch", [80, 90])
@compiled
def test_a_warp_reduces_in_registers(label, arch):
    [(function, arguments)] = launched(case(label), arch, "route")
    binary = built(arch, function, arguments, BF16)
    ptx = binary.asm["ptx"]
    assert binary.metadata.shared == 0 and "bar.sync" not in ptx, "threads wait for each other"
    assert "redux.sync" in ptx
    assert not arguments["OVERLAP"] or waits_first(ptx)
