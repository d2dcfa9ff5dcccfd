"""Models of ordinary attention over pages, compiled: whatever batch and length come, nothing is compiled again."""

import pytest
import torch

import attnops
from attnops.hf import tiny
from attnops.hf.cache_names import named
from tests.hf.helpers import LIMIT, Counter, by_hand, in_generate, left_padded, logits, poison, relative, tokens

# Rows, length of the prompt, new tokens. The first three, of each kind of batch, are what it takes to warm up.
CALLS = ((3, 9, 4), (2, 9, 4), (1, 9, 4), (3, 12, 5), (2, 70, 6), (1, 30, 40), (5, 20, 4), (3, 9, 4), (4, 50, 30), (1, 100, 5))


@pytest.fixture(autouse=True)
def anew():
    """transformers' wrapper of forward is one function for all models, and the compiler's limit is one a function."""
    torch._dynamo.reset()


@pytest.mark.full
def test_generate_does_not_recompile():
    model = tiny.model("llama")
    want = [in_generate(model, *call, None) for call in CALLS]
    counter, graphs = Counter(), []
    with attnops.patch(model, cache="paged"):
        for call, tokens_of_eager in zip(CALLS, want, strict=True):
            assert torch.equal(in_generate(model, *call, counter), tokens_of_eager)
            graphs.append(len(counter))
    assert graphs[2] == graphs[-1] == 3, graphs
    for graph in counter.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        assert sum("paged_attention" in target for target in called) == sum("write_kv" in target for target in called) == 2
        assert sum("slot_mapping" in target for target in called) == 1, "metadata are made once a step"


@pytest.mark.full
def test_windows_that_give_pages_back_do_not_recompile():
    """One table for the windows, one for what sees all; and no more graphs than that takes."""
    model, calls = tiny.model("gpt_oss"), ((3, 60, 6), (2, 60, 6), (3, 70, 20), (2, 100, 9))
    want = [in_generate(model, *call, None) for call in calls]
    counter, graphs = Counter(), []
    with attnops.patch(model, cache="paged") as handle:
        for call, tokens_of_eager in zip(calls, want, strict=True):
            cache = handle.new_cache(call[0] + 1, call[1] + call[2] + 5, page_size=4)
            poison(cache)
            assert torch.equal(in_generate(model, *call, counter, **named(cache)), tokens_of_eager)
            graphs.append(len(counter))
    assert graphs[1] == graphs[-1] == 2, graphs
    assert sum("slot_mapping" in target for target in counter.targets()) == 2 * 2


@pytest.mark.full
def test_a_loop_by_hand():
    """The whole model compiled: prefill, decode, and a chunk that is longer than what a window's pages have room for."""
    steps, ids, mask = ((0, 9), (9, 10), (10, 60)), tokens(2, 60), left_padded(2, 60)
    model = tiny.model("mistral", num_hidden_layers=1)
    want = logits(model, "dynamic", ids, mask, steps)
    counter = Counter()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 80, page_size=4)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for _ in range(2):
            cache.reset()
            poison(cache)
            assert relative(by_hand(compiled, cache, ids, mask, steps), want) < LIMIT
            assert len(counter) == len(steps)
        # Where the host cannot look the device asserts: nothing wrong comes back.
        cache.reset()
        spoilt = mask.clone()
        spoilt[0, 6] = 0
        by_hand(compiled, cache, ids, mask, steps[:1])
        with pytest.raises(RuntimeError, match="pages cannot follow"):
            by_hand(compiled, cache, ids, spoilt, steps[1:2])
