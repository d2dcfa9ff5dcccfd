"""Rounds over tokens that may be taken back: each gives what the plain op gives of the tokens that
are left, and a state that holds no numbers stays with its request."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.ops.case_data import F32
from attnops.testing import Source, make_call
from tests.triton.process import interpreted

ROWS, SLOTS, DRAFTS = 4, 8, 4
OPS = {
    "gated_delta_rule": ((2, 4, 16, 24, {"normalize": True}), "key value decay beta", "query"),
    "mamba2_scan": ((2, 4, 16, 24, {"dt_softplus": True, "dt_bias": True}), "x dt b", "c"),
    "causal_conv1d": ((36, 4, {"activation": "silu", "bias": True}), "x", ""),
}


def tokens_of(call, names, rows):
    """The call of these tokens of each request."""
    starts = torch.tensor([0, *(len(each) for each in rows)]).cumsum(0).int()
    at = torch.cat(rows)
    given = {name: getattr(call, name)[at] for name in names}
    longest = max(len(each) for each in rows)
    output = torch.full_like(call.output[at], float("nan"))
    return changed(
        call, **given, output=output, cu_seqlens_q=starts, max_seqlen_q=longest, padded=False
    )


@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("op", OPS)
@interpreted
def test_rounds(op, kernel):
    """The last request has no tokens and no accepted ones, and the state of the third, which has
    nothing to read, holds no numbers."""
    row, kept, read = OPS[op]
    kept, count = kept.split(), 24
    whole = make_call(op, Source(3), (count,) * ROWS, *row, F32, padding=0, state=True).record
    plain, run = kernels_of(op)["reference"].run, kernels_of(op)[kernel].run
    names = [*kept, *([read] if read else [])]
    memory = {
        f"kept_{name}": torch.full((ROWS, SLOTS, *(x := getattr(whole, name)).shape[1:]), 3.0).to(x)
        for name in kept
    }
    state = whole.state.clone()
    state[2:] = float("nan")
    right = state.clone()
    numbers = torch.Generator().manual_seed(5)
    at, accepted = [0] * ROWS, torch.zeros(ROWS, 2, dtype=torch.int32)
    while max(at[:2]) + DRAFTS <= count:
        tokens = [b * count + at[b] + torch.arange(DRAFTS) for b in range(3)] + [torch.arange(0)]
        # The third request begins anew in each round, and no token of it is ever accepted.
        got = changed(tokens_of(whole, names, tokens), state=state, accepted=accepted, **memory)
        run(got)
        want = changed(tokens_of(whole, names, tokens), state=right.clone())
        plain(want)
        mine = slice(0, 2 * DRAFTS)
        torch.testing.assert_close(got.output[mine], want.output[mine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[:2], right[:2], rtol=1e-5, atol=1e-5)
        assert state[2:].isnan().all()
        taken = torch.randint(0, DRAFTS + 1, (2,), generator=numbers).tolist()
        accepted = torch.zeros(ROWS, 2, dtype=torch.int32)
        left = [tokens[b][:n] for b, n in enumerate(taken)] + [torch.arange(0)] * 2
        plain(changed(tokens_of(whole, names, left), state=right))
        for b, n in enumerate(taken):
            accepted[b] = torch.tensor([at[b] % SLOTS, n])
            at[b] += n
    assert min(at[:2]) > DRAFTS
