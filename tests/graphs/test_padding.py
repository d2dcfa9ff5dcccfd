"""What fills a bucket can neither write to a live page nor read from one, at capture or at a replay."""

from dataclasses import replace

import pytest
import torch

from attnops.graphs import Buckets
from tests.graphs.helpers import MODES, Pair, pools
from tests.graphs.models import BOUNDARY, PAGE, VOCAB


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "padding"), [(None, "null"), (BOUNDARY, "absent")], ids=["whole", "split"])
def test_capture_writes_nothing(mode, kernel, padding):
    pair = Pair(mode, Buckets(decode=(1, 4), tokens=(16,), requests=4, padding=padding), kernel=kernel)
    given = pair.example("ab", [3, 5])
    for pool in pools(pair.cache):
        pool.uniform_()
    before = [p.clone() for p in pools(pair.cache)]
    report = pair.step.capture(**given)
    assert [str(r.bucket) for r in report.rows] == ["mixed 16 tokens x4", "decode x4", "decode x1"]
    for a, b in zip(pools(pair.cache), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ["absent", "null"])
def test_a_step_writes_its_slots_and_reads_its_pages_alone(mode, padding):
    pair = Pair(mode, Buckets(decode=(4,), tokens=(16,), requests=4, padding=padding), kernel=BOUNDARY)
    null = [0] if padding == "null" else []
    for pool in pools(pair.cache, pair.twin):
        pool[null] = 0
    pair.agree("abc", [5, 4, 7])
    for new in (1, [1, 3]):  # decode, then mixed: rows of `c` are padding in both
        batch, twin = pair.batches("ab", new)
        tokens = torch.randint(VOCAB, (batch.slots.shape[0],))
        owned = {int(p) for p in batch.page_table.unique()} - {0} | {*null}
        others = [p for p in range(pair.cache.num_pages) if p not in owned]
        for pool in pools(pair.cache):
            pool[others] = float("nan")
        before = [p.clone() for p in pools(pair.cache)]
        with torch.no_grad():
            got = pair.call(pair.step, pair.cache, tokens, batch)
            want = pair.call(pair.model, pair.twin, tokens, twin)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        written = {(int(s) // PAGE, int(s) % PAGE) for s in batch.slots}
        for a, b in zip(pools(pair.cache), before, strict=True):
            same = ((a == b) | (a.isnan() & b.isnan())).flatten(2).all(-1)
            assert {tuple(at) for at in (~same).nonzero().tolist()} == written


def test_what_a_bucket_holds_besides_a_batch():
    """The rows themselves, after a longer batch: nothing of it is left."""
    pair = Pair(MODES[1], Buckets(decode=(4,), tokens=(16,), requests=4))
    pair.agree("abcd", [4, 3, 2, 5])
    pair.agree("abcd")
    batch, _ = pair.batches("ab", 1)
    pair.call(pair.step, pair.cache, torch.ones(2, dtype=torch.long), batch)
    [bucket] = [b for b in pair.step._entries if b.kind == "decode"]
    rows = pair.step._inputs.of(bucket)
    held = rows["batch"]
    assert rows["tokens"].tolist() == [1, 1, 0, 0]
    assert held.padded and held.seq_lens[2:].tolist() == [0, 0] and held.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]
    assert held.slots[2:4].tolist() == [-1, -1] and not held.page_table[2:].any() and not held.positions[2:4].any()

    padded = pair.cache.batch([i for i, _ in (pair.ids["a"], pair.ids["b"])], 1)
    # A batch that brings tokens of nobody itself: its last end is known to the device alone.
    ends = torch.tensor([0, 1, 1], dtype=torch.int32)
    padded = replace(padded, padded=True, slots=torch.tensor([padded.slots[0], -1]), cu_seqlens_q=ends)
    pair.call(pair.step, pair.cache, torch.ones(2, dtype=torch.long), padded)
    assert pair.step._inputs._batch.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]


def test_null_rows_are_requests_of_one_token_on_the_null_page():
    pair = Pair(MODES[1], Buckets(decode=(4,), padding="null"))
    for pool in pools(pair.cache, pair.twin):
        pool[0] = 0
    pair.agree("ab")
    [entry] = pair.step._entries.values()
    held = entry.values["batch"]
    assert not held.padded and held.seq_lens[2:].tolist() == [1, 1] and held.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert held.slots[2:].tolist() == [-1, -1] and not held.page_table[2:].any()
