"""Metadata made outside of graphs: of the batch as padded, into buffers whose addresses stay."""

from dataclasses import replace

import pytest
import torch

from attnops.core.errors import StaleGraph
from attnops.graphs import Buckets
from attnops.ops import paged_layers
from attnops.ops.pages.plan import statics_of
from tests.graphs.helpers import Pair, both_modes, close, graphed


def forward(tokens, batch):
    """A model that is its metadata."""
    assert batch.plan is not None
    return tokens + batch.plan[: tokens.shape[0]].float()


def stepped(mode, prepare, cache):
    return graphed(
        mode, forward, Buckets(decode=(2, 4)), batch="batch", prepare=prepare, cache=cache
    )


@both_modes
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


BAD = {
    "gone": ({"plan": None}, r"batch.plan of prepare: got None, want int32 \[4\] on cpu"),
    "longer": (
        {"plan": torch.zeros(5, dtype=torch.int32)},
        r"batch.plan of prepare: got int32 \[5\]",
    ),
    "of another dtype": (
        {"plan": torch.zeros(4)},
        r"batch.plan of prepare: got float32 \[4\] on cpu, want int32",
    ),
    "elsewhere": (
        {"workspace": torch.zeros(8, dtype=torch.uint8)},
        r"batch.workspace of prepare: got address",
    ),
    "holes": ({"holes": True}, r"batch.holes: got True, want False"),
}


@both_modes
def test_a_plan_that_comes_and_goes_is_stale(mode):
    """So is a promise of no holes that is taken back."""
    pair = Pair(mode)
    plans = own = {
        "plan": torch.zeros(4, dtype=torch.int32),
        "workspace": torch.zeros(8, dtype=torch.uint8),
    }
    seen = []

    def prepare(batch):
        seen.append(batch.holes)
        return replace(batch, **plans)

    step, x = stepped(mode, prepare, pair.cache), torch.zeros(2)
    step(x, pair.batches("ab", 1)[0])
    assert seen and not any(seen)
    for bad, text in BAD.values():
        plans = {**own, **bad}
        with pytest.raises(StaleGraph, match=text):
            step(x, replace(pair.batches("ab", 1)[0], holes="holes" in bad))
    plans = own
    step(x, pair.batches("ab", 1)[0])


@both_modes
def test_a_host_plan_is_no_part_of_a_graph(mode):
    """A plan op in the model itself lies between graphs."""
    spec = paged_layers(q_heads=2, kv_heads=1, head_dim=8, page_size=4, dtype=torch.float32)
    plan, workspace = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.uint8)

    def planning(tokens, batch):
        y, rows = tokens * 2, (batch.page_table, batch.seq_lens, batch.cu_seqlens_q)
        made = {
            "num_tokens": tokens.shape[0],
            "max_seqlen_q": 1,
            "plan": plan,
            "workspace": workspace,
        }
        torch.ops.attnops.plan_paged_attention(*rows, **made, **statics_of(spec))
        return y + 1

    step = graphed(mode, planning, Buckets(decode=(2,)), batch="batch")
    close(step(torch.ones(2), Pair(mode).batches("ab", 1)[0]), torch.full((2,), 3.0))
    [row] = step.report().rows
    assert [(b.op, b.why) for b in row.breaks] == [
        ("plan_paged_attention", "capture=never")
    ] and row.graphs == 2
