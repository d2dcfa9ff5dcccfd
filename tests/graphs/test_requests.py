"""Models that take rows by request and no batch: which buckets serve them."""

import pytest
import torch

from attnops.core.errors import BatchTooLarge, InvalidInput
from attnops.graphs import Buckets, piecewise
from tests.graphs.helpers import both_modes, buckets_of, close, graphed
from tests.graphs.models import VOCAB

WEIGHT = torch.randn(VOCAB, 6)


def by_request(input_ids, position_ids, live):
    """As a decode step is asked for by generate: [B, 1], [B, 1], [B]."""
    return {
        "logits": WEIGHT[input_ids] * position_ids[..., None] * live[:, None, None],
        "all": live.sum(),
    }


def given(requests):
    return (
        torch.randint(VOCAB, (requests, 1)),
        torch.randint(9, (requests, 1)),
        torch.ones(requests, dtype=torch.int32),
    )


@both_modes
def test_a_row_for_every_request_is_a_decode_step(mode):
    step = graphed(
        mode,
        by_request,
        Buckets(decode=(1, 2, 4)),
        tokens=(),
        requests=("input_ids", "position_ids", "live"),
    )
    for requests in (3, 1, 4, 2, 3, 1):
        args = given(requests)
        close(step(*args), by_request(*args))  # padding rows are zeros
    assert buckets_of(step) == ["decode x4", "decode x1", "decode x2"]
    assert step.graphs.calls.count("begin") == 3 and step.report().modes == {"decode": "whole"}
    with pytest.raises(BatchTooLarge, match="decode batch: requests got 5, want at most 4"):
        step(*given(5))
    with pytest.raises(InvalidInput, match=r"live.shape\[0\]: got 3, want 2"):
        step(*given(2)[:2], given(3)[2])


@both_modes
def test_as_many_tokens_as_requests_are_a_decode_step_and_others_are_not(mode):
    def forward(tokens, owner, scales):
        return WEIGHT[tokens] * scales[owner][:, None]

    step = graphed(
        mode,
        forward,
        Buckets(decode=(2, 4), tokens=(8, 16)),
        tokens=("tokens", "owner"),
        requests=("scales",),
    )
    for owner in ([0, 1, 2], [0, 0, 0, 1, 1], [0, 1], [0] * 9, [0]):
        owner = torch.tensor(owner)
        args = torch.randint(VOCAB, owner.shape), owner, torch.randn(int(owner.max()) + 1)
        close(step(*args), forward(*args))
    assert buckets_of(step) == ["decode x4", "mixed 8 tokens x4", "decode x2", "mixed 16 tokens x4"]


def test_tokens_alone_stay_mixed():
    step = graphed(piecewise, lambda tokens: tokens * 2, Buckets(decode=(2,), tokens=(4,)))
    step(torch.ones(2))
    assert buckets_of(step) == ["mixed 4 tokens x2"]
