"""`triton` of norms that feed no linear: roundings, layouts, the choice, and what is compiled."""

import re

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered
from attnops.core.select import Policy, select
from attnops.ops.case_data import BF16, F16, F32
from attnops.testing import Source, make_call
from tests.ops import test_fakes as layouts
from tests.triton.checks import SM90, check, triton
from tests.triton.compiling import built, compile_for, launched, waits_as_told
from tests.triton.process import compiled, interpreted

ROUNDED = {"llama": {}, "gemma": {"offset": 1.0}, "olmo2": {"wide_gain": True}}


def result(call, kernel, **changed):
    call = call.with_(output=torch.full_like(call.arguments["x"], float("nan")), **changed)
    kernels_of("rms_norm")[kernel].run(call.record)
    return call.arguments["output"]


@interpreted
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("family", ROUNDED)
def test_roundings_are_those_of_transformers(family, residual, dtype):
    """Of rows whose mean of squares is 4, so that nothing but the products and the sum is rounded.

    The interpreter cuts bfloat16 off.
    """
    call = make_call("rms_norm", Source(3), 5, 40, dtype, **ROUNDED[family], residual=residual)
    x = torch.tensor([3.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0, 1.0]).repeat(5, 5).to(dtype)
    call = call.with_(x=x, eps=1e-30)
    assert torch.equal(result(call, "triton"), result(call, "aten"))


@interpreted
@pytest.mark.parametrize("wide", [False, True])
def test_a_wide_gain_is_rounded_once(wide):
    call = make_call("rms_norm", Source(3), 9, 300, F16, wide_gain=wide)
    got = result(call, "triton")
    same, other = (result(call, "aten", wide_gain=w) for w in (wide, not wide))
    assert (got == same).float().mean() > 0.99 > 0.95 > (got == other).float().mean()


@interpreted
def test_any_layout():
    """Of each tensor in turn, and of all."""
    call = make_call("rms_norm", Source(5), 6, 40, BF16, residual=True)
    tensors = {name: call.arguments[name] for name in ("x", "residual", "output")}
    spread = {name: layouts.raw(layouts.strided, t, 0) for name, t in tensors.items()}
    turned = {
        name: layouts.raw(layouts.transposed, tensors[name], 0) for name in ("residual", "output")
    }
    for changed in (*({name: t} for name, t in spread.items()), turned, {**spread, **turned}):
        assert not check(call.with_(**changed)).refused


@pytest.mark.parametrize(
    ("target", "width", "compiled", "chosen"),
    [
        (SM90, 4096, False, "triton"),
        (SM90, 4096, True, "aten"),
        (SM90, 16384, False, "triton"),
        (SM90, 16385, False, "aten"),
        (Target("cuda", 90, ()), 4096, False, "aten"),
        (Target(), 4096, False, "aten"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_the_choice(tokens, target, width, compiled, chosen):
    """A compiler fuses torch's operations with what is around them."""
    problem = make_call("rms_norm", Source(), 1, 40, BF16, residual=True).problem
    given = {"target": target, "in_features": width, "compiled": compiled}
    problem = altered(problem, tokens=Extent.of(tokens), **given)
    assert select(problem).kernel.name == chosen
    if target == SM90 and width <= 16384:
        assert select(problem, Policy(deterministic=True)).kernel is triton("rms_norm")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("family", ROUNDED)
@compiled
def test_one_launch_that_compiles(family, arch):
    call = make_call("rms_norm", Source(), 80, 4096, BF16, **ROUNDED[family], residual=True)
    [(function, arguments)] = launched(call, arch, "linear")
    waits_as_told(built(arch, function, arguments, BF16), arguments, arch)


@compiled
def test_addresses_are_int64():
    columns = {name: torch.empty(40, 3, dtype=BF16).T for name in ("residual", "output")}
    call = make_call("rms_norm", Source(), 3, 40, BF16, residual=True).with_(**columns)
    [(function, arguments)] = launched(call, 90, "linear")
    ir = compile_for(90, function, arguments, BF16).asm["ttir"]
    assert "arith.muli" in ir and not re.search(r"arith\.muli.*tensor<.*xi32>", ir)
