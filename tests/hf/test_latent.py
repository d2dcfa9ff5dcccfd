"""MLA models over pages of latents: eager's tokens and logits however one generates, one graph, nothing recompiled."""

import gc
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import attnops
from attnops.errors import InvalidInput, NoGradient
from attnops.hf import PagedLatentCache, tiny
from attnops.hf.cache_names import cache_in, cache_of, named
from tests.hf.helpers import (
    LATENT,
    LIMIT,
    STEPS,
    Counter,
    allocated,
    by_hand,
    counted,
    eager_logits,
    eager_tokens,
    generated,
    left_padded,
    logits,
    relative,
    tokens,
)
from tests.lowering.models import compiled_code, kernel_calls

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


def test_pages_of_others_do_not_matter():
    """Whatever lies in pages of rows the batch has not, or past a row's end: here NaN."""
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(5, 40, page_size=4)
        for pages in cache.state.pages.pools:
            pages.fill_(float("nan"))
        assert torch.equal(generated(model, **named(cache)), eager_tokens("deepseek_v3"))
        for pages in cache.state.pages.pools:
            lengths = (cache.get_seq_length() - cache.state.pages.pad[:3]).tolist()
            stored = torch.isfinite(pages).all(-1).sum()
            assert stored == sum(lengths), "padding is not stored"


def test_a_request_without_any_token():
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    mask[2] = 0
    want = logits(model, "dynamic", ids, mask, steps=STEPS[:3])
    with attnops.patch(model, cache="paged") as handle:
        assert relative(by_hand(model, handle.new_cache(3, 20), ids, mask, STEPS[:3]), want) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Of a model without experts, which rounding would swap."""
    model = tiny.model("minicpm3").to(dtype)
    want = logits(model, "dynamic", tokens(), left_padded()).float()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        assert cache.pages_of(0).dtype == dtype
        assert relative(by_hand(model, cache, tokens(), left_padded()).float(), want) < 0.1


def test_autocast():
    model = tiny.model("minicpm3")
    with torch.autocast("cpu", torch.bfloat16), attnops.patch(model, cache="paged") as handle:
        ours = by_hand(model, handle.new_cache(3, 20), tokens(), left_padded())
    assert relative(ours.float(), eager_logits("minicpm3")) < 0.1


# Ways to generate -----------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {"prefill_chunk_size": 4},
    {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 5},
    {"repetition_penalty": 1.3},
    {"prompt_lookup_num_tokens": 3, "rows": 1},
    {"use_cache": False},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: next(iter(options)))
def test_ways_to_generate(options):
    options = dict(options)
    rows = options.pop("rows", 3)
    model = tiny.model("deepseek_v3")

    def run():
        torch.manual_seed(0)
        more = {"max_new_tokens": 8, "do_sample": False, "attention_mask": left_padded(rows)[:, :14], **options}
        return model.generate(tokens(rows)[:, :14], **more)

    want = run()
    with attnops.patch(model, cache="paged"), counted() as calls:
        assert torch.equal(run(), want)
    assert bool(calls["absorbed"]) == ("use_cache" not in options and "cache_implementation" not in options)


def test_assisted_generation():
    """The drafts that are rejected are taken back. The helper, patched too, keeps transformers' cache."""
    model, helper = tiny.model("deepseek_v3"), tiny.model("deepseek_v3", seed=1)
    one: dict[str, Any] = {"attention_mask": left_padded()[:1, :14], "max_new_tokens": 8, "do_sample": False}
    want = model.generate(tokens()[:1, :14], **one)
    with attnops.patch(model, cache="paged"), attnops.patch(helper, cache="paged"), counted() as calls:
        assert torch.equal(model.generate(tokens()[:1, :14], assistant_model=helper, **one), want)
    assert calls["absorbed"]


def test_beam_search_keeps_transformers_cache():
    model = tiny.model("deepseek_v3")
    want = generated(model, new=6, num_beams=2)
    with attnops.patch(model, cache="paged") as handle, counted() as calls:
        with pytest.warns(UserWarning, match="beam search"):
            assert torch.equal(generated(model, new=6, num_beams=2), want)
        assert not calls["absorbed"]
        with pytest.raises(InvalidInput, match="num_beams"):
            generated(model, new=6, num_beams=2, **named(handle.new_cache(6, 40)))


