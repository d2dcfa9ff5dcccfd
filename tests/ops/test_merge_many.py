"""A merge of many parts is merges of two."""

import torch
from hypothesis import given, settings, strategies as st

from attnops.ops import OPS
from attnops.testing import Source, make_call


@given(st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=30)
def test_many_at_once_are_two_at_a_time(parts, seed):
    call = make_call("merge_states", Source(seed), (3, parts, 2, 4), torch.float64, empty=0.4)
    outputs, lses = call.arguments["outputs"], call.arguments["lses"]
    merged = outputs[:, 0], lses[:, 0]
    for n in range(1, parts):
        two = OPS["merge_state"]
        merged = two.reference(two.call(*merged, outputs[:, n], lses[:, n]))
    got = OPS["merge_states"].reference(call.record)
    blind = (lses == -float("inf")).all(1)
    torch.testing.assert_close(got[0], merged[0].masked_fill(blind[..., None], 0.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], merged[1], rtol=1e-6, atol=1e-6)
