"""Kernels that are called on one machine and whose torch ops stand in the code of another: `Inline.when`."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import attnops
from attnops.core.kernel import all_kernels
from attnops.core.problem import Problem, Target
from attnops.ops import OPS
from attnops.testing import CASES
from tests.lowering.models import compiled_code, kernel_calls

B, PAGE, W, HKV, D = 3, 4, 3, 2, 16
LENGTHS = (9, 5, 0)
FLASH = "_scaled_dot_product_flash_attention_for_cpu.default("


class Both(nn.Module):
    """Decode over keys as they lie, with a mask, and over pages."""

    def forward(self, q, k, v, mask, k_pages, v_pages, table, lengths, cu, padded: bool = False):
        dense = attnops.attention(q[:, None], k, v, mask=mask)[:, 0]
        return dense, attnops.paged_attention(q, k_pages, v_pages, table, lengths, cu, max_seqlen_q=1, padded=padded)


def given(heads, mask_heads=1, dtype=torch.float32):
    """Requests of LENGTHS, the same keys in pages and without, NaN where no key is."""
    make = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(*s, generator=make, dtype=dtype) for s in ((B, heads, D), (B, W * PAGE, HKV, D), (B, W * PAGE, HKV, D)))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    see = torch.arange(W * PAGE)[None] < lengths[:, None]
    mask = see[:, None, None].expand(B, mask_heads, 1, W * PAGE).clone()
    table = torch.arange(1, B * W + 1, dtype=torch.int32).view(B, W)
    pages = [torch.full((1 + B * W, PAGE, HKV, D), torch.nan, dtype=dtype) for _ in range(2)]
    for held, x in zip(pages, (k, v), strict=True):
        held[1:] = x.masked_fill(~see[..., None, None], torch.nan).view(B * W, PAGE, HKV, D)
    return [q, k, v, mask, *pages, table, lengths, torch.arange(B + 1, dtype=torch.int32)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("heads, mask_heads, dtype", [(4, 1, torch.float32), (16, 16, torch.float32), (16, 1, torch.bfloat16)])
def test_decode_on_a_cpu_is_torchs_own_attention_and_the_glue_is_fused(heads, mask_heads, dtype):
    arguments = given(heads, mask_heads, dtype)
    with torch.no_grad():
        with attnops.use(kernel="reference"):
            want = Both()(*[x.double() if x.is_floating_point() else x for x in arguments])
        eager = Both()(*arguments)
        got, code = compiled_code(lambda: torch.compile(Both(), fullgraph=True)(*arguments))
    unit = torch.finfo(dtype).eps
    for kind in (eager, got):
        for found, exact in zip(kind, want, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=4 * unit, atol=4 * unit)
    assert all((x[-1] == 0).all() for x in (*eager, *got)), "the last request has no key"
    assert kernel_calls(code) == ["attention.sdpa", "paged_attention.sdpa"]
    assert code.count(FLASH) == 2 and "torch.ops.attnops." not in code


RULES = ("causal", "window_both", "chunk", "mask_biases", "mask_causal", "v_wider", "range_start-plain")
PROMISED = ("decode_promised-window_both", "decode_promised-mask_additive")


def test_every_rule_is_lowered_in_place_and_equals_the_reference():
    cases = [c for op in ("attention", "paged_attention") for c in CASES[op] if c.label in (RULES if op == "attention" else PROMISED)]
    given = [case.call() for case in cases]

    def calls(kernel):
        policies = [f"kernel={call.op}:{kernel}" for call in given]
        return tuple(OPS[c.op](OPS[c.op].call(**c.arguments, policy=p)) for c, p in zip(given, policies, strict=True))

    with torch.no_grad():
        want = calls("reference")
        got, code = compiled_code(lambda: torch.compile(lambda: calls("sdpa"), fullgraph=True)())
    torch.testing.assert_close(got, want)
    assert len(want) == len(RULES + PROMISED) and "torch.ops.attnops." not in code


def some(x, pick):
    few = x[pick.nonzero()[:, 0]]
    return attnops.attention(few, few, few, causal=True, kernel="sdpa")


LEFT = {
    "requests that may be padded": (lambda *given: Both()(*given, padded=True)[1], given(4)),
    "a size that depends on data": (some, [torch.randn(4, 3, 2, D), torch.tensor([1, 0, 1, 1])]),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_to_the_kernel(what):
    run, arguments = LEFT[what]
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, code = compiled_code(lambda: torch.compile(run, fullgraph=True)(*arguments))
        torch.testing.assert_close(got, run(*arguments))
    assert re.search(r"torch.ops.attnops.\w*attention.sdpa", code) and FLASH not in code


def test_sizes_that_change_ask_for_no_further_graph():
    """Two lengths of a chunk over a growing context, and one where they are equal."""
    call, compiled = torch.compile(attnops.attention, fullgraph=True, dynamic=True), []
    with torch.no_grad():
        for queries, keys in ((3, 7), (5, 9), (6, 6)):
            q, k = torch.randn(2, queries, 4, D), torch.randn(2, keys, HKV, D)
            torch.testing.assert_close(call(q, k, k, causal=True), attnops.attention(q, k, k, causal=True))
            compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries, v_dim", [(1, D), (5, D), (5, 8)], ids=["one", "flash", "plain"])
def test_sdpa_on_a_cpu_gives_0_where_nothing_is_seen_and_sees_past_a_masked_block(dtype, queries, v_dim):
    """Neither of its ways needs its output cleared: no key, or the first at the end of a row longer than the blocks it works in."""
    keys, unit = 1200, torch.finfo(dtype).eps
    q, k, v = (torch.randn(3, n, h, d, dtype=dtype) for n, h, d in ((queries, 8, D), (keys, HKV, D), (keys, HKV, v_dim)))
    see = torch.zeros(3, 1, 1, keys, dtype=torch.bool)
    see[1, ..., -1] = see[2] = True
    for mask in (see, torch.zeros(see.shape, dtype=dtype).masked_fill(~see, float("-inf"))):
        got = attnops.attention(q, k, v, mask=mask, kernel="sdpa")
        assert (got[0] == 0).all()
        torch.testing.assert_close(got[1], v[1, -1].repeat_interleave(4, 0).expand_as(got[1]), rtol=2 * unit, atol=0)


def test_no_kernel_is_lowered_in_place_on_a_gpu_where_it_is_timed_as_a_call():
    kernels = [k for k in all_kernels() if k.inline and k.inline.when]
    assert {(k.op, k.name) for k in kernels} == {("attention", "sdpa"), ("paged_attention", "sdpa")}
    for kernel in kernels:
        here = Problem.of(op=kernel.op, target=Target("cpu"), padded=False)
        assert not kernel.inline.when(replace(here, target=Target.parse("sm90")))
