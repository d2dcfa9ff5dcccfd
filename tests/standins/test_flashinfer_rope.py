"""`flashinfer_rope` over a stand-in of the function it calls, and `pointwise` in generated code:
rotation, quantisation, joining."""

import re
from dataclasses import replace

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered
from attnops.core.select import select
from attnops.kernels.flashinfer import rope
from attnops.kernels.shared.tokens import side_by_side
from attnops.ops import rope_quantize_latent
from attnops.ops.latent.cases import DEEPSEEK, SMALL
from attnops.testing import Source, make_call
from tests.lowering.models import compiled_code

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
OP = "rope_quantize_latent"
KERNELS = kernels_of(OP)
KERNEL = KERNELS["flashinfer_rope"]
NAME = "flashinfer_rope"
PARTS = ("q_nope", "q_pe", "latent", "k_pe", "cos_sin", "positions")


def call(f=DEEPSEEK, positions=(3, 0, 8), **more):
    return make_call(
        "rope_quantize_latent",
        Source(1),
        positions,
        f,
        interleaved=more.pop("interleaved", True),
        **more,
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_the_function_is_given(calls, interleaved):
    given = call(interleaved=interleaved, fused=True)
    query, row = KERNEL.run(given.record)
    [seen] = calls
    assert seen["is_neox"] is not interleaved and seen["quantize_dtype"] == E4M3
    assert (seen["quant_scale_q"], seen["quant_scale_kv"]) == (4.0, 8.0)
    for name, argument in (
        ("q_rope", "q_pe"),
        ("k_rope", "k_pe"),
        ("q_nope", "q_nope"),
        ("k_nope", "latent"),
        ("pos_ids", "positions"),
    ):
        assert seen[name].data_ptr() == given.arguments[argument].data_ptr(), "copied"
    for name, whole, at in (
        ("q_nope", query, 0),
        ("q_rope", query, 512),
        ("k_nope", row, 0),
        ("k_rope", row, 512),
    ):
        assert seen[f"{name}_out"].data_ptr() == whole.data_ptr() + at


def test_more_than_32_bits_of_offsets_are_refused(calls, monkeypatch):
    monkeypatch.setattr(rope, "OFFSETS", 4096)
    with pytest.raises(InvalidInput, match=r"^q_nope: got 24576 numbers, want < 4096"):
        KERNEL.run(call().record)


def test_who_is_chosen():
    problem = altered(call().problem, tokens=Extent.of(64))
    for arch, packages, want in (
        (100, ("flashinfer",), "flashinfer_rope"),
        (90, (), "pointwise"),
        (80, ("flashinfer",), "reference"),
    ):
        assert (
            select(replace(problem, target=Target("cuda", arch, assume=packages))).kernel.name
            == want
        )
    assert select(replace(problem, target=Target("cpu"))).kernel.name == "pointwise"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("at", [-1, 9])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_position_outside_the_table_gives_nan_to_its_token_alone(at, compiled):
    given = call(SMALL).with_(positions=torch.tensor([0, at, 1]))
    run = torch.compile(rope_quantize_latent, fullgraph=True) if compiled else rope_quantize_latent
    found = run(*(given.arguments[n] for n in PARTS))
    right = rope_quantize_latent(
        *(given.with_(positions=torch.tensor([0, 0, 1])).arguments[n] for n in PARTS)
    )
    for name, mine, theirs in zip(("q_nope", "q_pe", "latent", "k_pe"), found, right, strict=True):
        mine, theirs = mine.float(), theirs.float()
        assert torch.equal(mine[[0, 2]], theirs[[0, 2]])
        assert (
            bool(mine[1].isnan().all())
            if name in ("q_pe", "k_pe")
            else torch.equal(mine[1], theirs[1])
        )


def test_parts_are_views_of_one_tensor():
    q_nope, q_pe, latent, k_pe = rope_quantize_latent(*(call(SMALL).arguments[n] for n in PARTS))
    assert side_by_side(q_nope, q_pe), "attention copies no query"
    assert (
        q_nope.stride() == q_pe.stride() == (80, 20, 1)
        and q_pe.data_ptr() == q_nope.data_ptr() + 16
    )
    assert latent.stride() == k_pe.stride() == (20, 1) and k_pe.data_ptr() == latent.data_ptr() + 16


def step(q_nope, q_pe, latent, k_pe, cos_sin, positions):
    return rope_quantize_latent(
        q_nope * 2,
        q_pe,
        latent * 2,
        k_pe,
        cos_sin,
        positions,
        q_scale=0.25,
        kv_scale=0.125,
        interleaved=True,
    )


def test_the_compiler_fuses_it():
    """One function; each of its loops writes one part into its place in float8; no other tensor is
    made, rotated or wide."""
    given = [call(fused=True).arguments[n] for n in PARTS]
    with torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(step, fullgraph=True)(*given))
        want = step(*given)
    assert "torch.ops.attnops" not in code and "aten.cat" not in code
    assert (
        code.count("async_compile.cpp_pybinding")
        == 1
        == len(re.findall(r"^ +cpp_fused\w*\(", code, re.M))
    )
    made = re.findall(r"= empty_strided_cpu\((\(.*?\)), \(.*?\), (torch\.\w+)\)", code)
    assert made == [("(3, 16, 576)", "torch.float8_e4m3fn"), ("(3, 576)", "torch.float8_e4m3fn")]
    assert re.findall(r"^ +([\w:]+)\* out_ptr\d[,)]", code, re.M) == ["at::Float8_e4m3fn"] * 4
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.stride() == b.stride()
