"""Layers over a cache of latents: the same graphs over another cache."""

import torch

from attnops.cache import LatentCache
from attnops.graphs import Buckets, piecewise
from attnops.nn import LatentAttention
from tests.graphs.helpers import any_mode, close, graphed


@any_mode
def test_latents(mode):
    model = LatentAttention(
        32, 4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ).eval()
    widths = {
        "latent_dim": 16,
        "rope_dim": 8,
        "max_requests": 4,
        "max_tokens_per_request": 32,
        "page_size": 4,
        "q_heads": 4,
    }
    mine, theirs = (
        LatentCache(1, 256, **widths, dtype=torch.float32, device="cpu") for _ in range(2)
    )
    for cache in (mine, theirs):
        cache.latent_pages[0][1:] = float("nan")
    buckets = Buckets(decode=(2, 4), tokens=(16,), requests=4, verify=(3,))
    step = graphed(mode, model, buckets, batch="batch", tokens=("hidden",), cache=mine)
    ids, twins = ([c.alloc() for _ in range(3)] for c in (mine, theirs))
    for requests, new in ((3, [4, 2, 5]), (3, 1), (2, 1), (2, [1, 3]), (1, 1), (3, 3), (2, [1, 4])):
        batch, twin = mine.batch(ids[-requests:], new), theirs.batch(twins[-requests:], new)
        hidden = torch.randn(batch.slots.shape[0], 32)
        with torch.no_grad():
            got = step(hidden, batch=batch, latent_pages=mine.latent_pages[0])
            # The first prefill may unfold the latents instead, which sums in another order.
            close(got, model(hidden, batch=twin, latent_pages=theirs.latent_pages[0]))
    if mode is piecewise:
        # These layers tell one token from several, so a bucket of one would be traced by itself.
        assert step.runner.traces == {"mixed": 1, "decode": 1, "verify 3": 1}
