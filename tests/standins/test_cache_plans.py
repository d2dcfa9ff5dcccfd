"""A cache of latents brings the device plan of the kernel that will answer, once a step: in its batches, and inside graphs.

Over stand-ins for FlashMLA: not the kernels.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnops.cache import LatentCache, Planner
from attnops.core.problem import Target, pretend
from attnops.core.select import use
from attnops.graphs import Buckets, breakable, piecewise
from attnops.nn import LatentAttention
from attnops.ops import latent_layers, mla_attention
from tests.graphs.standin import StandIn
from tests.standins.vendors import VENDORS

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, SCALE = 16, 192**-0.5
SM90 = Target("cuda", 90, assume=("sgl_kernel",))


@pytest.fixture(autouse=True)
def record():
    """What the stand-ins were called for since, by name. fa3 has none here."""
    with VENDORS["flashmla"].running() as calls, torch.no_grad(), use(deny=("fa3",)):
        yield lambda: Counter(calls)


def cache(dtype=BF16, layers=1, **more):
    given = {"max_requests": 4, "max_tokens_per_request": 200, "page_size": 64, "q_heads": HEADS}
    made = LatentCache(layers, 1000, **{**given, **more}, dtype=dtype, device="cpu")
    for pages in made.latent_pages:
        pages.copy_((torch.randn(pages.shape) * 0.3).to(dtype))
        pages[0] = 0
    return made


class Layers(nn.Module):
    """Three calls of attention a step."""

    def forward(self, q_nope, q_pe, batch, pages, scale=None):
        for _ in range(3):
            out = mla_attention(
                q_nope, q_pe, pages, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q, scale=SCALE,
                plan=batch.plan, holes=batch.holes, q_scale=scale, kv_scale=scale,
            )  # fmt: skip
        return out


def query(batch, dtype=BF16):
    return [torch.randn(batch.slots.shape[0], HEADS, n).to(dtype) for n in (512, 64)]


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_every_step_has_one_schedule_however_many_layers(record, dtype):
    mine = cache(dtype)
    ids, scale = [mine.alloc(n) for n in (70, 3, 130)], torch.ones(1) if dtype is E4M3 else None
    run, made = ("dense_decode_fwd", "get_mla_decoding_metadata") if scale is None else (
        "fwd_kvcache_mla_fp8", "get_mla_decoding_metadata_dense_fp8"
    )  # fmt: skip
    for step, new in enumerate((1, 1, [4, 1, 2], 1), 1):
        batch = mine.batch(ids, new)
        q = query(batch, dtype)
        got = Layers()(*q, batch, mine.latent_pages[0], scale)
        assert record() == {run: 3 * step, made: step}
        with use(kernel="reference"):
            want = Layers()(*q, replace(batch, plan=None), mine.latent_pages[0], scale)
        near = 0.1 if dtype is E4M3 else 2e-2
        torch.testing.assert_close(got.float(), want.float(), rtol=near, atol=near)


def test_which_batches_bring_one():
    mine = cache()
    ids = [mine.alloc(100)]
    ids += [mine.fork(ids[0]), mine.alloc(3)]
    planner = Planner(latent_layers(HEADS, 64, BF16), max_tokens=64, max_requests=4, max_pages=4, device="cpu")
    batch = mine.batch(ids)
    assert torch.equal(batch.plan, planner(replace(batch, plan=None)).plan)
    assert mine.batch(ids, [8, 1, 0]).plan is not None
    assert mine.batch(ids, [9, 1, 1]).plan is None, "FlashMLA takes 8 tokens of a request"
    assert mine.batch(ids, 0).plan is None
    assert mine.batch(ids, 1, prefix_tokens=64).plan is None, "its latents may be unfolded"
    assert mine.batch(ids[:2], 1, share=True).plan is None, "its parts have tables of their own"
    with use(kernel="reference"):
        assert mine.batch(ids).plan is None
    with use(deterministic=True):
        assert mine.batch(ids).plan is None
    with pretend(None):
        assert mine.batch(ids).plan is None, "on this machine"
    for other in (cache(q_heads=None), cache(page_size=16)):
        assert other.batch([other.alloc(3)]).plan is None
        assert other.batch(other.requests).plan is None


def test_a_layer_needs_no_planner(record):
    layer = LatentAttention(32, HEADS, dtype=BF16).eval()
    mine = cache()
    ids = [mine.alloc(), mine.alloc()]
    for new in ([5, 70], 1, [3, 1]):
        batch = mine.batch(ids, new)
        layer(torch.randn(batch.slots.shape[0], 32).to(BF16), batch=batch, latent_pages=mine.latent_pages[0])
    assert record() == {"dense_decode_fwd": 2, "get_mla_decoding_metadata": 2}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", [piecewise, breakable])
def test_graphs_make_it_once_a_step_of_the_lengths_at_hand(mode, record):
    mine = cache()
    more = {"inner": "eager"} if mode is piecewise else {}
    device = StandIn()
    buckets = Buckets(decode=(2, 4), tokens=(64,), verify=(3,))
    step = mode(Layers(), buckets, tokens=("q_nope", "q_pe"), cache=mine, graphs=device, **more)
    ids = [mine.alloc(n) for n in (70, 3, 130, 20)]
    pages = mine.latent_pages[0]
    for who, new in ((4, 1), (3, 1), (4, 3), (4, [1, 3, 0, 2]), (2, 1), (4, 1), (1, 20)):
        batch = mine.batch(ids[:who], new)
        q = query(batch)
        with use(kernel="reference"):
            want = Layers()(*q, replace(batch, plan=None), pages)
        torch.testing.assert_close(step(*q, batch=batch, pages=pages), want, rtol=2e-2, atol=2e-2)
    rows = {str(r.bucket): r for r in step.report().rows}
    assert set(rows) == {"decode x4", "verify 3 x4", "decode x2", "mixed 64 tokens x4"}
    names = {str(e.bucket): Counter(n for g in e.recorded.graphs for n, _ in g.log) for e in step._entries.values()}
    for bucket, ops in names.items():
        schedules = sum(n for name, n in ops.items() if "decode_rows" in name and "__" not in name)
        assert schedules == (0 if bucket.startswith("mixed") else 1), (bucket, ops)
    assert not any(r.breaks for r in rows.values())


def test_a_prepare_of_the_callers_own_is_the_plan(record):
    mine, seen = cache(), []

    def prepare(batch):
        seen.append(batch.plan)
        return batch

    step = breakable(Layers(), Buckets(decode=(2,)), tokens=("q_nope", "q_pe"), cache=mine, prepare=prepare, graphs=StandIn())
    batch = mine.batch([mine.alloc(3), mine.alloc(4)])
    step(*query(batch), batch=batch, pages=mine.latent_pages[0])
    assert seen and seen[0] is None and record()["get_mla_decoding_metadata"] == 1, "the batch's own"


def test_compiled_steps_of_any_size_read_it(record):
    mine = cache()
    ids = [mine.alloc(n) for n in (70, 3, 130, 20)]
    compiled = torch.compile(Layers(), fullgraph=True)
    for step, count in enumerate((2, 3, 4, 3), 1):
        batch = mine.batch(ids[:count])
        q = query(batch)
        with use(kernel="reference"):
            want = Layers()(*q, replace(batch, plan=None), mine.latent_pages[0])
        torch.testing.assert_close(compiled(*q, batch, mine.latent_pages[0]), want, rtol=2e-2, atol=2e-2)
        # The results of all layers but the last are not used, so that the compiler drops them.
        assert record() == {"dense_decode_fwd": step, "get_mla_decoding_metadata": step}
