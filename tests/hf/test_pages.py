"""Numbers of models over pages of keys and values or of latents: eager's, however the text is cut,
and after tokens were taken back."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from attnops.core.errors import InvalidInput, NoGradient
from attnops.hf import tiny
from attnops.hf.attention import over_pages as paged_attention
from attnops.hf.cache import model_pages
from attnops.hf.cache.names import named
from attnops.hf.cache.page_sizes import DRAFTS
from tests.hf.helpers import (
    KEYED,
    LATENT,
    SLIDING,
    STEPS,
    by_hand,
    eager_logits,
    generated,
    gives_eagers_tokens,
    left_padded,
    logits,
    near,
    paged,
    poisoned,
    relative,
    tokens,
)
from tests.hf.kinds import attending, both, pages_of

LONG = 100
# Prefill; single tokens; more than a window's pages have room for, over an empty cache and a filled
# one; a step of a few.
TURNS = ((0, 14), (14, 15), (15, 16), (16, 18), (18, 70), (70, 71), (71, 90), (90, 91), (91, LONG))


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", [*KEYED, *LATENT])
def test_tokens(name, small_pages):
    model = tiny.model(name)
    want = generated(model, new=5)
    with paged(model) as handle, attending(name) as calls:
        assert torch.equal(generated(model, new=5), want)
        layers = sum(bool(row.phases) for row in handle.report().patched)
        assert (calls.later, calls.first, calls.beside) == (4 * layers, layers, 0)
        assert torch.equal(generated(model, new=5), want), "with the pages of the call before"
        assert len(small_pages) == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [*SLIDING, "llama", "gpt2", "qwen3_next", *LATENT])
def test_logits_of_long_texts(name):
    """In pages, then in transformers' own cache, of a model that is patched for pages."""
    model, ids, mask = tiny.model(name), tokens(3, LONG), left_padded(3, LONG)
    want = logits(model, "dynamic", ids, mask, TURNS)
    with paged(model) as handle:
        cache = poisoned(handle, 5, LONG)
        with attending(name) as calls:
            near(by_hand(model, cache, ids, mask, TURNS), want)
        pages = cache.state.pages
        windowed = sum(pages.windows[table] > 0 for table in pages.table_of)
        assert calls.beside == windowed, (
            "the step of 52 tokens, where the window is shorter than the text"
        )
        assert bool(windowed) == (name in SLIDING)
        with attending(name) as calls:
            near(logits(model, "dynamic", ids, mask, TURNS[:3]), want[: 3 * 16 - 8])
        assert not calls.later + calls.first + calls.beside


def test_a_step_that_fails_is_counted_as_unfinished(monkeypatch):
    """A step whose kernels cannot be chosen leaves no position that nothing was written to."""
    model, ids = tiny.model("llama"), tokens(2, 9)
    with paged(model, decode="hf") as handle:
        cache = handle.new_cache(2, 20)
        by_hand(model, cache, ids, torch.ones_like(ids), ((0, 8),))

        def fails(pages):
            raise RuntimeError("no kernel")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no kernel"):
            patch.setattr(model_pages.ModelPages, "one_launch", fails)
            by_hand(model, cache, ids, torch.ones_like(ids), ((8, 9),))
        assert (int(cache.get_seq_length()), cache.state.unfinished) in ((8, 0), (9, 1))


def test_padding_that_is_written_in_place_is_seen():
    """The batches of coming steps are not those of the padding that was."""
    model, ids = tiny.model("llama"), tokens(2, 8)
    heads = model.config.num_attention_heads

    def lengths(handle, write):
        cache = handle.new_cache(2, 40, page_size=4)
        by_hand(model, cache, ids, torch.ones_like(ids), ((0, 8),))
        start = torch.zeros(2, dtype=torch.int64)
        cache.view(0, start, 1, heads)
        cache.wrote(cache.last_layer)
        return cache.view(0, write(start), 1, heads).batch.seq_lens.clone()

    with paged(model, decode="hf") as handle:
        got = lengths(handle, lambda start: start.fill_(2))
        assert torch.equal(got, lengths(handle, lambda start: start + 2))
        assert got.tolist() == [8, 8]


