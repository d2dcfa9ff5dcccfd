"""`temperature`: which kernels take it, and that it reaches them eagerly, again, and compiled."""

from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.testing import Features, Source, make_call, oracle

TAKE_IT = {"reference", "triton"}
SOFTCAP = Features(causal=True, softcap=30.0, scale=4.0, temperature=True)
SHAPES = {"decode": ((1, 1, 1), (5, 40, 16)), "extend": ((3, 1, 7), (9, 40, 7))}


def call_of(shape, features=SOFTCAP, padding=2):
    return make_call("paged_attention", Source(2), *SHAPES[shape], 16, features, padding=padding)


@pytest.mark.parametrize("name", kernels_of("paged_attention"))
def test_every_kernel_takes_it_or_refuses_it(name):
    kernel = kernels_of("paged_attention")[name]
    call = call_of("decode")
    with_it, without = ({r.field: r for r in kernel.unmet(c.problem)} for c in (call, call.with_(temperature=None)))
    assert "temperature" not in without
    assert set(with_it) - set(without) == (set() if name in TAKE_IT else {"temperature"})
    if name not in TAKE_IT:
        assert str(with_it["temperature"]).startswith("temperature=True (wants no")


def public(t, output):
    names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q", "scale", "softcap", "temperature")
    return attnops.paged_attention(**{n: t[n] for n in names if n in t}, output=output)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_eager_calls_alike(shape, softcap):
    """The second call goes straight to the kernel, with its own factors; a call without any is another."""
    first = call_of(shape, replace(SOFTCAP, softcap=softcap), padding=0)
    second = first.with_(temperature=first.arguments["temperature"].flip(0) + 0.5)
    found = []
    with torch.no_grad():
        for call in (first, first, second, first.with_(temperature=None), first):
            found.append(public(call.arguments, torch.full_like(first.arguments["output"], float("nan"))))
            torch.testing.assert_close(found[-1].double(), oracle(call)["output"], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[4])
    assert not torch.allclose(found[0], found[2], atol=1e-3) and not torch.allclose(found[0], found[3], atol=1e-3)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_scaled_query_is_the_same_without_a_cap_alone(softcap):
    call = call_of("extend", replace(SOFTCAP, softcap=softcap, dtype=torch.float64), padding=0)
    t = call.arguments
    scaled = call.with_(query=t["query"] * t["temperature"].double()[:, None, None], temperature=None)
    assert torch.allclose(oracle(call)["output"], oracle(scaled)["output"], atol=1e-3) == (softcap == 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    compiled = torch.compile(public, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for shape in SHAPES if dynamic else list(SHAPES)[:1]:  # each is a compilation of its own
            call = call_of(shape, padding=0)
            got = compiled(call.arguments, torch.full_like(call.arguments["output"], float("nan")))
            torch.testing.assert_close(got, public(call.arguments, torch.empty_like(got)))
            torch.testing.assert_close(got.double(), oracle(call)["output"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overload", ["default", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_opcheck(shape, overload):
    call = call_of(shape)
    torch.library.opcheck(getattr(torch.ops.attnops.paged_attention, overload), call.args, call.kwargs)
