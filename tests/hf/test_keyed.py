"""Models of ordinary attention over pages: eager's tokens and logits however one generates, windows that give their pages back."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.paged import attention as paged_attention
from attnops.hf.paged.pages import DRAFTS
from tests.hf.helpers import (
    KEYED,
    LIMIT,
    SLIDING,
    STEPS,
    by_hand,
    generated,
    left_padded,
    logits,
    over_pages,
    poison,
    relative,
    tokens,
)

LONG = 100
# Prefill; single tokens; more than a window's pages have room for, over an empty cache and a filled one; a step of a few.
TURNS = ((0, 14), (14, 15), (15, 16), (16, 18), (18, 70), (70, 71), (71, 90), (90, 91), (91, LONG))


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", KEYED)
def test_tokens(name, small_pages):
    model = tiny.model(name)
    want = generated(model, new=5)
    with attnops.patch(model, cache="paged") as handle, over_pages() as calls:
        assert torch.equal(generated(model, new=5), want)
        layers = sum(bool(row.phases) for row in handle.report().patched)
        assert calls == {"paged": 4 * layers, "alone": layers, "beside": 0}
        assert torch.equal(generated(model, new=5), want), "with the pages of the call before"
        assert len(small_pages) == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [*SLIDING, "llama", "gpt2", "qwen3_next"])
def test_logits_of_long_texts(name):
    """In pages, then in transformers' own cache, of a model that is patched for pages."""
    model, ids, mask = tiny.model(name), tokens(3, LONG), left_padded(3, LONG)
    want = logits(model, "dynamic", ids, mask, TURNS)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(5, LONG, page_size=4)
        poison(cache)
        with over_pages() as calls:
            assert relative(by_hand(model, cache, ids, mask, TURNS), want) < LIMIT
        windowed = sum(cache.state.pages.windows[table] > 0 for table in cache.state.pages.table_of)
        assert calls["beside"] == windowed, "the step of 52 tokens, where the window is shorter than the text"
        assert bool(windowed) == (name in SLIDING)
        with over_pages() as calls:
            assert relative(logits(model, "dynamic", ids, mask, TURNS[:3]), want[: 3 * 16 - 8]) < LIMIT
        assert not any(calls.values())


CUTS = (((0, 1), (1, 60), (60, 61)), ((0, 60), (60, 92), (92, 93)), ((0, 2), (2, 35), (35, 68), (68, 69)), ((0, 70),))


@pytest.mark.parametrize("steps", CUTS)
def test_however_the_text_is_cut(steps):
    model, end = tiny.model("mistral"), steps[-1][1]
    ids, mask = tokens(3, end), left_padded(3, end, (3, 40, 0))
    want = logits(model, "dynamic", ids, mask, steps)
    with attnops.patch(model, cache="paged") as handle:
        for size in (1, 4, 16):
            cache = handle.new_cache(3, end, page_size=size)
            poison(cache)
            assert relative(by_hand(model, cache, ids, mask, steps), want) < LIMIT


def test_pages_behind_the_window_are_used_again():
    """A sliding layer's pages are those of the window and a few tokens, however long the text; layers of a kind share a table."""
    model = tiny.model("gemma3")
    with attnops.patch(model, cache="paged") as handle:
        short, long = (handle.new_cache(2, length, page_size=4).state.pages for length in (100, 1000))
    assert short.windows == long.windows == (8, 0) and short.table_of == (0, 0, 1)
    assert [t.shape[1] for t in short.tables] == [11, 25] and [t.shape[1] for t in long.tables] == [11, 250]
    assert 8 - 1 + DRAFTS <= (11 - 1) * 4 + 1, "wherever in a page the window begins"
    assert [keys.shape[0] for keys, _ in long.layers] == [23, 23, 501]


def test_no_two_tokens_of_a_step_go_to_one_place(monkeypatch):
    """Which of them would stay is not said: of a step longer than a window's pages the first tokens are not written."""
    model, given = tiny.model("mistral"), []
    real = paged_attention.write_kv

    def spy(key, value, k_pages, v_pages, slots):
        given.append(slots[slots >= 0])
        real(key, value, k_pages, v_pages, slots)

    monkeypatch.setattr(paged_attention, "write_kv", spy)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, LONG, page_size=4)
        by_hand(model, cache, tokens(3, LONG), left_padded(3, LONG), ((0, 60), (60, LONG)))
        room = 3 * cache.state.pages.tables[0].shape[1] * 4
    assert all(len(slots) == len(slots.unique()) for slots in given)
    assert len(given[0]) == room, "as many as there is room for"


