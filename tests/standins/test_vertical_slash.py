"""Vertical-slash attention: what the index means, its reference against the kernel's own walk, and
the wrappers over stand-ins."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import attnops
from attnops import ops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from attnops.core.select import select
from attnops.ops import OPS
from attnops.ops.sparse.vertical_slash_cases import HALF, SLASH as SMALL
from attnops.testing import CASES, Source, check_kernel, make_call
from tests.checks import right
from tests.standins import sgl_kernel_small
from tests.standins.vendors import VENDORS

BF16, I32 = torch.bfloat16, torch.int32
NAME = "sgl_sparse"
SM90 = VENDORS[NAME].target


def sgl(op):
    return kernels_of(op)["sgl_sparse"]


def ints(*rows):
    return torch.tensor(rows, dtype=I32)


# What the index means -----------------------------------------------------------------------------


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_the_index_covers_what_was_asked(queries, more, verticals, slashes, seed):
    """Every diagonal, every column up to the last run of blocks, nothing twice; blocks and columns
    ascend and begin among the keys."""
    keys = queries + more
    call = make_call(
        "vertical_slash_indexes", Source(seed), (queries,), (keys,), 1, verticals, slashes
    )
    count, offset, columns, column = (
        x[0, 0] for x in OPS["vertical_slash_indexes"].reference(call.record)
    )
    for row in range(count.shape[0]):
        starts = offset[row, : count[row]].tolist()
        own = column[row, : columns[row]].tolist()
        listed = [k for s in starts for k in range(s, s + 64)]
        assert len(set(listed + own)) == len(listed) + len(own)
        assert (
            starts == sorted(starts)
            and own == sorted(own)
            and all(0 <= k < keys for k in starts + own)
        )
        assert set(own) <= set(call.arguments["vertical"][0, 0].tolist())
        for i in range(row * 64, min(row * 64 + 64, queries)):
            at = keys - queries + i
            seen = {at - s for s in call.arguments["slash"][0, 0].tolist()}
            assert {k for k in seen if k >= 0} <= set(listed)
        diagonal = keys - queries + row * 64
        assert {v for v in call.arguments["vertical"][0, 0].tolist() if v < diagonal - 63} <= set(
            listed + own
        )


@pytest.mark.parametrize("case", CASES["vertical_slash_indexes"], ids=str)
def test_an_index_of_everything_is_plain_attention(case):
    made = case.call()
    q_lens, k_lens = made.arguments["q_lens"].tolist(), made.arguments["k_lens"].tolist()
    heads, longest = made.arguments["vertical"].shape[1], max(k_lens, default=0)
    f = replace(SMALL, q_heads=heads, kv_heads=1, dtype=torch.float64)
    call = make_call("vertical_slash_attention", Source(1), q_lens, k_lens, f)
    every = torch.arange(longest, -1, -1, dtype=I32).expand(len(q_lens), heads, -1).contiguous()
    given = {
        n: call.arguments[n]
        for n in (
            "query",
            "key",
            "value",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
        )
    }
    index = ops.vertical_slash_indexes(
        made.arguments["q_lens"],
        made.arguments["k_lens"],
        every.flip(2).contiguous(),
        every,
        max_seqlen_q=given["max_seqlen_q"],
    )
    got = ops.vertical_slash_attention(**given, indexes=index)
    torch.testing.assert_close(got, attnops.varlen_attention(**given, causal=True))


# The wrappers -------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 200]), min_size=1, max_size=2),
    st.integers(0, 200),
    st.data(),
)
@settings(max_examples=60)
def test_the_reference_walks_as_the_kernel_does(q_lens, more, data):
    sizes = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    call = make_call(
        "vertical_slash_indexes",
        Source(data.draw(st.integers(0, 99))),
        q_lens,
        [n + more for n in q_lens],
        2,
        *sizes,
        data.draw(st.booleans()),
    )
    want = OPS["vertical_slash_indexes"].reference(call.record)
    given = [x.contiguous() for x in call.args]
    got = [torch.zeros_like(x) for x in want]
    sgl_kernel_small.convert(*got, *given, call.kwargs["max_seqlen_q"], 64, 64, True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_counts_take_the_other_op(standin):
    for case in CASES["vertical_slash_indexes"]:
        if case.label in ("counted", "ragged"):
            check_kernel(sgl("vertical_slash_indexes"), case.call())
    assert standin == ["convert_vertical_slash_indexes", "convert_vertical_slash_indexes_mergehead"]


@pytest.mark.parametrize(
    ("q_lens", "padding", "slack", "launches"),
    [
        ((64, 64, 64), 0, 0, 1),
        ((64, 10, 3), 0, 0, 3),  # room for one request of 64 in 77 rows
        ((64, 10, 3), 51, 0, 2),
        ((64, 64, 3, 64), 0, 0, 2),
        ((70,), 5, 0, 1),
        ((3,), 0, 200, 1),  # fewer rows than the longest request may have
        ((3, 0, 2), 1, 64, 3),
        ((1, 1, 1), 0, 0, 1),
    ],
)
def test_no_launch_has_more_requests_than_its_lse_has_room_for(
    standin, q_lens, padding, slack, launches
):
    k_lens = [n + 70 for n in q_lens]
    call = make_call(
        "vertical_slash_attention",
        Source(4),
        q_lens,
        k_lens,
        HALF,
        padding=(padding, 0),
        slack=slack,
    )
    right(sgl("vertical_slash_attention"), call)
    assert standin == ["varlen_fwd_sparse"] * launches


def test_queries_without_keys(standin):
    call = make_call("vertical_slash_attention", Source(4), (64, 3), (10, 0), HALF)
    right(sgl("vertical_slash_attention"), call)


PROBLEM = Problem.of(
    "vertical_slash_attention",
    SM90,
    dtype=BF16,
    kv_dtype=BF16,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    causal=True,
    tokens=Extent.of(8192),
    batch=Extent.of(1),
    queries=Extent.of(8192),
    context=Extent.of(8192),
)


def test_the_wheel_is_chosen_where_it_is():
    assert select(PROBLEM).kernel.name == "sgl_sparse"
    assert select(replace(PROBLEM, target=Target("cuda", 90, ()))).kernel.name == "reference"
    index = altered(
        Problem("vertical_slash_indexes", SM90, I32, I32, 32),
        causal=True,
        queries=Extent.of(8192),
        batch=Extent.of(1),
    )
    assert select(index).kernel.name == "sgl_sparse"
