"""`copy_kv`, `pad_queries` and `unpad_queries` against loops that know nothing of the reference."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import ops
from attnops.testing import Features, Source, moves
from tests.helpers import ROOT
from tests.ops.strategies import CALLS

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def raw(x):
    """The bits; a number's bytes are one more dim."""
    return x.contiguous().flatten().view(torch.uint8).view(*x.shape, x.dtype.itemsize)


@given(data=st.data())
@settings(max_examples=40)
def test_copies(data):
    t = data.draw(CALLS["copy_kv"]).arguments
    pools = {n: t[n] for n in ("k_pages", "v_pages") if n in t}
    want = {n: raw(x).clone() for n, x in pools.items()}
    for n, x in pools.items():
        page = x.shape[2]
        for a, b in zip(t["source"].tolist(), t["target"].tolist(), strict=True):
            if a >= 0 and b >= 0:
                want[n][:, b // page, b % page] = raw(x)[:, a // page, a % page]
    ops.copy_kv(t["k_pages"], t.get("v_pages"), t["source"], t["target"])
    for n, x in pools.items():
        assert torch.equal(raw(x), want[n])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_copy_back_restores(dtype):
    call = moves.copy(Source(2), moves.PAIRS["cycle"], 3, 4, 3, Features(kv_dtype=dtype))
    t, before = call.arguments, raw(call.arguments["k_pages"]).clone()
    ops.copy_kv(t["k_pages"], t["v_pages"], t["source"], t["target"])
    assert not torch.equal(raw(t["k_pages"]), before)
    ops.copy_kv(t["k_pages"], t["v_pages"], t["target"], t["source"])
    assert torch.equal(raw(t["k_pages"]), before)


def test_one_layer_and_latents():
    pages = torch.arange(24.0).reshape(2, 3, 4)
    want = pages.clone()
    want[1, 2] = pages[0, 0]
    ops.copy_kv(pages[None], None, torch.tensor([0]), torch.tensor([5]))
    assert torch.equal(pages, want)


@given(data=st.data())
@settings(max_examples=40)
def test_pads(data):
    t = data.draw(CALLS["pad_queries"]).arguments
    query, cu, width = t["query"], t["cu_seqlens_q"], t["max_seqlen_q"]
    padded = ops.pad_queries(query, cu, max_seqlen_q=width)
    assert padded.shape == (cu.shape[0] - 1, width, *query.shape[1:]) and padded.dtype == query.dtype
    for b, (first, end) in enumerate(pairwise(cu.tolist())):
        n = min(end - first, width)
        assert torch.equal(raw(padded[b, :n]), raw(query[first : first + n]))
        assert not raw(padded[b, n:]).any()


@given(data=st.data())
@settings(max_examples=40)
def test_unpads(data):
    t = data.draw(CALLS["unpad_queries"]).arguments
    padded, cu, tokens = t["padded"], t["cu_seqlens_q"], t["num_tokens"]
    rows = ops.unpad_queries(padded, cu, num_tokens=tokens)
    assert rows.shape == (tokens, *padded.shape[2:]) and rows.dtype == padded.dtype
    for b, (first, end) in enumerate(pairwise(cu.tolist())):
        n = min(end - first, padded.shape[1])
        assert torch.equal(raw(rows[first : first + n]), raw(padded[b, :n]))
        assert not raw(rows[first + n : end]).any()
    assert not raw(rows[int(cu[-1]) :]).any()


def test_there_and_back():
    query, cu = torch.randn(9, 2, 4).to(torch.bfloat16), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    padded = ops.pad_queries(query, cu, max_seqlen_q=5)
    assert torch.equal(ops.unpad_queries(padded, cu, num_tokens=9), query)
    assert torch.equal(ops.unpad_queries(padded, cu, num_tokens=11)[:9], query)


def test_padding_is_fused_by_the_compiler():
    """Plain torch ops lowered in place: one loop with what stands around them, and no call."""
    from torch._inductor.utils import run_and_get_code

    def step(query, cu):
        return ops.pad_queries(query * 2, cu, max_seqlen_q=5) + 1

    query, cu = torch.randn(9, 2, 4), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    got, codes = run_and_get_code(torch.compile(step, fullgraph=True), query, cu)
    assert torch.equal(got, step(query, cu))
    assert "attnops.pad_queries" not in codes[0] and codes[0].count("async_compile.cpp_pybinding") == 1


def test_where_they_are_told_of():
    assert all(op in (ROOT / "docs" / "triton.md").read_text() for op in ("copy_kv", "pad_queries", "unpad_queries"))