CUTS = (
    ((0, 1), (1, 60), (60, 61)),
    ((0, 60), (60, 92), (92, 93)),
    ((0, 2), (2, 35), (35, 68), (68, 69)),
    ((0, 70),),
    STEPS[:3],
)


@both("mistral")
@pytest.mark.parametrize("steps", CUTS)
def test_however_the_text_is_cut(steps, name):
    """The first step of one token is padding for some rows. In the last text a row has no token at
    all."""
    model, end = tiny.model(name), steps[-1][1]
    ids, mask = tokens(3, end), left_padded(3, end, (3, 40, 0))
    want = logits(model, "dynamic", ids, mask, steps)
    with paged(model) as handle:
        for size in (1, 4, 16):
            near(by_hand(model, poisoned(handle, 3, end, size), ids, mask, steps), want)


@both("gpt_oss")
def test_what_is_stored(name):
    """Padding is not. What is in pages of rows that the batch has not, here NaN, is not read."""
    model = tiny.model(name)
    with paged(model) as handle:
        cache = poisoned(handle, 5, 60)
        gives_eagers_tokens(model, name, **named(cache))
        stored = int((cache.get_seq_length() - cache.state.pages.pad[:3]).sum())
        for pages in (*pages_of(cache, 0), *pages_of(cache, 1)):
            assert torch.isfinite(pages).flatten(2).all(-1).sum() == stored


# Models without experts, which rounding would swap.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("name", ["llama", "minicpm3"])
def test_half_precision(name, dtype):
    model, cast = tiny.model(name), dtype == "autocast"
    dtype = torch.float32 if cast else dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), paged(model.to(dtype)) as handle:
        cache = handle.new_cache(3, 20)
        assert pages_of(cache)[0].dtype == dtype
        ours = by_hand(model, cache, tokens(), left_padded()).float()
    assert relative(ours, eager_logits(name)) < 0.1


# Windows ------------------------------------------------------------------------------------------


def test_pages_behind_the_window_are_used_again():
    """A sliding layer's pages are those of the window and a few tokens, however long the text;
    layers of a kind share a table."""
    with paged(tiny.model("gemma3")) as handle:
        short, long = (
            handle.new_cache(2, length, page_size=4).state.pages for length in (100, 1000)
        )
    assert short.windows == long.windows == (8, 0) and short.table_of == (0, 0, 1)
    assert [t.shape[1] for t in short.tables] == [11, 25] and [t.shape[1] for t in long.tables] == [
        11,
        250,
    ]
    assert 8 - 1 + DRAFTS <= (11 - 1) * 4 + 1, "wherever in a page the window begins"
    assert [keys.shape[0] for keys, _ in long.layers] == [23, 23, 501]


def test_no_two_tokens_of_a_step_go_to_one_place(monkeypatch):
    """Which of them would stay is not said: of a step longer than a window's pages the first tokens
    are not written."""
    model, given = tiny.model("mistral"), []
    real = paged_attention.write_kv

    def spy(key, value, k_pages, v_pages, slots, **more):
        given.append(slots[slots >= 0])
        real(key, value, k_pages, v_pages, slots)

    monkeypatch.setattr(paged_attention, "write_kv", spy)
    with paged(model) as handle:
        cache = handle.new_cache(3, LONG, page_size=4)
        by_hand(model, cache, tokens(3, LONG), left_padded(3, LONG), ((0, 60), (60, LONG)))
        room = 3 * cache.state.pages.tables[0].shape[1] * 4
    assert all(len(slots) == len(slots.unique()) for slots in given)
    assert len(given[0]) == room, "as many as there is room for"


# What is taken back -------------------------------------------------------------------------------


