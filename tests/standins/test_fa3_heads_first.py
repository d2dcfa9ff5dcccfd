"""What `fa3` makes of dense tensors whose heads come first, through the stand-in."""

import torch

from attnops.testing import Features, Source, make_call
from tests.standins.test_fa3 import NAME, Ops, fa3
from tests.standins.vendors import half

__all__ = ["NAME"]  # the vendor


@torch.no_grad()
def test_heads_first_is_the_raw_op_on_views(standin):
    """Of all keys and without sinks, for any number of keys; the same tensors with heads last give the same."""
    call = half(make_call("attention", Source(3), 2, 1, 9, Features(head_dim=64, causal=True))).with_(window_left=3)
    given = {n: call.arguments[n] for n in ("query", "key", "value")}
    for keys in (9, 7):
        last = {n: x if n == "query" else x[:, :keys] for n, x in given.items()}
        first = {n: x.transpose(1, 2).contiguous() for n, x in last.items()}
        with Ops() as seen:
            got = fa3("attention").run(call.with_(**{n: x.transpose(1, 2) for n, x in first.items()}).record)[0]
        assert seen.names == ["fwd"]
        assert {n: standin[-1][n[0]].data_ptr() for n in first} == {n: x.data_ptr() for n, x in first.items()}, "nothing is copied"
        assert torch.equal(got, fa3("attention").run(call.with_(**last).record)[0])
