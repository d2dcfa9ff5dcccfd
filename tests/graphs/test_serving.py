"""The loop of examples/serve.py over graphs: requests join a running batch, leave it, and have the tokens that they have alone."""

import runpy

import pytest
import torch

from attnops.cache import PagedCache
from attnops.graphs import Buckets
from tests.graphs.helpers import ANY_MODE, graphed
from tests.helpers import ROOT

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "serve.py"))


def pages():
    return PagedCache(2, 12, 4, num_kv_heads=2, head_dim=16, max_requests=4, max_pages_per_request=8, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("mode", ANY_MODE)
def test_requests_join_and_leave(mode):
    model, cache, steps = EXAMPLE["Decoder"]().requires_grad_(False), pages(), []
    step = graphed(mode, model, Buckets(decode=(2, 4), tokens=(64,), requests=4), batch="batch", cache=cache)

    def spied(tokens, batch, **given):
        steps.append(batch.cu_seqlens_q.diff().tolist())
        return step(tokens, batch=batch, **given)

    asked = [(torch.randint(100, (n,)).tolist(), new) for n, new in ((5, 12), (11, 4), (3, 14), (9, 8), (1, 16), (14, 3))]
    got = EXAMPLE["serve"](spied, cache, asked)
    assert got == [EXAMPLE["serve"](model, pages(), [request])[0] for request in asked]
    assert [len(tokens) for tokens in got] == [new for _, new in asked] and cache.used_pages == 0
    # Prompts come beside single tokens of those that run, and more requests are served than the cache has room for.
    assert any(1 in counts and max(counts) > 1 for counts in steps)
    assert len(steps) < sum(new for _, new in asked) and 1 < max(map(len, steps)) < len(asked)
