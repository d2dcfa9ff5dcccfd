"""Verify steps: a few tokens of every request, as many as are drafted. Kernels see how many, at capture as in eager."""

from dataclasses import replace

import pytest
import torch

from attnops.cache import PagedBatch
from attnops.core.errors import BatchTooLarge, InvalidInput
from attnops.core.kernel import Capture, extent_at_most, kernels_of, register
from attnops.core.problem import Extent, Problem
from attnops.core.select import _select
from attnops.graphs import Bucket, Buckets, piecewise
from tests.graphs.helpers import ANY_MODE, MODES, Pair, close, graphed, pools
from tests.graphs.models import BOUNDARY, VOCAB

BUCKETS = Buckets(decode=(1, 2, 4), tokens=(16, 32), requests=4, verify=(3, 5))
FEW = "few_queries"
SEEN: list[Problem] = []


def few():
    """A kernel of at most 8 queries of a request, as those are that take tokens one by one. SEEN: the Problems it was asked about."""
    if FEW not in kernels_of("paged_attention"):
        needs = (lambda p: SEEN.append(p), extent_at_most("queries", 8))
        kernel = replace(kernels_of("paged_attention")["reference"], name=FEW, needs=needs, cost_us=lambda p: 1e9)
        register(replace(kernel, capture=Capture.NEVER))
    return FEW


def test_which_bucket_serves():
    assert BUCKETS.kind(8, 4, 2) == BUCKETS.kind(20, 4, 5) == "verify"
    assert BUCKETS.find("verify", 8, 4, 2) == Bucket(12, 4, "verify") and BUCKETS.find("verify", 5, 1, 5) == Bucket(5, 1, "verify")
    assert [str(b) for b in BUCKETS.all()][:4] == ["mixed 32 tokens x4", "verify 5 x4", "mixed 16 tokens x4", "verify 3 x4"]
    assert BUCKETS.kind(4, 4, 1) == "decode" and BUCKETS.kind(5, 5, 2) == BUCKETS.kind(6, 1, 6) == "mixed"
    # Rows of no request need room, too.
    assert BUCKETS.find("verify", 7, 2, 3) == Bucket(12, 4, "verify") and BUCKETS.kind(30, 2, 3) == "mixed"
    assert [b.queries for b in BUCKETS.of_trace("verify 3")] == [3, 3, 3] and BUCKETS.most == (32, 4)
    dropped = replace(BUCKETS, dropped=frozenset({Bucket(12, 4, "verify")}))
    assert dropped.find("verify", 12, 4, 3) == Bucket(20, 4, "verify")


def test_batches_without_a_bucket():
    alone = Buckets(decode=(2, 4), verify=(3,))
    with pytest.raises(BatchTooLarge, match="verify batch: requests got 5, want at most 4"):
        alone.find(alone.kind(10, 5, 2), 10, 5, 2)
    with pytest.raises(BatchTooLarge, match="mixed batch: tokens got 8, want a bucket for such batches"):
        alone.find(alone.kind(8, 2, 4), 8, 2, 4)
    for bad in ({"decode": (1,), "verify": (1,)}, {"decode": (1,), "verify": (3, 2)}, {"tokens": (8,), "verify": (2,)}):
        with pytest.raises(InvalidInput, match=r"^verify: "):
            Buckets(**bad)
    with pytest.raises(InvalidInput, match=r"verify: got \(2,\), want \(\) where the model takes no batch"):
        graphed(piecewise, lambda tokens: tokens, Buckets(decode=(1,), verify=(2,)))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
@pytest.mark.parametrize("mode", MODES)
def test_changing_batches(mode, kernel):
    pair = Pair(mode, BUCKETS, kernel=kernel)
    pair.agree("abc", [9, 6, 7])
    pair.agree("abc", 3)  # rectangular
    pair.agree("cb", [1, 3])  # a shorter one after a longer one, ragged
    pair.agree("abc", [2, 0, 3])  # a request without a draft
    pair.agree("abcd", [1, 5, 2, 4])  # the larger number of queries, with a prefill of few tokens
    pair.agree("d", 4)
    pair.agree("dcba")  # decode between
    pair.agree("ab", 3)
    buckets = {str(r.bucket): r.replays for r in pair.step.report().rows}
    assert buckets == {"mixed 32 tokens x4": 1, "verify 3 x4": 2, "verify 3 x2": 2, "verify 5 x4": 1, "verify 5 x1": 1, "decode x4": 1}
    assert pair.step.report().modes["verify"] == ("piecewise" if kernel else "whole")
    if mode is piecewise:
        assert pair.step.traces == {"mixed": 1, "verify 3": 1, "verify 5": 1, "decode": 1}
        assert set(pair.step.report().compiled) == {"mixed", "verify 3", "verify 5", "decode"}


@pytest.mark.parametrize("mode", ANY_MODE)
def test_the_problem_of_a_capture_is_that_of_eager(mode):
    """8 requests of 4 drafts: not 32 queries of a request, for which such a kernel would refuse."""
    pair = Pair(mode, Buckets(decode=(2, 8), verify=(4,)), kernel=few())
    _select.cache_clear()
    SEEN.clear()
    pair.step.capture(**pair.example("abcdefgh", 4))
    assert {p.sizes.queries for p in SEEN if p.sizes.queries.hi > 1} == {Extent.of(4)}
    wide = max((p for p in SEEN if p.sizes.queries.hi == 4), key=lambda p: p.sizes.batch.hint)
    assert (wide.sizes.batch.hint, wide.sizes.tokens.hint) == (8, 32)
    rows = {str(r.bucket): r.breaks for r in pair.step.report().rows}
    assert list(rows) == ["verify 4 x8", "decode x8", "verify 4 x2", "decode x2"]
    assert all({b.kernel for b in breaks} == {FEW} for breaks in rows.values())


@pytest.mark.parametrize("mode", ANY_MODE)
def test_an_eager_op_between_verify_graphs_is_asked_for_by_kind(mode):
    pair = Pair(mode, replace(BUCKETS, verify=(3,)), eager={"verify": ("paged_attention",)})
    pair.agree("ab", 3)
    pair.agree("ab")
    assert pair.step.report().modes == {"verify": "piecewise", "decode": "whole"}


@pytest.mark.parametrize("mode", ANY_MODE)
def test_idle_steps_write_nothing_and_disturb_nobody(mode):
    """Of a rank that has no token, or no request, while others have some."""
    pair = Pair(mode, BUCKETS)
    pair.agree("abc", [4, 3, 5])
    for requests in (3, 0):
        batch, _ = pair.batches("abc", 0)
        batch = PagedBatch(
            batch.page_table[:requests], batch.seq_lens[:requests], batch.cu_seqlens_q[: requests + 1], batch.slots, batch.positions, 0,
            holes=False,
        )  # fmt: skip
        before = [p.clone() for p in pools(pair.cache)]
        with torch.no_grad():
            got = pair.call(pair.step, pair.cache, torch.zeros(0, dtype=torch.long), batch)
        assert got.shape == (0, VOCAB)
        for a, b in zip(pools(pair.cache), before, strict=True):
            close(a.nan_to_num(7.0), b.nan_to_num(7.0))
        pair.agree("abc")
