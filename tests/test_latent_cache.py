"""The cache of latents: what a step says of the tokens before it, and that what it says is what the tables say."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils import _pytree as pytree

from attnops.cache import LatentCache
from attnops.core.errors import InvalidInput, OutOfPages, RequestTooLong, TooManyRequests, UnknownRequest
from attnops.ops import merge_state, mla_attention, write_latent

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DC, DR = 6, 2


def make(num_tokens=60, page_size=4, max_requests=6, max_tokens_per_request=40, num_layers=2, dtype=F32, **more):
    return LatentCache(
        num_layers, num_tokens, latent_dim=DC, rope_dim=DR, max_requests=max_requests, max_tokens_per_request=max_tokens_per_request,
        page_size=page_size, dtype=dtype, device="cpu", **more,
    )  # fmt: skip


def write(cache, slots, tokens):
    """Token t's latent is t in every number, t + 0.5 in layer 1."""
    for layer, pages in enumerate(cache.latent_pages):
        pages.view(-1, DC + DR)[slots] = torch.tensor(tokens, dtype=pages.dtype)[:, None] + layer / 2


def read(cache, slots):
    found = [pages.view(-1, DC + DR)[slots] - layer / 2 for layer, pages in enumerate(cache.latent_pages)]
    assert all(torch.equal(x, found[0]) for x in found) and (found[0] == found[0][:, :1]).all()
    return found[0][:, 0].tolist()


