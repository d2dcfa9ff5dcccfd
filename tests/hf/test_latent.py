"""MLA models over pages of latents: eager's tokens and logits however one generates, one graph, nothing recompiled."""

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.cache_names import cache_in, cache_of, named
from tests.hf.helpers import (
    LATENT,
    LIMIT,
    STEPS,
    Counter,
    by_hand,
    counted,
    eager_logits,
    eager_tokens,
    generated,
    in_generate,
    left_padded,
    logits,
    relative,
    tokens,
)

# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LATENT)
def test_tokens(name):
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle, counted() as calls:
        assert torch.equal(generated(model), eager_tokens(name))
        layers = len(handle.report().patched)
        assert calls == {"absorbed": 13 * layers, "expanded": layers}
        assert torch.equal(generated(model), eager_tokens(name)), "with the pages of the call before"


@pytest.mark.parametrize("name", LATENT)
def test_logits(name):
    """Prefill, single tokens and two tokens at once; in pages, then in transformers' own cache, of a model that is patched for pages."""
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle:
        assert relative(by_hand(model, handle.new_cache(3, 20), tokens(), left_padded()), eager_logits(name)) < LIMIT
        with counted() as calls:
            assert relative(logits(model, "dynamic", tokens(), left_padded()), eager_logits(name)) < LIMIT
        assert calls == {"absorbed": 0, "expanded": 0}


@pytest.mark.parametrize("steps", [((0, 1), (1, 20)), ((0, 2), (2, 9), (9, 20)), ((0, 20),)])
def test_absorbed_and_expanded_agree(steps):
    """However the text is cut: a first step of one token, one that is padding for some rows, a long one over a filled cache."""
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    want = logits(model, None, ids, mask, steps=((0, 20),))
    with attnops.patch(model, cache="paged") as handle:
        assert relative(torch.cat([by_hand(model, handle.new_cache(3, 20), ids, mask, steps)]), sorted_as(want, mask, steps)) < LIMIT


def sorted_as(whole, mask, steps):
    """Rows of logits of one forward in the order in which several steps give them."""
    order = torch.full(mask.shape, -1)
    order[mask.bool()] = torch.arange(len(whole))
    return whole[torch.cat([order[:, a:b][mask[:, a:b].bool()] for a, b in steps])]


# Ways to generate -----------------------------------------------------------------------------------------------------


def test_rollback():
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, tokens(seed=9), mask, ((0, 3),))
        cache.crop(-3)
        by_hand(model, cache, ids, mask, ((0, 14),))
        by_hand(model, cache, tokens(seed=9), mask, ((14, 18),))
        cache.crop(torch.tensor(-3))
        by_hand(model, cache, tokens(seed=8), mask, ((15, 18),))
        cache.crop(14)
        assert int(cache.get_seq_length()) == 14
        ours = by_hand(model, cache, ids, mask, STEPS[1:])
        assert relative(ours, eager_logits("deepseek_v3")[-len(ours) :]) < LIMIT


def test_pages_of_two_calls():
    """Kept pages fit the calls before as well, where that costs little: not many short rows times one long row."""
    model, options = tiny.model("deepseek_v3"), {"do_sample": False, "return_dict_in_generate": True}

    def sizes(rows, length):
        cache = cache_of(model.generate(tokens(rows, 4), max_new_tokens=length - 3, **options))
        return cache.max_batch, cache.max_length

    with attnops.patch(model, cache="paged"):
        assert sizes(3, 10) == (3, 10)
        assert sizes(2, 16) == (3, 16) and sizes(3, 8) == (3, 16)
        assert sizes(1, 200) == (1, 208), "rounded up"
        assert sizes(40, 6) == (40, 6)


def test_a_cache_that_is_kept_in_secret_is_an_error():
    model, kept = tiny.model("deepseek_v3"), []

    def keep(module, args, kwargs):
        kept.append(cache_in(kwargs))

    model.register_forward_pre_hook(keep, with_kwargs=True)
    with attnops.patch(model, cache="paged"):
        generated(model, new=2)
        with pytest.raises(InvalidInput, match="has ended"):
            generated(model, new=2, **named(kept[0]))


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_generate_does_not_recompile():
    model = tiny.model("deepseek_v3")
    want = {batch: in_generate(model, batch, 9, 6, None) for batch in (1, 2, 3)}
    counter = Counter()
    with attnops.patch(model, cache="paged") as handle:
        for batch in (3, 2, 1):
            assert torch.equal(in_generate(model, batch, 9, 6, counter), want[batch])
        warm = len(counter)
        assert 0 < warm <= 3
        for batch in (3, 2, 3, 1, 3):
            assert torch.equal(in_generate(model, batch, 9, 6, counter), want[batch])
        assert len(counter) == warm
        assert torch.equal(in_generate(model, 3, 9, 6, counter, **named(handle.new_cache(3, 14))), want[3])
        assert len(counter) == warm, "another cache of the same size"
    for graph in counter.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        layers = sum("mla_attention" in target for target in called)
        assert layers == len(handle.report().patched) and sum("write_latent" in target for target in called) == layers
        assert sum("slot_mapping" in target for target in called) == 1, "metadata are made once a step"


@pytest.mark.full
def test_a_loop_by_hand_does_not_recompile():
    """The whole model compiled, 2-D masks and prefill included."""
    model, steps = tiny.model("minicpm3"), ((0, 9), (9, 10), (10, 11))
    masks = {batch: left_padded(batch, 11, (3, 5, 0)) for batch in (2, 3)}
    want = {batch: logits(model, "dynamic", tokens(batch, 11), mask, steps) for batch, mask in masks.items()}
    counter, graphs = Counter(), []
    with attnops.patch(model, cache="paged") as handle:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        cache = handle.new_cache(3, 16)
        for batch in (3, 2, 3, 2):
            cache.reset()
            assert relative(by_hand(compiled, cache, tokens(batch, 11), masks[batch], steps), want[batch]) < LIMIT
            graphs.append(len(counter))
        assert graphs[0] > 0 and graphs[1] == graphs[3], "no more once it has seen two batch sizes"
        # Where the host cannot look the device asserts: nothing wrong comes back.
        ids, mask = tokens(2, 18), torch.cat([masks[2], masks[2].new_ones(2, 7)], 1)
        holed = mask.clone()
        holed[0, 6] = 0
        too_long = tuple((i, i + 1) for i in range(11, 18))
        for wrong, wrongly in ((holed, ((11, 12),)), (torch.ones_like(mask), ((11, 12),)), (mask, too_long)):
            cache.reset()
            by_hand(compiled, cache, ids, mask, steps)
            with pytest.raises(RuntimeError, match="pages cannot follow"):
                by_hand(compiled, cache, ids, wrong, wrongly)
