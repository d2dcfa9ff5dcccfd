"""What fills a bucket can neither write to a live page nor read from one, at capture or at a
replay."""

import pytest
import torch

from attnops.graphs import Buckets
from tests.graphs.helpers import Pair, both_modes, buckets_of, close, pools
from tests.graphs.models import BOUNDARY, PAGE, VOCAB


@pytest.mark.sweep(3)
@both_modes
@pytest.mark.parametrize("padding", ["absent", "null"])
def test_a_step_writes_its_slots_and_reads_its_pages_alone(mode, padding):
    """A capture beforehand writes nothing."""
    pair = Pair(
        mode,
        Buckets(decode=(1, 4), tokens=(16,), requests=4, padding=padding),
        kernel=BOUNDARY if padding == "absent" else None,
    )
    null = [0] if padding == "null" else []
    for pool in pools(pair.cache, pair.twin):
        pool[null] = 0
    with pair.untouched():
        pair.step.capture(**pair.example("xyz", [3, 5, 1]))
    assert buckets_of(pair.step) == ["mixed 16 tokens x4", "decode x4", "decode x1"]
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
