"""Metadata made outside of graphs: of the batch as padded, into buffers whose addresses stay."""

from dataclasses import replace

import pytest
import torch

from attnops.core.errors import StaleGraph
from attnops.graphs import Buckets
from tests.graphs.helpers import MODES, Pair, close, graphed


def forward(tokens, batch):
    """A model that is its metadata."""
    assert batch.plan is not None
    return tokens + batch.plan[: tokens.shape[0]].float()


def stepped(mode, prepare, cache):
    return graphed(mode, forward, Buckets(decode=(2, 4)), batch="batch", prepare=prepare, cache=cache)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fixed", [True, False], ids=["one buffer", "a tensor of each step"])
def test_a_plan_of_the_padded_batch(mode, fixed):
    pair, buffer, seen = Pair(mode), torch.full((4,), -1, dtype=torch.int32), []

    def prepare(batch):
        seen.append(batch.seq_lens.tolist())
        made = torch.zeros(4, dtype=torch.int32)
        made[: batch.seq_lens.shape[0]] = batch.seq_lens * 10
        return replace(batch, plan=buffer.copy_(made) if fixed else made)

    step = stepped(mode, prepare, pair.cache)
    pair.batches("abc", [1, 2, 3])
    for names in ("abc", "ab", "c"):
        batch, _ = pair.batches(names, 1)
        x = torch.randn(len(names))
        close(step(x, batch), x + batch.seq_lens * 10)
    assert seen[-1] == [5, 0] and [6, 0] not in seen and [2, 3, 4, 0] in seen


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_that_comes_and_goes_is_stale(mode):
    pair, plans = Pair(mode), {"plan": torch.zeros(4, dtype=torch.int32), "workspace": torch.zeros(8, dtype=torch.uint8)}
    step = stepped(mode, lambda batch: replace(batch, **plans), pair.cache)
    x = torch.zeros(2)
    step(x, pair.batches("ab", 1)[0])
    for bad, text in (
        ({"plan": None}, r"batch.plan of prepare: got None, want int32 \[4\] on cpu"),
        ({"plan": torch.zeros(5, dtype=torch.int32)}, r"batch.plan of prepare: got int32 \[5\]"),
        ({"plan": torch.zeros(4)}, r"batch.plan of prepare: got float32 \[4\] on cpu, want int32"),
        ({"workspace": torch.zeros(8, dtype=torch.uint8)}, r"batch.workspace of prepare: got address"),
    ):
        before = dict(plans)
        plans.update(bad)
        with pytest.raises(StaleGraph, match=text):
            step(x, pair.batches("ab", 1)[0])
        plans.update(before)
    step(x, pair.batches("ab", 1)[0])


def test_a_host_plan_is_no_part_of_a_graph():
    """A plan op in the model itself lies between graphs."""
    from attnops.ops import paged_layers
    from attnops.ops.pages.plan import statics_of

    spec = paged_layers(q_heads=2, kv_heads=1, head_dim=8, page_size=4, dtype=torch.float32)
    plan, workspace = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.uint8)

    def planning(tokens, batch):
        y = tokens * 2
        torch.ops.attnops.plan_paged_attention(
            batch.page_table, batch.seq_lens, batch.cu_seqlens_q, num_tokens=tokens.shape[0], max_seqlen_q=1, plan=plan,
            workspace=workspace, **statics_of(spec),
        )  # fmt: skip
        return y + 1

    for mode in MODES:
        pair = Pair(mode)
        step = graphed(mode, planning, Buckets(decode=(2,)), batch="batch")
        close(step(torch.ones(2), pair.batches("ab", 1)[0]), torch.full((2,), 3.0))
        [row] = step.report().rows
        assert [(b.op, b.why) for b in row.breaks] == [("plan_paged_attention", "capture=never")] and row.graphs == 2


@pytest.mark.parametrize("mode", MODES)
def test_the_promise_of_no_holes_reaches_the_model_and_is_kept(mode):
    pair, seen = Pair(mode), []

    def prepare(batch):
        seen.append(batch.holes)
        return replace(batch, plan=torch.zeros(4, dtype=torch.int32))

    step = stepped(mode, prepare, pair.cache)
    batch, _ = pair.batches("ab", 1)
    step(torch.zeros(2), batch)
    assert seen and not any(seen)
    with pytest.raises(StaleGraph, match=r"batch.holes: got True, want False"):
        step(torch.zeros(2), replace(pair.batches("ab", 1)[0], holes=True))
