"""Kernels that are called on one machine and whose torch ops stand in the code of another:
`Inline.when`."""

import re
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import attnops
from attnops.core.kernel import all_kernels
from attnops.core.problem import Problem, Target
from attnops.ops import OPS
from attnops.testing import CASES
from attnops.testing.check import clone, compare, fill, named_results, oracle
from attnops.testing.error_bounds import allowance
from tests.lowering.models import code_of, compiled_code

HKV, D = 2, 16
FLASH = "_scaled_dot_product_flash_attention_for_cpu.default("
IN_PLACE = {
    "attention": (
        "causal",
        "window_both",
        "chunk",
        "mask_biases",
        "mask_causal",
        "v_wider",
        "range_start-plain",
        "decode-plain",
        "decode-mask_additive",
        "decode-bfloat16_d64",
        "mask_bool_b",
        "mask_bool_h",
        "no_keys-plain",
    ),
    "paged_attention": (
        "decode_promised-plain",
        "decode_promised-window_both",
        "decode_promised-mask_additive",
        "decode_promised-bfloat16_d64",
    ),
}


def sdpa(call, kernel="sdpa"):
    return OPS[call.op](OPS[call.op].call(**call.arguments, policy=f"kernel={call.op}:{kernel}"))


def poisoned(call):
    """NaN in all that may not be read."""
    return call.map(lambda n, t: fill(clone(t), call.free[n], True) if n in call.free else t)


def calls_of(op, labels):
    return [case.call() for case in CASES[op] if case.label in labels]


def test_every_rule_is_lowered_in_place_and_equals_the_reference():
    """Of decode as well: the glue around torch's own attention is fused."""
    given = [call for op, labels in IN_PLACE.items() for call in calls_of(op, labels)]
    stale = [*map(poisoned, given)]
    got, code = compiled_code(lambda: torch.compile(lambda: [*map(sdpa, stale)], fullgraph=True)())
    for call, results in zip(given, got, strict=True):
        want = oracle(call)
        allowed = allowance(call, want)
        for name, found in named_results(call, results, call.op).items():
            compare(f"{call.op} {name}", found, want[name], allowed[name], 1.0)
    assert (
        len(given) == sum(map(len, IN_PLACE.values()))
        and "torch.ops.attnops." not in code
        and code.count(FLASH) == 15
    )


def some(x, pick):
    few = x[pick.nonzero()[:, 0]]
    return attnops.attention(few, few, few, causal=True, kernel="sdpa")


LEFT = {
    "requests that may be padded": (sdpa, calls_of("paged_attention", ["decode_padded-plain"])),
    "a size that depends on data": (some, (torch.randn(4, 3, 2, D), torch.tensor([1, 0, 1, 1]))),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_to_the_kernel(what):
    run, arguments = LEFT[what]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        code = code_of(run, *arguments)
    assert re.search(r"torch.ops.attnops.\w*attention.sdpa", code) and FLASH not in code


def test_sizes_that_change_ask_for_no_further_graph():
    """Two lengths of a chunk over a growing context, and one where they are equal."""
    call, compiled = torch.compile(attnops.attention, fullgraph=True, dynamic=True), []
    for queries, keys in ((3, 7), (5, 9), (6, 6)):
        q, k = torch.randn(2, queries, 4, D), torch.randn(2, keys, HKV, D)
        torch.testing.assert_close(
            call(q, k, k, causal=True), attnops.attention(q, k, k, causal=True)
        )
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries, v_dim", [(1, D), (5, D), (5, 8)], ids=["one", "flash", "plain"])
def test_sdpa_on_a_cpu_gives_0_where_nothing_is_seen_and_sees_past_a_masked_block(
    dtype, queries, v_dim
):
    """Neither of its ways needs its output cleared: no key, or the first at the end of a row longer
    than the blocks it works in."""
    keys, unit = 1200, torch.finfo(dtype).eps
    q, k, v = (
        torch.randn(3, n, h, d, dtype=dtype)
        for n, h, d in ((queries, 8, D), (keys, HKV, D), (keys, HKV, v_dim))
    )
    see = torch.zeros(3, 1, 1, keys, dtype=torch.bool)
    see[1, ..., -1] = see[2] = True
    for mask in (see, torch.zeros(see.shape, dtype=dtype).masked_fill(~see, float("-inf"))):
        got = attnops.attention(q, k, v, mask=mask, kernel="sdpa")
        assert (got[0] == 0).all()
        torch.testing.assert_close(
            got[1], v[1, -1].repeat_interleave(4, 0).expand_as(got[1]), rtol=2 * unit, atol=0
        )


def test_no_kernel_is_lowered_in_place_on_a_gpu_where_it_is_timed_as_a_call():
    kernels = [k for k in all_kernels() if k.inline and k.inline.when]
    assert {(k.op, k.name) for k in kernels} == {("attention", "sdpa"), ("paged_attention", "sdpa")}
    for kernel in kernels:
        here = Problem.of(op=kernel.op, target=Target("cpu"), padded=False)
        assert not kernel.inline.when(replace(here, target=Target.parse("sm90")))
