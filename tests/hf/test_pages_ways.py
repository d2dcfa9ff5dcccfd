"""Over pages generate() gives eager's tokens in every way to generate; compiled, it makes no graph
anew for another batch or length."""

import gc
from typing import Any

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.hf import PagedKeyCache, PagedLatentCache, tiny
from attnops.hf.cache.names import cache_in, cache_of, named
from attnops.hf.cache.page_sizes import DRAFTS
from tests.hf.helpers import (
    LATENT,
    Counter,
    allocated,
    by_hand,
    generated,
    gives_eagers_tokens,
    in_generate,
    left_padded,
    logits,
    near,
    paged,
    poison,
    poisoned,
    tokens,
)
from tests.hf.kinds import attending, both, pages_of
from tests.lowering.models import compiled_code, kernel_calls


@pytest.mark.sweep(2)
@both("mistral")
def test_assisted_generation(name, small_pages):
    """Rejected drafts are taken back, also more than a window has room for. The helper, patched
    too, keeps transformers' cache.

    How much it drafts stands in its own config.
    """
    # transformers itself fails with a helper of sliding windows that drafts so much.
    model, helper = tiny.model(name), tiny.model("llama" if name == "mistral" else name, seed=1)
    helper.generation_config.num_assistant_tokens = 2 * DRAFTS
    helper.generation_config.assistant_confidence_threshold = 0
    one: dict[str, Any] = {
        "attention_mask": left_padded(1, 60),
        "max_new_tokens": 50,
        "min_new_tokens": 50,
        "do_sample": False,
    }
    want = model.generate(tokens(1, 60), **one)
    with paged(model), paged(helper), attending(name) as calls:
        assert torch.equal(model.generate(tokens(1, 60), assistant_model=helper, **one), want)
        assert calls.later and len(small_pages) == 1
        assert torch.equal(model.generate(tokens(1, 60), **one), want)
    assert small_pages[0].windows == (0,) and small_pages[-1].windows == (
        (8,) if name == "mistral" else (0,)
    )


@both("gemma2")
def test_beam_search_takes_no_cache_of_pages(name):
    model = tiny.model(name)
    with paged(model) as handle:
        assert any("but in beam search, as an assistant" in note for note in handle.report().notes)
        with pytest.raises(InvalidInput, match="num_beams"):
            generated(model, new=6, num_beams=2, **named(handle.new_cache(6, 40)))


# Whose pages they are -----------------------------------------------------------------------------


@both("gpt_oss")
def test_turns(name):
    """A second turn over the same cache, with the whole text given again. Then the cache is emptied
    and used for another batch."""
    model, mask = tiny.model(name), left_padded(3, 40)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    first = model.generate(tokens(3, 40), attention_mask=mask, **options)
    text = torch.cat([first, tokens(3, 4, seed=7)], 1)
    longer = torch.cat([mask, mask.new_ones(3, 24)], 1)
    second = model.generate(text, attention_mask=longer, **options)
    with paged(model) as handle:
        cache = poisoned(handle, 4, 100)
        assert torch.equal(
            model.generate(tokens(3, 40), attention_mask=mask, **named(cache), **options), first
        )
        with attending(name) as calls:
            assert torch.equal(
                model.generate(text, attention_mask=longer, **named(cache), **options), second
            )
        assert not calls.first, "the cache was not empty"
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        gives_eagers_tokens(model, name, **named(cache))


def test_pages_of_two_calls():
    """Kept pages fit the calls before as well, where that costs little: not many short rows times
    one long row."""
    model = tiny.model("deepseek_v3")
    options = {"do_sample": False, "return_dict_in_generate": True}

    def sizes(rows, length):
        cache = cache_of(model.generate(tokens(rows, 4), max_new_tokens=length - 3, **options))
        return cache.max_batch, cache.max_length

    with paged(model):
        assert sizes(3, 10) == (3, 10)
        assert sizes(2, 16) == (3, 16) and sizes(3, 8) == (3, 16)
        assert sizes(1, 200) == (1, 208), "rounded up"
        assert sizes(40, 6) == (40, 6)


@both("mistral")
def test_a_cache_that_is_handed_out_stays_whole(name):
    """What generate() returns belongs to the caller: the next call takes other pages."""
    model = tiny.model(name)

    def handed_out():
        return cache_of(generated(model, return_dict_in_generate=True))

    with paged(model):
        cache = handed_out()
        assert isinstance(cache, PagedLatentCache if name in LATENT else PagedKeyCache)
        pages = pages_of(cache)[0]
        before, again = pages.clone(), handed_out()
        freed = pages_of(again)[0].data_ptr()
        assert freed != pages.data_ptr() and torch.equal(pages, before)
        del again
        gc.collect()
        assert pages_of(handed_out())[0].data_ptr() == freed


def test_a_cache_that_is_kept_in_secret_is_an_error():
    model, kept = tiny.model("deepseek_v3"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: kept.append(cache_in(kwargs)), with_kwargs=True
    )
    with paged(model):
        generated(model, new=2)
        with pytest.raises(InvalidInput, match="has ended"):
            generated(model, new=2, **named(kept[0]))