def through(cache, table, length):
    """The tokens that a kernel finds through a row of a page table."""
    pages = table[: -(-length // cache.page_size)].long()
    return read(cache, (pages[:, None] * cache.page_size + torch.arange(cache.page_size)).flatten()[:length])


# What a step says of the tokens before it -------------------------------------------------------------------------------


@st.composite
def steps(draw):
    """A cache full of NaN but for its requests' tokens, a step of some of them, and what each held before."""
    cache = make(page_size=draw(st.sampled_from((1, 3, 4))), num_layers=draw(st.sampled_from((1, 2))))
    for pages in cache.latent_pages:
        pages.fill_(float("nan"))
    held: dict[int, list[int]] = {}
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
    return cache, cache.batch(chosen, counts, prefix_tokens=most, share=share), [held[r] for r in chosen], counts, most, share


@pytest.mark.parametrize("examples", [80, pytest.param(250, marks=pytest.mark.full)])
def test_prefix_and_shared_are_what_the_tables_say(examples):
    given(steps())(settings(max_examples=examples, deadline=None)(_prefix_and_shared_are_what_the_tables_say))()


def _prefix_and_shared_are_what_the_tables_say(step):
    cache, batch, before, counts, most, share = step
    total = sum(map(len, before))
    # Forks whose page was copied hold NaN past their own tokens, as do the new tokens' slots: nobody wrote them yet.
    for row, tokens in enumerate(before):
        assert through(cache, batch.page_table[row], len(tokens)) == tokens
    if most is None:
        assert batch.prefix is None if total else batch.prefix == ()
    else:
        chunks = batch.prefix
        found: list[list[float]] = [[] for _ in before]
        for chunk in chunks:
            assert chunk.slots.dtype == torch.int64 and chunk.cu_seqlens_k.dtype == torch.int32 and type(chunk.max_seqlen_k) is int
            starts, tokens = chunk.cu_seqlens_k.tolist(), read(cache, chunk.slots)
            assert len(starts) == len(before) + 1 and starts[0] == 0 and starts == sorted(starts) and starts[-1] == len(tokens)
            assert 0 < len(tokens) <= most and chunk.max_seqlen_k == max(b - a for a, b in pairwise(starts))
            for b, tail in enumerate(found):
                tail += tokens[starts[b] : starts[b + 1]]
        assert found == before, "every token once, in order"
        assert len(chunks) == -(-total // most), "no more chunks than the bound asks for"
        assert len({c.slots.shape[0] for c in chunks[:-1]}) <= 1 and all(c.slots.storage_offset() == 0 for c in chunks)
    shared = batch.shared
    leading = min((len(t) // cache.page_size for t in before), default=0)
    same = 0
    while same < leading and len(set(batch.page_table[:, same].tolist())) == 1:
        same += 1
    assert (shared is not None) == (share and len(before) > 1 and same > 0)
    if shared is None:
        return
    assert shared.seq_lens.tolist() == [same * cache.page_size] and shared.cu_seqlens_q.tolist() == [0, sum(counts)]
    assert shared.page_table.shape == (1, batch.page_table.shape[1]) and shared.rest_table.shape == batch.page_table.shape
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


def test_shared_is_found_where_there_is_something_to_share():
    cache = make()
    a = cache.alloc(10)
    b, c = cache.fork(a), cache.alloc(3)
    found = cache.batch([a, b], [1, 2], share=True).shared
    assert found is not None and found.seq_lens.tolist() == [8], "two whole pages; the third was shared and is written to"
    assert cache.batch([a, b], 1).shared is None, "nobody asked"
    assert cache.batch([a], 1, share=True).shared is None, "one request shares with nobody"
    assert cache.batch([a, b, c], 1, share=True).shared is None
    cache.truncate(b, 3)
    assert cache.batch([a, b], 1, share=True).shared is None, "no page that is whole in both"


def test_nothing_before_is_known_without_asking():
    cache = make()
    a, b = cache.alloc(), cache.alloc()
    assert cache.batch([a, b], [3, 0]).prefix == ()
    assert cache.batch([a, b], [1, 4]).prefix is None, "a had tokens"
    assert cache.batch([b], 1).prefix is None
    assert cache.batch([cache.alloc()], 2, prefix_tokens=1).prefix == ()


def test_a_cascade_gives_what_the_tables_give():
    cache = make(num_tokens=100, num_layers=1, dtype=torch.float64)
    a = cache.alloc(11)
    others = [cache.fork(a), cache.fork(a)]
    batch = cache.batch([a, *others], [1, 3, 2], share=True)
    (pages,) = cache.latent_pages
    pages.normal_()
    q_nope, q_pe = torch.randn(6, 3, DC, dtype=torch.float64), torch.randn(6, 3, DR, dtype=torch.float64)

    def attend(*tables, causal, most):
        lse = torch.empty(6, 3)
        out = mla_attention(q_nope, q_pe, pages, *tables, max_seqlen_q=most, scale=0.3, causal=causal, lse=lse)
        return out, lse

    want, want_lse = attend(batch.page_table, batch.seq_lens, batch.cu_seqlens_q, causal=True, most=3)
    s = batch.shared
    parts = (
        *attend(s.page_table, s.seq_lens, s.cu_seqlens_q, causal=False, most=6),
        *attend(s.rest_table, s.rest_lens, batch.cu_seqlens_q, causal=True, most=3),
    )
    got, lse = merge_state(*parts)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, want_lse)


def test_steps_of_as_many_chunks_are_compiled_once():
    cache = make(num_tokens=400, max_tokens_per_request=200, num_layers=1)
    a, b = cache.alloc(20), cache.alloc(9)
    backend = EagerAndRecordGraphs()

    def model(pages, batch):
        return [pages.flatten(0, 1)[c.slots].sum() + c.cu_seqlens_k[-1] + c.max_seqlen_k for c in batch.prefix]

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    seen = []
    for new in (5, 7, 9, 3, 12):
        batch = cache.batch([a, b], new, prefix_tokens=sum(map(cache.length, (a, b))) // 3 + 1)
        assert len(batch.prefix) == 3
        assert compiled(cache.latent_pages[0], batch) == model(cache.latent_pages[0], batch)
        seen.append(len(backend.graphs))
    assert seen[1:] == [seen[1]] * 4 and seen[1] <= 2


@pytest.mark.parametrize("call", ["prefix_chunks", "shared_prefix"])
def test_a_failing_description_leaves_the_cache_as_it_was(monkeypatch, call):
    cache = make()
    a = cache.alloc(9)
    b = cache.fork(a)
    before = [t.clone() for t in (cache.page_table, cache.seq_lens)], cache.used_pages, cache.length(a)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(f"attnops.cache.latent.{call}", fail)
    with pytest.raises(MemoryError):
        cache.batch([a, b], [3, 5], prefix_tokens=4, share=True)
    after = [cache.page_table, cache.seq_lens], cache.used_pages, cache.length(a)
    assert all(map(torch.equal, before[0], after[0])) and before[1:] == after[1:]


# As PagedCache ----------------------------------------------------------------------------------------------------------


def test_shapes():
    cache = LatentCache(3, 1000, max_requests=7, max_tokens_per_request=300, page_size=32, dtype=BF16, device="cpu")
    assert [tuple(t.shape) for t in cache.latent_pages] == [(33, 32, 576)] * 3, "32 pages of 32 hold 1000 tokens; page 0 is the null page"
    assert all(t.dtype == BF16 and not t.any() for t in cache.latent_pages)
    assert cache.page_table.shape == (7, 12) and cache.seq_lens.shape == (7,)
    assert (cache.free_pages, cache.used_pages, cache.num_pages, cache.page_size, cache.requests) == (32, 0, 33, 32, ())
    assert cache.workspace is None and make(workspace_bytes=16).workspace.shape == (16,)


WIDTHS = [(1, 130, 256), (64, 1, 2), (64, 128, 2), (128, 129, 2), (256, 300, 2), (48, 100, 3)]


@pytest.mark.parametrize(("page_size", "most", "width"), WIDTHS)
def test_the_table_holds_whole_tiles(page_size, most, width):
    cache = make(1000, page_size, 2, most)
    assert cache.page_table.shape == (2, width)
    request = cache.alloc(most)
    with pytest.raises(RequestTooLong, match=f"want at most {most} \\(max_tokens_per_request\\)"):
        cache.extend(request, 1)
    assert cache.length(request) == most


def test_a_fork_shares_until_one_writes():
    for dtype in (F32, BF16, E4M3, torch.int8):
        cache = make(dtype=dtype)
        a = cache.alloc(6)
        for pages in cache.latent_pages:
            pages.view(torch.uint8 if dtype.itemsize == 1 else dtype)[1:3] = 7
        b = cache.fork(a)
        step = cache.batch([a, b], 1)
        assert cache.used_pages == 3 and step.page_table[:, 0].tolist() == [1, 1]
        other = int(step.page_table[0, 1])
        assert other != int(step.page_table[1, 1])
        assert all(torch.equal(pages[other, :2].float(), pages[2, :2].float()) and pages[other, :2].any() for pages in cache.latent_pages)
        cache.truncate(b, 2)
        cache.free(a)
        assert cache.used_pages == 1
        cache.reset()
        assert cache.used_pages == 0 and not cache.page_table.any()
        with pytest.raises(UnknownRequest):
            cache.length(b)


@pytest.mark.parametrize("dtype", [F32, E4M3])
def test_what_write_latent_writes_is_where_the_tables_point(dtype):
    cache = make(dtype=dtype)
    a, b = cache.alloc(3), cache.alloc()
    step = cache.batch([a, b], [2, 5])
    scale = torch.ones(1) if dtype == E4M3 else None
    new = torch.arange(1.0, 8)[:, None]
    write_latent(new.expand(7, DC).contiguous(), new.expand(7, DR).contiguous(), cache.latent_pages[0], step.slots, kv_scale=scale)
    for row, want in ((0, [0, 0, 0, 1, 2]), (1, [3, 4, 5, 6, 7])):
        pages = cache.latent_pages[0][step.page_table[row].long()].float().flatten(0, 1)
        assert pages[: int(step.seq_lens[row]), 0].tolist() == want
    assert not cache.latent_pages[0][0].any(), "the null page"


def test_made_and_used_in_any_mode():
    with torch.inference_mode():
        cache = make()
        a = cache.alloc(9)
        step = cache.batch([a, cache.fork(a)], 2, prefix_tokens=4, share=True)
    leaves = [x for x in pytree.tree_leaves(step) if isinstance(x, torch.Tensor)]
    assert len(leaves) == 5 + 2 * len(step.prefix) + 5
    assert not any(t.is_inference() for t in (*cache.latent_pages, cache.page_table, *leaves))


def test_errors_of_the_ledger():
    cache = make(num_tokens=16, max_requests=2)
    a = cache.alloc(12)
    with pytest.raises(OutOfPages) as caught:
        cache.alloc(5)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (2, 1, 4)
    cache.fork(a)
    with pytest.raises(TooManyRequests):
        cache.alloc()


GOOD = {"num_layers": 1, "num_tokens": 8, "max_requests": 2, "max_tokens_per_request": 4, "dtype": F32, "device": "cpu"}


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        ("num_layers", 0, ">= 1"),
        ("num_tokens", 0, ">= 1 (tokens)"),
        ("latent_dim", 0, ">= 1"),
        ("rope_dim", 0, ">= 1"),
        ("max_requests", 0, ">= 1"),
        ("max_tokens_per_request", 0, ">= 1 (tokens)"),
        ("page_size", 0, ">= 1 (tokens)"),
        ("page_size", 2.5, ">= 1 (tokens)"),
        ("q_heads", 0, ">= 1"),
        ("max_new_tokens", 0, ">= 1 (tokens)"),
        ("workspace_bytes", -1, ">= 0"),
        ("dtype", torch.float8_e5m2, "float8_e4m3fn"),
        ("dtype", torch.int64, "bfloat16"),
        ("kernels", (), "at least one name"),
        ("kernels", "flashmla", "at least one name"),
        ("kernels", (1,), "at least one name"),
    ],
    ids=str,
)
def test_bad_builds(field, value, want):
    with pytest.raises(InvalidInput) as caught:
        LatentCache(**{**GOOD, field: value})
    assert caught.value.field == field and want in caught.value.want and str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prefix_tokens": 0}, "prefix_tokens"),
        ({"prefix_tokens": True}, "prefix_tokens"),
        ({"prefix_tokens": 1.5}, "prefix_tokens"),
        ({"share": 1}, "share"),
        ({"new_tokens": [1, 2]}, "new_tokens"),
    ],
    ids=str,
)
def test_bad_steps(more, field):
    cache = make()
    a = cache.alloc(2)
    with pytest.raises(InvalidInput) as caught:
        cache.batch([a], **{"new_tokens": 1, **more})
    assert caught.value.field == field and cache.length(a) == 2
