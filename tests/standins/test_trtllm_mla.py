"""`trtllm_mla` through a stand-in of the function it calls: rows, tables, scales, workspace, lse,
refusals, compiled code."""

from dataclasses import replace

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.kernels.shared import memory
from attnops.ops import decode_rows
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Pages, check_kernel, equip
from tests.standins.calls import latents

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NAME = "trtllm_mla"
KERNEL = kernels_of("mla_attention")[NAME]
FLOAT8 = replace(DEEPSEEK, kv_dtype=E4M3)


def call(q_lens=(1, 2, 1), *given, **more):
    return latents(q_lens, *given, padding=1, **more)


def test_what_the_function_is_given(calls):
    given = equip(KERNEL, call(page=32, f=replace(DEEPSEEK, lse=True), pages=Pages(wider=0)))
    KERNEL.run(given.record)
    [(name, seen)] = calls
    assert name == "trtllm_batch_decode_with_kv_cache_mla" and seen["backend"] == "trtllm-gen"
    assert (
        seen["query"].shape == (5, 1, 16, 576)
        and seen["out"].data_ptr() == given.arguments["output"].data_ptr()
    )
    assert (
        given.arguments["page_table"].shape == (3, 5)
        and seen["block_tables"].shape == (5, 8)
        and seen["max_seq_len"] == 256
    )
    assert (seen["bmm1_scale"], seen["bmm2_scale"]) == (192**-0.5, 1.0) and seen["sinks"] is None
    assert (seen["return_lse"], seen["return_lse_base"]) == (True, "basee") and seen[
        "lse"
    ] is given.arguments["lse"]
    assert (
        seen["workspace_buffer"].data_ptr()
        == given.arguments["workspace"].data_ptr() + memory.COUNTERS
    )


def test_scales_are_one_tensor_each_and_the_base_is_always_said(calls):
    given = equip(KERNEL, call(f=replace(FLOAT8, q_dtype=E4M3)))
    KERNEL.run(given.record)
    seen, t = calls[-1][1], given.arguments
    torch.testing.assert_close(seen["bmm1_scale"], t["q_scale"] * t["kv_scale"] * t["scale"])
    assert seen["bmm2_scale"] is t["kv_scale"] and (
        seen["return_lse"],
        seen["return_lse_base"],
    ) == (False, "basee")


@pytest.mark.parametrize("sinks", [BF16, F32])
def test_sinks(calls, sinks):
    for heads in (16, 128):
        assert (
            check_kernel(
                KERNEL, call((1, 1), (70, 2), f=replace(DEEPSEEK, sinks=sinks, q_heads=heads))
            ).worst
            <= 0.125
        )
    KERNEL.run(equip(KERNEL, call(f=replace(DEEPSEEK, sinks=sinks))).record)
    assert calls[-1][1]["sinks"].dtype == F32


def test_a_plan_says_the_same(calls):
    given = equip(KERNEL, call((2, 0, 3), f=replace(DEEPSEEK, lse=True)))
    t = given.arguments
    plan = decode_rows(
        t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=t["q_nope"].shape[0]
    )
    assert check_kernel(KERNEL, given.with_(holes=False, plan=plan)).worst <= 0.125


# The workspace ------------------------------------------------------------------------------------


def test_more_rows_than_counters(calls):
    given = equip(KERNEL, call((1,), (3,), f=replace(DEEPSEEK, q_heads=128)))
    many = torch.zeros(1, dtype=BF16).expand(16385 * 128 * 512).view(16385, 128, 512)
    with pytest.raises(
        InvalidInput, match=r"^q_nope.shape\[0\]: got 16385, want <= 16384 tokens of 128 heads"
    ):
        KERNEL.run(given.with_(q_nope=many, output=many).record)
