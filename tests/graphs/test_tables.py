"""Batches of several page tables, of a cache with windows, and batches with a shared prefix: every
table follows its step, and padding rows are right in each."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from attnops.cache import LatentCache
from attnops.core.errors import InvalidInput, StaleGraph
from attnops.graphs import Buckets, breakable, piecewise
from attnops.nn import LatentAttention
from tests.graphs.helpers import (
    Pair,
    any_mode,
    batches_in_turn,
    both_modes,
    buckets_of,
    close,
    graphed,
    pools,
)
from tests.graphs.models import HIDDEN, Windowed, paged_cache

WINDOWS = (0, 5, 9, 5)
BUCKETS = Buckets(decode=(1, 2, 4), tokens=(16, 32), requests=4, verify=(3,))
paddings = pytest.mark.parametrize("padding", ["absent", "null"])


def windowed(mode, buckets=BUCKETS, **more):
    """A pair over a table for each window, of which that of window 0 is the first."""

    def cached(layers):
        return paged_cache(layers, windows=WINDOWS, max_new_tokens=8)

    torch.manual_seed(0)
    model = Windowed(WINDOWS, cached(len(WINDOWS)).table_of).eval()
    pair = Pair(mode, buckets, model, cached=cached, **more)
    if buckets.padding == "null":
        # Its numbers are multiplied by nobody's weights, but they have to be numbers.
        for pool in pools(pair.cache, pair.twin):
            pool[0] = 0
    return pair


@pytest.mark.sweep(3)
@both_modes
@paddings
def test_changing_batches_of_windows(mode, padding):
    pair = windowed(mode, replace(BUCKETS, padding=padding))
    with pair.untouched():
        pair.step.capture(**pair.example("xyz", [3, 5, 1]))
    for name in "xyz":
        pair.free(name)
    captured = pair.device.calls.count("begin")
    pair.agree("abc", [6, 3, 7])  # prefill
    for _ in range(8):
        pair.agree("abc")  # pages that fall behind the windows are used again
    batches_in_turn(pair)
    pair.agree("")
    pair.agree("ebcd")
    kinds = {row.bucket.kind: row.replays for row in pair.step.report().rows if row.replays}
    assert kinds.keys() == {"decode", "verify", "mixed"}
    assert pair.device.calls.count("begin") == captured and not pair.step.report().eager_calls
    if mode is piecewise:
        assert pair.step.runner.traces == {"mixed": 1, "decode": 1, "verify 3": 1}


@pytest.mark.sweep(2)
@both_modes
def test_many_random_steps_of_windows(mode):
    pair, rng = windowed(mode), random.Random(0)
    for _ in range(40):
        names = rng.sample("abcdef", rng.randint(0, 4))
        for name in [n for n in pair.ids if pair.cache.length(pair.ids[n][0]) > 24]:
            pair.free(name)
        fresh = [n for n in names if n not in pair.ids]
        pair.agree(names, [rng.randint(2, 6) if n in fresh else 1 for n in names])


@pytest.mark.parametrize("windows", [False, True])
def test_rows_of_nobody_in_every_table(windows):
    """A shorter batch reads nothing of a longer one. Tokens of a batch that belong to no request
    stay so: the device alone knows where the last request ends."""
    buckets = Buckets(decode=(4,), tokens=(16,), requests=4)
    pair = windowed(breakable, buckets) if windows else Pair(breakable, buckets)
    pair.agree("abcd", [4, 3, 2, 5])
    pair.agree("abcd")
    held = pair.step._inputs._batch
    for padded, ends in ((False, [0, 1, 2, 2, 2]), (True, [0, 1, 1, 1, 1])):
        batch, _ = pair.batches("ab", 1)
        if padded:
            cu = torch.tensor(ends[:3], dtype=torch.int32)
            first, *others = (
                replace(b, padded=True, slots=torch.tensor([b.slots[0], -1]), cu_seqlens_q=cu)
                for b in (batch, *batch.others)
            )
            batch = replace(first, others=tuple(others))
        pair.give(batch)
        assert len(held.others) == (len(set(WINDOWS)) - 1 if windows else 0)
        for table in (held, *held.others):
            assert table.cu_seqlens_q.tolist() == ends and table.seq_lens[2:].tolist() == [0, 0]
            assert table.slots[2:4].tolist() == [-1, -1]
            assert not table.page_table[2:].any() and not table.positions[2:4].any()


@any_mode
def test_what_a_replay_of_windows_refuses(mode):
    pair = windowed(mode, Buckets(decode=(2,), tokens=(16,), requests=2))
    pair.agree("ab")
    batch, _ = pair.batches("ab", 1)
    first, second = batch.others
    wide = torch.zeros(2, 9, dtype=torch.int32)
    scratch = torch.zeros(8, dtype=torch.uint8)
    with pair.untouched():
        for error, text, others in (
            (StaleGraph, r"batch.others: got 1 further tables, want 2", (first,)),
            (
                StaleGraph,
                r"batch.others\[1\].page_table: got 9 columns, want at most 5",
                (first, replace(second, page_table=wide)),
            ),
            (StaleGraph, r"batch.others\[0\].holes", (replace(first, holes=True), second)),
            (
                StaleGraph,
                r"batch.others\[0\].workspace: got 8 bytes",
                (replace(first, workspace=scratch), second),
            ),
            (InvalidInput, r"batch.others\[0\]: got int, want a PagedBatch", (1, second)),
            (
                InvalidInput,
                r"batch.others\[1\].prefix: got 1 chunks .* Make the batch without prefix_tokens",
                (first, replace(second, prefix=(1,))),
            ),
            (
                InvalidInput,
                r"batch.others\[1\].shared, others: got further tables",
                (first, replace(second, others=(first,))),
            ),
            (
                InvalidInput,
                r"batch.others\[0\].max_seqlen_q: got 2, want 1, as in the batch",
                (replace(first, max_seqlen_q=2), second),
            ),
            (
                InvalidInput,
                r"others\[0\].seq_lens.shape\[0\]: got 1, want 2, as in the batch",
                (replace(first, seq_lens=first.seq_lens[:1]), second),
            ),
        ):
            with pytest.raises(error, match=text):
                pair.give(replace(batch, others=others))


def test_lengths_of_every_table_are_compared():
    pair = windowed(breakable, Buckets(decode=(2,)), check_every=1)
    pair.agree("ab")
    batch, _ = pair.batches("ab", 1)
    first, second = batch.others
    long = replace(second, seq_lens=second.seq_lens + 100)
    with pytest.raises(StaleGraph, match=r"batch.others\[1\].seq_lens: got 102 tokens"):
        pair.give(replace(batch, others=(first, long)))


@both_modes
def test_plans_of_every_table(mode):
    """Made outside of graphs, of the tables as padded."""

    def planned(table):
        plan = torch.zeros(4, dtype=torch.int32)
        plan[: table.seq_lens.shape[0]] = table.seq_lens * 10
        return replace(table, plan=plan)

    def prepare(batch):
        return replace(planned(batch), others=tuple(map(planned, batch.others)))

    def forward(tokens, batch):
        for table in (batch, *batch.others):
            tokens = tokens * 100 + table.plan[: tokens.shape[0]].float()
        return tokens

    pair, buckets = windowed(mode), Buckets(decode=(2, 4))
    step = graphed(mode, forward, buckets, batch="batch", prepare=prepare, cache=pair.cache)
    pair.batches("abc", [7, 8, 3])
    for names in ("abc", "ab", "c"):
        batch, _ = pair.batches(names, 1)
        x = torch.randn(len(names))
        close(step(x, batch), forward(x, prepare(batch)))
    step.prepare = lambda batch: planned(replace(batch, others=()))
    with pytest.raises(InvalidInput, match=r"batch\.others of prepare: got 0 tables, want 2"):
        step(x, batch)


class Latents:
    """A layer over latents in graphs beside the same layer, over caches whose requests begin with
    the same pages."""

    def __init__(self, mode, buckets, prompt=10):
        torch.manual_seed(0)
        self.model = LatentAttention(
            HIDDEN, 4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        ).eval()
        sizes = {
            "latent_dim": 16,
            "rope_dim": 8,
            "max_requests": 8,
            "max_tokens_per_request": 48,
            "page_size": 4,
            "q_heads": 4,
        }
        make = partial(LatentCache, 1, 512, **sizes, dtype=torch.float32, device="cpu")
        self.mine, self.twin = make(), make()
        for cache in (self.mine, self.twin):
            cache.latent_pages[0][1:] = float("nan")
        self.step = graphed(
            mode, self.model, buckets, batch="batch", tokens=("hidden",), cache=self.mine
        )
        first = [cache.alloc() for cache in (self.mine, self.twin)]
        self.ids = {"a": first}
        self.given = torch.randn(prompt, HIDDEN)
        for cache, request in zip((self.mine, self.twin), first, strict=True):
            batch = cache.batch([request], prompt)
            with torch.no_grad():
                self.model(self.given, batch=batch, latent_pages=cache.latent_pages[0])

    def fork(self, name, of="a"):
        self.ids[name] = [
            cache.fork(request)
            for cache, request in zip((self.mine, self.twin), self.ids[of], strict=True)
        ]

    def batches(self, names, new=1, share=True):
        requests = zip(*(self.ids[n] for n in names), strict=True) if names else ((), ())
        return [
            cache.batch(ids, new, share=share)
            for cache, ids in zip((self.mine, self.twin), requests, strict=True)
        ]

    def example(self, names):
        """A step of which only one cache knows, and takes it back."""
        ids = [self.ids[n][0] for n in names]
        batch = self.mine.batch(ids, share=True)
        for request in ids:
            self.mine.truncate(request, self.mine.length(request) - 1)
        return batch

    def agree(self, names, new=1, share=True):
        batch, twin = self.batches(names, new, share)
        assert (batch.shared is not None) is share
        hidden = torch.randn(batch.slots.shape[0], HIDDEN)
        pages = {"latent_pages": self.mine.latent_pages[0]}
        with torch.no_grad():
            got = self.step(hidden, batch=batch, **pages)
            close(got, self.model(hidden, batch=twin, latent_pages=self.twin.latent_pages[0]))
        assert not got.isnan().any()
        held = self.mine.latent_pages[0], self.twin.latent_pages[0]
        torch.testing.assert_close(*held, rtol=2e-5, atol=2e-5, equal_nan=True)


SHARED = Buckets(decode=(2, 4), tokens=(16,), requests=4, verify=(3,))


@pytest.mark.sweep(3)
@both_modes
@paddings
def test_changing_batches_of_a_shared_prefix(mode, padding):
    """A step with a shared prefix has graphs of its own, which follow the prefix and the rests."""
    pair = Latents(mode, replace(SHARED, padding=padding))
    for name in "bcd":
        pair.fork(name)
    pair.agree("abc")
    pair.agree("abcd")  # a full bucket
    pair.agree("cb")  # other rows, and a shorter batch after a longer one
    pair.agree("abc", share=False)  # the same step without
    pair.agree("abc", [2, 1, 3])  # verification, ragged
    pair.agree("ba", [3, 3])
    pair.agree("abd", [6, 2, 1])  # mixed
    pair.agree("db", [4, 5])
    pair.fork("e", of="d")
    pair.fork("f", of="d")
    pair.agree("edf")  # a longer prefix
    pair.agree("ab")  # a shorter one after it
    pair.agree("ed", share=False)
    pair.agree("", share=False)  # idle: nobody shares
    assert {str(row.bucket): row.replays for row in pair.step.report().rows} == {
        "decode shared x4": 3,
        "decode shared x2": 2,
        "decode x4": 1,
        "decode x2": 2,
        "verify 3 shared x4": 1,
        "verify 3 shared x2": 1,
        "mixed shared 16 tokens x4": 2,
    }
    assert pair.step.report().modes.keys() == {
        "decode shared",
        "decode",
        "verify shared",
        "mixed shared",
    }
    if mode is piecewise:
        traces = {"decode": 1, "decode shared": 1, "verify 3 shared": 1, "mixed shared": 1}
        assert pair.step.runner.traces == traces


@any_mode
@paddings
def test_a_capture_for_shared_prefixes(mode, padding):
    """An example with a shared prefix captures the buckets of such batches. Capture and padding
    rows write no page, and what the last batch held is gone."""
    pair = Latents(mode, replace(SHARED, padding=padding))
    pair.fork("b")
    batch, pages = pair.example("ab"), pair.mine.latent_pages[0]
    hidden, before = torch.zeros(2, HIDDEN), pages.clone()
    for given, end in ((batch, " shared"), (replace(batch, shared=None), "")):
        pair.step.capture(hidden, batch=given, latent_pages=pages)
        torch.testing.assert_close(pages, before, rtol=0, atol=0, equal_nan=True)
        assert buckets_of(pair.step)[-5:] == [
            f"mixed{end} 16 tokens x4",
            f"verify 3{end} x4",
            f"verify 3{end} x2",
            f"decode{end} x4",
            f"decode{end} x2",
        ]
    held = pair.step._inputs._shared
    for rows in held.values():
        rows.tensor.fill_(7)
    pair.agree("ab")
    batch = pair.example("ab")
    narrow = replace(
        batch.shared,
        page_table=batch.shared.page_table[:, :2].contiguous(),
        rest_table=batch.shared.rest_table[:, :4].contiguous(),
    )
    with torch.no_grad():
        got = pair.step(hidden, batch=replace(batch, shared=narrow), latent_pages=pages).clone()
        close(got, pair.model(hidden, batch=batch, latent_pages=pages))
    assert not held["page_table"].tensor[:, 2:].any()
    assert not held["rest_table"].tensor[:2, 4:].any()
    pair.fork("c")
    pair.agree("abc")
    null = padding == "null"
    assert held["rest_lens"].tensor[3:].tolist() == [int(null)]
    assert not held["rest_table"].tensor[3:].any()
    assert held["cu_seqlens_q"].tensor.tolist() == [0, 4 if null else 3]


def test_a_first_batch_of_a_wide_shared_table():
    """Captured page tables are as wide as the widest."""
    pair = Latents(breakable, SHARED)
    pair.fork("b")
    batch, twin = pair.batches("ab")
    wide = torch.zeros(1, 99, dtype=torch.int32)
    wide[:, : batch.page_table.shape[1]] = batch.shared.page_table
    hidden = torch.randn(2, HIDDEN)
    given = replace(batch, shared=replace(batch.shared, page_table=wide))
    with torch.no_grad():
        got = pair.step(hidden, batch=given, latent_pages=pair.mine.latent_pages[0]).clone()
        close(got, pair.model(hidden, batch=twin, latent_pages=pair.twin.latent_pages[0]))


def test_what_a_shared_prefix_refuses():
    pair = Latents(breakable, SHARED)
    pair.fork("b")
    pair.agree("ab")
    batch, _ = pair.batches("ab")
    hidden, pages = torch.zeros(2, HIDDEN), pair.mine.latent_pages[0]
    shared, wide = batch.shared, torch.zeros(2, 99, dtype=torch.int32)
    before = pages.clone()
    for error, text, changed in (
        (StaleGraph, "batch.shared.page_table: got 99 columns", {"page_table": wide[:1]}),
        (StaleGraph, "batch.shared.rest_table: got 99 columns", {"rest_table": wide}),
        (
            InvalidInput,
            r"shared.rest_lens.shape\[0\]: got 1, want 2, as in the batch",
            {"rest_lens": shared.rest_lens[:1]},
        ),
        (
            InvalidInput,
            r"shared.page_table.shape\[0\]: got 2, want 1, as in the batch",
            {"page_table": batch.page_table},
        ),
    ):
        with pytest.raises(error, match=text):
            given = replace(batch, shared=replace(shared, **changed))
            pair.step(hidden, batch=given, latent_pages=pages)
    with pytest.raises(InvalidInput, match=r"batch\.shared: got tuple, want a SharedPrefix"):
        pair.step(hidden, batch=replace(batch, shared=()), latent_pages=pages)
    torch.testing.assert_close(pages, before, rtol=0, atol=0, equal_nan=True)


def test_a_budget_drops_buckets_of_shared_prefixes_by_themselves():
    pair = Latents(breakable, Buckets(decode=(2,), over="eager"))
    pair.fork("b")
    pair.agree("ab", share=False)
    pair.step.budget_bytes, pair.step.over_budget = 0, "drop"
    pair.step.graphs.need = lambda: 1
    pair.agree("ab")
    assert [str(b) for b in pair.step.buckets.dropped] == ["decode shared x2"]
    pair.agree("ab", share=False)
    assert pair.step.report().eager_calls == 1