def test_turns():
    """A second turn over the same cache, with the whole text given again; then the cache is emptied and used for another batch."""
    model, options = tiny.model("deepseek_v3"), {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    mask = left_padded()[:, :14]
    first = model.generate(tokens()[:, :14], attention_mask=mask, **options)
    text = torch.cat([first, tokens(3, 4, seed=7)], 1)
    longer = torch.cat([mask, mask.new_ones(3, 9)], 1)
    second = model.generate(text, attention_mask=longer, **options)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(4, 40)
        assert torch.equal(model.generate(tokens()[:, :14], attention_mask=mask, **named(cache), **options), first)
        with counted() as calls:
            assert torch.equal(model.generate(text, attention_mask=longer, **named(cache), **options), second)
        assert not calls["expanded"], "the cache was not empty"
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        assert torch.equal(generated(model, **named(cache)), eager_tokens("deepseek_v3"))


def test_a_step_that_ended_in_an_error():
    """Half of the layers have its tokens: nothing goes on from there until they are taken back."""
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()

    def fails(*_):
        raise OSError

    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 40)
        with pytest.raises(NoGradient):
            model(ids, **named(cache))
        cache.crop(-20)
        by_hand(model, cache, ids, mask, ((0, 14),))
        hook = model.model.layers[0].mlp.register_forward_pre_hook(fails)
        with pytest.raises(OSError):
            by_hand(model, cache, ids, mask, ((14, 16),))
        hook.remove()
        longer = torch.cat([mask, mask.new_ones(3, 9)], 1)
        for begin in (16, 15):  # as it stands, and with one of the two positions taken back
            with pytest.raises(InvalidInput, match="did not reach every layer"):
                by_hand(model, cache, ids, longer, ((begin, begin + 1),))
            cache.crop(-1)
        ours = by_hand(model, cache, ids, mask, STEPS[1:])
    assert relative(ours, eager_logits("deepseek_v3")[-len(ours) :]) < LIMIT


def test_another_batch_after_a_reset():
    """The states of linear attention have the shape of a batch."""
    model = tiny.model("kimi_linear")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(4, 40)
        by_hand(model, cache, tokens(1), left_padded(1), STEPS[:2])
        cache.reset()
        assert torch.equal(generated(model, **named(cache)), eager_tokens("kimi_linear"))


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


def test_a_cache_that_is_handed_out_stays_whole():
    """What generate() returns belongs to the caller: the next call takes other pages."""
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged"):
        result = generated(model, return_dict_in_generate=True)
        cache = cache_of(result)
        assert isinstance(cache, PagedLatentCache)
        before = cache.pages_of(0).clone()
        again = cache_of(generated(model, return_dict_in_generate=True))
        assert again.pages_of(0).data_ptr() != cache.pages_of(0).data_ptr() and torch.equal(cache.pages_of(0), before)
        freed = again.pages_of(0).data_ptr()
        del again
        gc.collect()
        assert cache_of(generated(model, return_dict_in_generate=True)).pages_of(0).data_ptr() == freed


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


def in_generate(model, batch, counter, **more):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": left_padded(batch, 9, (0, 3, 1)), **more}
    if counter is not None:
        how: Any = CompileConfig(fullgraph=True, backend=counter)
        how.mode, how._compile_all_devices = None, True
        options["compile_config"] = how
    return model.generate(tokens(batch, 9), **options)


@pytest.mark.full
def test_generate_does_not_recompile():
    model = tiny.model("deepseek_v3")
    want = {batch: in_generate(model, batch, None) for batch in (1, 2, 3)}
    counter = Counter()
    with attnops.patch(model, cache="paged") as handle:
        for batch in (3, 2, 1):
            assert torch.equal(in_generate(model, batch, counter), want[batch])
        warm = len(counter)
        assert 0 < warm <= 3
        for batch in (3, 2, 3, 1, 3):
            assert torch.equal(in_generate(model, batch, counter), want[batch])
        assert len(counter) == warm
        assert torch.equal(in_generate(model, 3, counter, **named(handle.new_cache(3, 14))), want[3])
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


def test_generated_code():
    """A layer's decode step names its kernel, and nothing as large as the pages is allocated or copied."""
    model, ids, mask = tiny.model("minicpm3", num_hidden_layers=1), tokens(2, 16), left_padded(2, 16)
    want = logits(model, "dynamic", ids, mask, ((0, 14), (14, 15)))[-2:]
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(2, 24, page_size=8)
        by_hand(model, cache, ids, mask, ((0, 14),))
        model.model.layers[0].self_attn.compile(fullgraph=True)
        ours, code = compiled_code(lambda: by_hand(model, cache, ids, mask, ((14, 15),)))
        pages = tuple(cache.pages_of(0).shape)
    assert relative(ours, want) < LIMIT
    assert kernel_calls(code) == ["mla_attention.reference"]
    assert pages not in allocated(code)
