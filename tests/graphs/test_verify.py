"""Verify steps: a few tokens of every request, as many as are drafted. Kernels see how many, at
capture as in eager."""

from dataclasses import replace

import pytest
import torch

from attnops.cache import PagedBatch
from attnops.core.errors import InvalidInput
from attnops.core.kernel import Capture, extent_at_most, kernels_of, register, renew
from attnops.core.problem import Extent, Problem
from attnops.graphs import Buckets, breakable, piecewise
from tests.graphs.helpers import Pair, any_mode, graphed
from tests.graphs.models import VOCAB

FEW = "few_queries"
SEEN: list[Problem] = []


def few():
    """A kernel of at most 8 queries of a request, as those are that take tokens one by one. SEEN:
    the Problems it was asked about."""
    if FEW not in kernels_of("paged_attention"):
        needs = (lambda p: SEEN.append(p), extent_at_most("queries", 8))
        kernel = replace(
            kernels_of("paged_attention")["reference"], name=FEW, needs=needs, cost_us=lambda p: 1e9
        )
        register(replace(kernel, capture=Capture.NEVER))
    return FEW


@any_mode
def test_the_problem_of_a_capture_is_that_of_eager(mode):
    """8 requests of 4 drafts: not 32 queries of a request, for which such a kernel would refuse."""
    pair = Pair(mode, Buckets(decode=(2, 8), verify=(4,)), kernel=few())
    renew()
    SEEN.clear()
    pair.step.capture(**pair.example("abcdefgh", 4))
    assert {p.sizes.queries for p in SEEN if p.sizes.queries.hi > 1} == {Extent.of(4)}
    wide = max((p for p in SEEN if p.sizes.queries.hi == 4), key=lambda p: p.sizes.batch.hint)
    assert (wide.sizes.batch.hint, wide.sizes.tokens.hint) == (8, 32)
    rows = {str(r.bucket): r.breaks for r in pair.step.report().rows}
    assert list(rows) == ["verify 4 x8", "decode x8", "verify 4 x2", "decode x2"]
    assert all({b.kernel for b in breaks} == {FEW} for breaks in rows.values())


@any_mode
def test_idle_steps_write_nothing_and_disturb_nobody(mode):
    """Of a rank that has no token, or no request, while others have some."""
    pair = Pair(mode)
    pair.agree("abc", [4, 3, 5])
    for requests in (3, 0):
        b, _ = pair.batches("abc", 0)
        batch = PagedBatch(
            b.page_table[:requests],
            b.seq_lens[:requests],
            b.cu_seqlens_q[: requests + 1],
            b.slots,
            b.positions,
            0,
            holes=False,
        )
        with pair.untouched():
            assert pair.give(batch).shape == (0, VOCAB)
        pair.agree("abc")


def test_they_need_a_batch():
    with pytest.raises(
        InvalidInput, match=r"verify: got \(2,\), want \(\) where the model takes no batch"
    ):
        graphed(piecewise, lambda tokens: tokens, Buckets(decode=(1,), verify=(2,)))


def test_without_a_batch_each_request_has_as_many_tokens():
    step = graphed(
        breakable,
        lambda tokens, lengths: tokens + 1,
        Buckets(decode=(1, 3), verify=(2,), over="eager"),
        tokens=("tokens",),
        requests=("lengths",),
    )
    for tokens, kind in ((6, "verify"), (3, "decode"), (7, "mixed"), (9, "mixed")):
        given = {"tokens": torch.arange(tokens), "lengths": torch.zeros(3, dtype=torch.int64)}
        assert step.sizes(given)[:3] == (kind, tokens, 3)
        assert torch.equal(step(**given), given["tokens"] + 1)