# Compiled -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def anew():
    """transformers' wrapper of forward is one function for all models, and the compiler's limit is
    one a function."""
    torch._dynamo.reset()


# Rows, length of the prompt, new tokens. The first three, of each kind of batch, are what it takes
# to warm up.
CALLS = (
    (3, 9, 4),
    (2, 9, 4),
    (1, 9, 4),
    (3, 12, 5),
    (2, 70, 6),
    (1, 30, 40),
    (5, 20, 4),
    (3, 9, 4),
    (4, 50, 30),
    (1, 100, 5),
)
LONG_CALLS = ((3, 60, 6), (2, 60, 6), (3, 70, 20), (2, 100, 9))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "own"), [("llama", False), ("deepseek_v3", False), ("gpt_oss", True)]
)
def test_generate_does_not_recompile(name, own):
    """One table for windows, one for what sees all, and no more graphs than that takes.

    own: with caches of the caller's, of another size each.
    """
    model, counter, graphs = tiny.model(name), Counter(), []
    calls = LONG_CALLS if own else CALLS
    want = [in_generate(model, *call, None) for call in calls]
    with paged(model) as handle:
        for call, eager in zip(calls, want, strict=True):
            more = {}
            if own:
                cache = poisoned(handle, call[0] + 1, sum(call[1:]) + 5)
                more = named(cache)
            assert torch.equal(in_generate(model, *call, counter, **more), eager)
            graphs.append(len(counter))
    warm = 2 if own else 3
    assert graphs[warm - 1] == graphs[-1] == warm, graphs
    attention, write = (
        ("mla_attention", "write_latent") if name in LATENT else ("paged_attention", "write_kv")
    )
    for graph in counter.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        layers = sum(attention in target for target in called)
        assert layers == len(handle.report().patched) == sum(write in target for target in called)
        assert sum("slot_mapping" in target for target in called) == 1 + own, (
            "metadata are made once a step"
        )


@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral", "minicpm3"])
def test_a_loop_by_hand(name):
    """The whole model compiled, 2-D masks included: prefill, decode, and a chunk longer than what a
    window's pages have room for."""
    steps, batches = ((0, 9), (9, 10), (10, 60)), (3, 2, 3, 2)
    model, counter, graphs = tiny.model(name, num_hidden_layers=1), Counter(), []
    masks = {batch: left_padded(batch, 60) for batch in batches}
    want = {
        batch: logits(model, "dynamic", tokens(batch, 60), mask, steps)
        for batch, mask in masks.items()
    }
    with paged(model) as handle:
        cache = handle.new_cache(3, 64, page_size=4)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for batch in batches:
            cache.reset()
            poison(cache)
            ours = by_hand(compiled, cache, tokens(batch, 60), masks[batch], steps)
            near(ours, want[batch])
            graphs.append(len(counter))
        assert graphs[0] > 0 and graphs[1] == graphs[3], "no more once it has seen two batch sizes"
        # Where the host cannot look the device asserts: nothing wrong comes back.
        ids, mask = tokens(2, 68), torch.cat([masks[2], torch.ones(2, 8, dtype=torch.int64)], 1)
        holed = mask.clone()
        holed[0, 6] = 0
        too_long = tuple((i, i + 1) for i in range(60, 68))
        for wrong, then in (
            (holed, ((60, 61),)),
            (torch.ones_like(mask), ((60, 61),)),
            (mask, too_long),
        ):
            cache.reset()
            by_hand(compiled, cache, ids, mask, steps)
            with pytest.raises(RuntimeError, match="pages cannot follow"):
                by_hand(compiled, cache, ids, wrong, then)


@pytest.mark.parametrize(
    ("name", "prompt", "called"),
    [
        ("minicpm3", 14, [["mla_attention.reference"]]),
        pytest.param(
            "mistral",
            60,
            [["paged_attention.sdpa"], ["paged_attention.reference"]],
            marks=pytest.mark.full,
        ),
    ],
)
def test_generated_code(name, prompt, called):
    """A layer's decode step names its kernel and allocates nothing as large as the pages."""
    model = tiny.model(name, num_hidden_layers=1)
    ids = tokens(2, prompt + 2)
    mask = left_padded(2, prompt + 2)
    steps = ((0, prompt), (prompt, prompt + 1))
    want = logits(model, "dynamic", ids, mask, steps)[-2:]
    with paged(model) as handle:
        cache = handle.new_cache(3, 90, page_size=8)
        by_hand(model, cache, ids, mask, steps[:1])
        model.model.layers[0].self_attn.compile(fullgraph=True)
        ours, code = compiled_code(lambda: by_hand(model, cache, ids, mask, steps[1:]))
        pages = tuple(pages_of(cache)[0].shape)
    near(ours, want)
    assert [call for call in kernel_calls(code) if "attention" in call] in called
    assert pages not in allocated(code)