@both("mistral")
def test_rollback(name):
    model, ids, mask = tiny.model(name), tokens(3, LONG), left_padded(3, LONG)
    steps = tuple((i, i + 1) for i in range(80, 84))
    want = logits(model, "dynamic", ids, mask, ((0, 80), *steps))[-12:]
    with paged(model) as handle:
        cache = handle.new_cache(3, 80 + DRAFTS, page_size=4)
        by_hand(model, cache, tokens(seed=9), left_padded(), ((0, 3),))
        cache.crop(-3)
        by_hand(model, cache, ids, mask, ((0, 80),))
        for drafts in (DRAFTS, 5):
            by_hand(
                model,
                cache,
                tokens(3, 80 + drafts, seed=9),
                left_padded(3, 80 + drafts),
                ((80, 80 + drafts),),
            )
            cache.crop(torch.tensor(-drafts))
        near(by_hand(model, cache, ids, mask, steps), want)
        if name == "mistral":
            with pytest.raises(
                InvalidInput, match="window of 8 needs tokens whose pages were used again"
            ):
                cache.crop(-40)
            assert int(cache.get_seq_length()) == 84, "nothing is forgotten"
        cache.crop(-84)
        near(by_hand(model, cache, ids, mask, ((0, 80), *steps))[-12:], want)


def test_what_crop_is_told():
    """As transformers' layers are: below 0 what to take back, be it a number or a tensor of one.
    Above 0 what to keep, as they were up to transformers 5.23."""
    model = tiny.model("llama")
    with paged(model) as handle:
        for said, left in ((-5, 9), (12, 12), (99, 14), (0, 14), (-99, 0)):
            for asked in (said, torch.tensor(said)):
                caches: list[Any] = [handle.new_cache(3, 20)]
                if said <= 0:
                    caches.append(DynamicCache(config=model.config))
                for cache in caches:
                    by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
                    cache.crop(asked)
                    assert int(cache.get_seq_length()) == left, asked
        [cache, *_] = caches
        by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
        for layer in cache.layers:
            layer.crop(-2)
        assert int(cache.get_seq_length()) == 12, "layers share the length"
        for layer in cache.layers:
            layer.reset()
        assert int(cache.get_seq_length()) == 0 and not cache.state.filled


def test_all_layers_are_cropped_or_none():
    """Whichever comes first: states of linear attention cannot go back unless they were asked to
    beforehand."""
    model = tiny.model(
        "qwen3_next", num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]
    )
    with paged(model) as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, tokens(), left_padded(), STEPS[:1])
        with pytest.raises(RuntimeError, match="does not track past states"):
            cache.crop(-4)
        assert int(cache.get_seq_length()) == 14


@both("gemma2")
def test_a_step_that_ended_in_an_error(name):
    """Half of the layers have its tokens: nothing goes on from there until they are taken back."""
    model, ids, mask = tiny.model(name), tokens(), left_padded()

    def fails(*_):
        raise OSError

    with paged(model) as handle:
        cache = handle.new_cache(3, 60, page_size=4)
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
    near(ours, eager_logits(name)[-len(ours) :])


# Layers of other kinds ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "kimi_linear"])
def test_layers_of_other_kinds_keep_their_own_states(name):
    """Whose shape is that of a batch, so that a reset makes them anew."""
    model = tiny.model(name)
    with paged(model) as handle:
        assert (
            sum(bool(row.phases) for row in handle.report().rows) < model.config.num_hidden_layers
        )
        cache = handle.new_cache(4, 40)
        by_hand(model, cache, tokens(1), left_padded(1), STEPS[:2])
        cache.reset()
        gives_eagers_tokens(model, name, **named(cache))


def test_layers_without_any_cache():
    """Of experts alone, between others. To transformers 5.24 they are layers of another kind."""
    config = transformers.NemotronHConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        layers_block_type=["mamba", "attention", "moe", "attention"],
        vocab_size=128,
        pad_token_id=0,
    )
    model = transformers.NemotronHForCausalLM(config).eval()
    want = generated(model)
    with paged(model) as handle:
        assert torch.equal(generated(model), want) and handle.took.cache == "paged"