# Ways to generate -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_assistant_that_drafts_more_than_a_window_has_room_for(small_pages):
    """How much it drafts stands in its own config. All of it may be taken back."""
    model, helper = tiny.model("mistral"), tiny.model("llama", seed=1)
    helper.generation_config.num_assistant_tokens = 2 * DRAFTS
    helper.generation_config.assistant_confidence_threshold = 0
    one: dict[str, Any] = {"attention_mask": left_padded(1, 20), "max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False}
    want = model.generate(tokens(1, 20), **one)
    with attnops.patch(model, cache="paged"):
        assert torch.equal(model.generate(tokens(1, 20), assistant_model=helper, **one), want)
        assert torch.equal(model.generate(tokens(1, 20), **one), want)
    assert [pages.windows for pages in small_pages] == [(0,), (8,)]


def test_a_cache_that_the_checkpoint_names_is_kept_and_told(recwarn):
    model, options = tiny.model("gemma2"), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(tokens(), **options)
    model.generation_config.cache_implementation = "static"
    with attnops.patch(model, cache="paged"), over_pages() as calls:
        with pytest.warns(UserWarning, match="asks for the cache 'static'"):
            assert torch.equal(model.generate(tokens(), **options), want)
        assert not any(calls.values())
        model.generation_config.cache_implementation = None
        recwarn.clear()
        assert torch.equal(model.generate(tokens(), **options), want) and any(calls.values())
        assert not [w for w in recwarn if "asks for the cache" in str(w.message)]


def test_rollback():
    model, ids, mask = tiny.model("mistral"), tokens(3, LONG), left_padded(3, LONG)
    want = logits(model, "dynamic", ids, mask, ((0, 80), *((i, i + 1) for i in range(80, 84))))[-12:]
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 80 + DRAFTS, page_size=4)
        by_hand(model, cache, ids, mask, ((0, 80),))
        for drafts in (DRAFTS, 5):
            by_hand(model, cache, tokens(3, 80 + drafts, seed=9), left_padded(3, 80 + drafts), ((80, 80 + drafts),))
            cache.crop(torch.tensor(-drafts))
        steps = tuple((i, i + 1) for i in range(80, 84))
        assert relative(by_hand(model, cache, ids, mask, steps), want) < LIMIT
        with pytest.raises(InvalidInput, match="window of 8 needs tokens whose pages were used again"):
            cache.crop(-40)
        assert int(cache.get_seq_length()) == 84, "nothing is forgotten"
        cache.crop(-84)
        assert relative(by_hand(model, cache, ids, mask, ((0, 80), *steps))[-12:], want) < LIMIT


def test_what_crop_is_told():
    """As transformers' layers are: below 0 what to take back, be it a number or a tensor of one. Above 0 what to keep, as they were up to
    transformers 5.23."""
    model = tiny.model("llama")
    with attnops.patch(model, cache="paged") as handle:
        for said, left in ((-5, 9), (12, 12), (99, 14), (0, 14), (-99, 0)):
            for asked in (said, torch.tensor(said)):
                caches: list[Any] = [handle.new_cache(3, 20), *([DynamicCache(config=model.config)] if said <= 0 else [])]
                for cache in caches:
                    by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
                    cache.crop(asked)
                    assert int(cache.get_seq_length()) == left, asked


def test_layers_crop_and_reset_the_length_that_they_share():
    with attnops.patch(model := tiny.model("llama"), cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
        before = int(cache.get_seq_length())
        for layer in cache.layers:
            layer.crop(-2)
        assert int(cache.get_seq_length()) == before - 2
        for layer in cache.layers:
            layer.reset()
        assert int(cache.get_seq_length()) == 0 and not cache.state.filled


def test_all_layers_are_cropped_or_none():
    """Whichever comes first: states of linear attention cannot go back unless they were asked to beforehand."""
    model = tiny.model("qwen3_next", num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
        with pytest.raises(RuntimeError, match="does not track past states"):
            cache.crop(-4)
        assert int(cache.get_seq_length()) == 14


def test_layers_without_any_cache():
    """Of experts alone, between others. To transformers 5.24 they are layers of another kind."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    states = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    kinds = {"layers_block_type": ["mamba", "attention", "moe", "attention"], "vocab_size": 128, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes, **states, **experts, **kinds)).eval()
    want = generated(model)
    with attnops.patch(model, cache="paged") as handle:
        assert torch.equal(generated(model), want) and handle.took.cache == "paged"
