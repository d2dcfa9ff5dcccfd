"""What `fa3` makes of dense tensors whose heads come first, through the stand-in."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnops.testing import Features, Source, builders
from tests.standins.test_fa3 import fa3, half, standin

__all__ = ["standin"]  # the fixture


@torch.no_grad()
def test_heads_first_is_the_raw_op_on_views(standin):
    """Of all keys and without sinks, for any number of keys; with what else there may be, the call is made as any other."""
    call = half(builders.dense(Source(3), 2, 1, 9, Features(head_dim=64, causal=True)))
    given = [call.arguments[n] for n in ("query", "key", "value")]
    asked = {"scale": 0.125, "causal": True, "window_left": 3}
    run = fa3("attention").heads_first(*given, **asked)
    for keys in (9, 7):
        q, *kv = (x if x.shape[1] == 1 else x[:, :keys] for x in given)
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                seen.append(str(func))
                return func(*args, **kwargs or {})

        with Watch():
            got = run(*(x.transpose(1, 2) for x in (q, *kv)), None, None, None, None)
        before_fwd = seen[3 : seen.index("sgl_kernel.fwd.default")]
        assert before_fwd == ["aten.transpose.int"] * 3 and seen[-1] == "sgl_kernel.fwd.default"
        assert torch.equal(got, fa3("attention").run(q, *kv, **asked)[0])
    ends = torch.full((2,), 9, dtype=torch.int32)
    assert fa3("attention").heads_first(*given, **asked, softcap=2.0) is not None
    longer = (torch.cat([given[0]] * 50, 1), *given[1:])
    for query, taken in ((given, False), (longer, True)):
        assert (fa3("attention").heads_first(*query, **asked, policy="deterministic") is not None) == taken
    others = {"return_lse": True, "q_scale": torch.ones(1)}
    assert all(fa3("attention").heads_first(*given, **asked, **{n: x}) is None for n, x in others.items())
    assert fa3("attention").heads_first(*given, None, None, None, None, None, ends, **asked) is None
    assert fa3("attention").heads_first(*given, None, torch.zeros(4), **asked) is None
    assert fa3("attention").heads_first(given[0], given[1][:, :0], given[2][:, :0], **asked) is None
