"""The cache of latents: what a step says of the tokens before it, and that what it says is what the
tables say."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils import _pytree as pytree

from attnops.cache import LatentCache
from attnops.core.errors import RequestTooLong
from tests.modules import poisoned

DC, DR = 6, 2


def make(num_tokens=60, page_size=4, max_requests=6, max_tokens_per_request=40, num_layers=2):
    sizes = {
        "max_requests": max_requests,
        "max_tokens_per_request": max_tokens_per_request,
        "page_size": page_size,
    }
    return poisoned(
        LatentCache(
            num_layers,
            num_tokens,
            latent_dim=DC,
            rope_dim=DR,
            **sizes,
            dtype=torch.float32,
            device="cpu",
        )
    )


def write(cache, slots, tokens):
    """Token t's latent is t in every number, t + 0.5 in layer 1."""
    for layer, pages in enumerate(cache.latent_pages):
        pages.view(-1, DC + DR)[slots] = (
            torch.tensor(tokens, dtype=pages.dtype)[:, None] + layer / 2
        )


def read(cache, slots):
    found = [
        pages.view(-1, DC + DR)[slots] - layer / 2 for layer, pages in enumerate(cache.latent_pages)
    ]
    assert all(torch.equal(x, found[0]) for x in found) and (found[0] == found[0][:, :1]).all()
    return found[0][:, 0].tolist()


def through(cache, table, length):
    """The tokens that a kernel finds through a row of a page table."""
    pages = table[: -(-length // cache.page_size)].long()
    return read(
        cache, (pages[:, None] * cache.page_size + torch.arange(cache.page_size)).flatten()[:length]
    )


# What a step says of the tokens before it ---------------------------------------------------------


@st.composite
def steps(draw):
    """A cache full of NaN but for its requests' tokens, a step of some of them, and what each held
    before."""
    cache = make(
        page_size=draw(st.sampled_from((1, 3, 4))), num_layers=draw(st.sampled_from((1, 2)))
    )
    held = {}
    for _ in range(draw(st.integers(1, 5))):
        if held and draw(st.booleans()):
            parent = draw(st.sampled_from(sorted(held)))
            child = cache.fork(parent)
            held[child] = held[parent][: draw(st.integers(0, len(held[parent])))]
            cache.truncate(child, len(held[child]))
        else:
            held[child := cache.alloc()] = []
        more = list(range(100 * child, 100 * child + draw(st.integers(0, 9))))
        start = cache.length(child)
        cache.extend(child, len(more))
        write(cache, cache.slots(child, start), more)
        held[child] += more
    chosen = draw(st.lists(st.sampled_from(sorted(held)), min_size=1, unique=True))
    counts = [draw(st.integers(0, 5)) for _ in chosen]
    most, share = draw(st.sampled_from((None, 1, 2, 7, 20, 1000))), draw(st.booleans())
    return (
        cache,
        cache.batch(chosen, counts, prefix_tokens=most, share=share),
        [held[r] for r in chosen],
        counts,
        most,
        share,
    )


@pytest.mark.parametrize("examples", [80, pytest.param(250, marks=pytest.mark.full)])
def test_prefix_and_shared_are_what_the_tables_say(examples):
    given(steps())(
        settings(max_examples=examples, deadline=None)(_prefix_and_shared_are_what_the_tables_say)
    )()


def _prefix_and_shared_are_what_the_tables_say(step):
    cache, batch, before, counts, most, share = step
    total = sum(map(len, before))
    # Forks whose page was copied hold NaN past their own tokens, as do the new tokens' slots:
    # nobody wrote them yet.
    for row, tokens in enumerate(before):
        assert through(cache, batch.page_table[row], len(tokens)) == tokens
    if most is None:
        assert batch.prefix is None if total else batch.prefix == ()
    else:
        chunks = batch.prefix
        found = [[] for _ in before]
        for chunk in chunks:
            assert (
                chunk.slots.dtype == torch.int64
                and chunk.cu_seqlens_k.dtype == torch.int32
                and type(chunk.max_seqlen_k) is int
            )
            starts, tokens = chunk.cu_seqlens_k.tolist(), read(cache, chunk.slots)
            assert (
                len(starts) == len(before) + 1
                and starts[0] == 0
                and starts == sorted(starts)
                and starts[-1] == len(tokens)
            )
            assert 0 < len(tokens) <= most and chunk.max_seqlen_k == max(
                b - a for a, b in pairwise(starts)
            )
            for b, tail in enumerate(found):
                tail += tokens[starts[b] : starts[b + 1]]
        assert found == before, "every token once, in order"
        assert len(chunks) == -(-total // most), "no more chunks than the bound asks for"
        assert len({c.slots.shape[0] for c in chunks[:-1]}) <= 1 and all(
            c.slots.storage_offset() == 0 for c in chunks
        )
    shared = batch.shared
    leading = min((len(t) // cache.page_size for t in before), default=0)
    same = 0
    while same < leading and len(set(batch.page_table[:, same].tolist())) == 1:
        same += 1
    assert (shared is not None) == (share and len(before) > 1 and same > 0)
    if shared is None:
        return
    assert shared.seq_lens.tolist() == [
        same * cache.page_size
    ] and shared.cu_seqlens_q.tolist() == [0, sum(counts)]
    assert (
        shared.page_table.shape == (1, batch.page_table.shape[1])
        and shared.rest_table.shape == batch.page_table.shape
    )
    assert {t.dtype for t in pytree.tree_leaves(shared)} == {torch.int32}
    assert not shared.page_table[0, same:].any()
    common = through(cache, shared.page_table[0], same * cache.page_size)
    for row, (tokens, new) in enumerate(zip(before, counts, strict=True)):
        rest = int(shared.rest_lens[row])
        assert common + through(cache, shared.rest_table[row], rest - new) == tokens
        assert same * cache.page_size + rest == int(batch.seq_lens[row])
        used = -(-rest // cache.page_size)
        assert torch.equal(shared.rest_table[row, :used], batch.page_table[row, same : same + used])
        assert not shared.rest_table[row, used:].any()


WIDTHS = [(1, 130, 256), (64, 1, 2), (64, 128, 2), (128, 129, 2), (256, 300, 2), (48, 100, 3)]


@pytest.mark.parametrize(("page_size", "most", "width"), WIDTHS)
def test_the_table_holds_whole_tiles(page_size, most, width):
    cache = make(1000, page_size, 2, most)
    assert cache.page_table.shape == (2, width)
    request = cache.alloc(most)
    with pytest.raises(RequestTooLong, match=f"want at most {most} \\(max_tokens_per_request\\)"):
        cache.extend(request, 1)
    assert cache.length(request) == most
