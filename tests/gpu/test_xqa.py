"""XQA on a real GPU, beyond the grid: odd batches of the shapes it is built for, its counters, and
the signatures of the package."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.flashinfer import devices
from attnops.kernels.shared import memory
from attnops.testing import Call, Features, Pages, Source, equip, make_call
from tests.checks import right
from tests.gpu.helpers import need

pytestmark = pytest.mark.skipif(
    find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
XQA = kernels_of("paged_attention")["xqa"]
PLAIN = Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=2, causal=True)
# (page size, features): one module each, which takes 6 s to build.
BUILT: dict[str, tuple[int, Features]] = {
    "bf16_page16_d128_group4": (16, PLAIN),
    "bf16_page64_d64_group8_window": (
        64,
        replace(PLAIN, head_dim=64, kv_heads=1, window=(127, -1)),
    ),
    "fp16_page32_d256_group1": (32, replace(PLAIN, dtype=F16, head_dim=256, q_heads=4, kv_heads=4)),
    "bf16_fp8_page64_d128_group4": (64, replace(PLAIN, kv_dtype=E4M3, scale_per_head=False)),
    "fp16_fp8_page128_d64_group16": (
        128,
        replace(
            PLAIN,
            dtype=F16,
            kv_dtype=E4M3,
            scale_per_head=False,
            head_dim=64,
            q_heads=16,
            kv_heads=1,
        ),
    ),
}
COPIED = ("bf16_page16_d128_group4", "bf16_fp8_page64_d128_group4")
LENGTHS = (1, 300, 77, 2047, 16, 4096)
SINKS = {"sinks": torch.float32}
# By name: how features differ, lengths, and how the call differs.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "plain": ({}, LENGTHS, {}),
    "many": ({}, tuple(37 * i % 700 for i in range(150)), {}),
    "empty": ({}, (0, 300, 0, 513), {}),
    "all_empty": ({}, (0, 0), {}),
    "idle_and_padded": ({}, (9, 300, 513), {"q_lens": (1, 0, 1), "padding": 2}),
    "sinks": (SINKS, (0, 300, 77, 2047), {}),
    "loud": ({"loud": True}, LENGTHS, {}),
    "interleaved": ({}, LENGTHS, {"pages": Pages(interleaved=True)}),
    "scale": ({"scale": 0.3}, LENGTHS, {}),
}


def decode(point: str, case: str = "plain") -> Call:
    (page, f), (features, lengths, more) = BUILT[point], CASES[case]
    given = {"q_lens": (1,) * len(lengths), "padding": 0, **more}
    return make_call(
        "paged_attention",
        Source(0, "cuda"),
        k_lens=lengths,
        page=page,
        f=replace(f, **features),
        **given,
    )


def load(page: int, f: Features) -> Any:
    """The module of a point, which builds it if need be."""
    from flashinfer.xqa import get_xqa_module

    return get_xqa_module(
        f.dtype,
        f.kv_dtype or f.dtype,
        page,
        f.head_dim,
        f.q_heads // f.kv_heads,
        f.window[0] >= 0,
        f.dtype,
        1,
    )


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """All modules, built side by side."""
    need(XQA, decode("bf16_page16_d128_group4"))
    with ThreadPoolExecutor(len(BUILT)) as pool:
        list(pool.map(lambda point: load(*point), BUILT.values()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("point", BUILT)
def test_numerics(point: str, case: str) -> None:
    right(XQA, decode(point, case))


@pytest.mark.parametrize("point", COPIED)
def test_a_copy_of_the_library(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of several GPUs is given. The package's own loading is not asked."""
    monkeypatch.setattr(devices, "visible", lambda: 2)
    for case in ("plain", "sinks"):
        right(XQA, decode(point, case))


@pytest.mark.parametrize("point", BUILT)
def test_counters_are_zero_again(point: str) -> None:
    call = equip(XQA, decode(point))
    for _ in range(3):
        XQA.run(call.record)
    workspace = call.arguments["workspace"]
    assert workspace[memory.COUNTERS :].any(), "no request was split, so that nothing was counted"
    assert not workspace[: memory.COUNTERS].any()


def test_signatures_are_those_the_stand_ins_have() -> None:
    from tests.standins import flashinfer_rope as rope, flashinfer_trtllm_mla as mla
    from tests.standins.flashinfer_trtllm import SIGNATURES, XQA_SIGNATURE

    def bare(function: Any) -> str:
        found = inspect.signature(function)
        parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        return str(found.replace(parameters=parameters, return_annotation=found.empty)).replace(
            "*, ", ""
        )

    for path, text in SIGNATURES.items():
        module, name = path.split(".")
        assert bare(getattr(import_module(f"flashinfer.{module}"), name)) == f"({text})", path
    assert bare(import_module("flashinfer.rope").mla_rope_quantize_fp8) == bare(
        rope.mla_rope_quantize_fp8
    )
    names = [parameter.partition("=")[0] for parameter in mla.SIGNATURE.split(", ")]
    assert (
        list(inspect.signature(getattr(import_module("flashinfer.mla"), mla.NAME)).parameters)
        == names
    )
    assert bare(load(16, PLAIN).xqa) == f"({XQA_SIGNATURE})"
