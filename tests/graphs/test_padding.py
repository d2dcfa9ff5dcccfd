"""What fills a bucket can neither write to a live page nor read from one, at capture or at a replay."""

from dataclasses import replace

import pytest
import torch

from attnops.graphs import Buckets, breakable
from tests.graphs.helpers import Pair, both_modes, close, pools
from tests.graphs.models import BOUNDARY, PAGE, VOCAB

either_padding = pytest.mark.parametrize("padding", ["absent", "null"])


@pytest.mark.sweep(3)
@both_modes
@either_padding
def test_a_step_writes_its_slots_and_reads_its_pages_alone(mode, padding):
    """A capture beforehand writes nothing."""
    pair = Pair(mode, Buckets(decode=(1, 4), tokens=(16,), requests=4, padding=padding), kernel=BOUNDARY if padding == "absent" else None)
    null = [0] if padding == "null" else []
    for pool in pools(pair.cache, pair.twin):
        pool[null] = 0
    with pair.untouched():
        report = pair.step.capture(**pair.example("xyz", [3, 5, 1]))
    assert [str(r.bucket) for r in report.rows] == ["mixed 16 tokens x4", "decode x4", "decode x1"]
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
            close(pair.give(batch, tokens), pair.call(pair.model, pair.twin, tokens, twin))
        written = {(int(s) // PAGE, int(s) % PAGE) for s in batch.slots}
        for a, b in zip(pools(pair.cache), before, strict=True):
            same = ((a == b) | (a.isnan() & b.isnan())).flatten(2).all(-1)
            assert {tuple(at) for at in (~same).nonzero().tolist()} == written


@either_padding
def test_what_a_bucket_holds_besides_a_batch(padding):
    """The rows themselves, after a longer batch: nothing of it is left. Null rows are requests of one token on the null page."""
    pair = Pair(breakable, Buckets(decode=(4,), tokens=(16,), requests=4, padding=padding))
    null = padding == "null"
    for pool in pools(pair.cache, pair.twin):
        pool[[0] * null] = 0
    pair.agree("abcd", [4, 3, 2, 5])
    pair.agree("abcd")
    pair.give(pair.batches("ab", 1)[0], torch.ones(2, dtype=torch.long))
    [entry] = [entry for bucket, entry in pair.step._entries.items() if bucket.kind == "decode"]
    rows, held = entry.values["tokens"], entry.values["batch"]
    assert rows.tolist() == [1, 1, 0, 0]
    assert held.padded is not null and held.seq_lens[2:].tolist() == [int(null)] * 2
    assert held.cu_seqlens_q.tolist() == ([0, 1, 2, 3, 4] if null else [0, 1, 2, 2, 2])
    assert held.slots[2:].tolist() == [-1, -1] and not held.page_table[2:].any() and not held.positions[2:].any()
    if not null:
        # A batch that brings tokens of nobody itself: its last end is known to the device alone.
        batch, _ = pair.batches("ab", 1)
        ends = torch.tensor([0, 1, 1], dtype=torch.int32)
        pair.give(replace(batch, padded=True, slots=torch.tensor([batch.slots[0], -1]), cu_seqlens_q=ends))
        assert held.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]
