"""Every family gives eager's logits and eager's tokens: no cache, growing cache, static cache, left padding, generate."""

import functools

import pytest
import torch

import attnops
from attnops.hf import tiny
from attnops.hf.cache_names import named
from tests.hf.helpers import COMPACT, DECODERS, LIMIT, generated, left_padded, logits, make_cache, relative, tokens, watched

CACHES = [None, "dynamic", "static"]
# transformers 5.17 passes block_sequence_ids to create_chunked_causal_mask, which does not take it.
STATIC_GENERATE_BROKEN = ("llama4",)


# Built once a process. What eager gives is computed by models that no test patches, lest a patched one be compared with itself.
untouched, shared = functools.cache(tiny.model), functools.cache(tiny.model)


def model_of(name):
    """The model that all tests here patch, each for itself."""
    model = shared(name)
    assert model.config._attn_implementation == "eager", "the test before has left it patched"
    return model


@functools.cache
def eager_logits(name, cache):
    return logits(untouched(name), cache, tokens(), left_padded())


@functools.cache
def eager_tokens(name, cache):
    return generated(untouched(name), kind=cache)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_logits(name, cache):
    model = model_of(name)
    with attnops.patch(model, mask="dense"), watched() as calls:
        ours = logits(model, cache, tokens(), left_padded())
    assert calls
    assert relative(ours, eager_logits(name, cache)) < LIMIT


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", COMPACT)
def test_logits_compact(name, cache):
    model = model_of(name)
    with attnops.patch(model, mask="compact"), watched() as calls:
        ours = logits(model, cache, tokens(), left_padded())
    assert relative(ours, eager_logits(name, cache)) < LIMIT
    lengths = [call["kv_start"] is not None for call in calls]
    assert any(lengths) == (name != "doge"), "doge computes with its masks, so it must not be given lengths"
    if name not in ("doge", "llama4"):
        assert all(call["mask"] is None for call in calls)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("mask", "name"), [*(("dense", name) for name in DECODERS), *(("compact", name) for name in COMPACT)])
def test_generate(mask, name, cache):
    if cache == "static" and name in STATIC_GENERATE_BROKEN:
        pytest.skip(f"transformers itself cannot generate with a static cache for {name}: create_chunked_causal_mask() raises TypeError")
    model = model_of(name)
    with attnops.patch(model, mask=mask):
        assert torch.equal(generated(model, kind=cache), eager_tokens(name, cache))


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_without_a_mask(name, mode):
    """Nothing is padded and no mask is given. The reference has an all-ones mask."""
    model, ids = model_of(name), tokens()
    ones = torch.ones_like(ids)
    for cache in CACHES:
        want = logits(model, cache, ids, ones)
        with attnops.patch(model, mask=mode), torch.no_grad():
            past = make_cache(cache, model)
            steps = [(0, 14), (14, 15), (15, 16), (16, 18), (18, 19), (19, 20)] if past is not None else [(0, 14)]
            parts = [model(ids[:, a:b], **named(past), use_cache=past is not None).logits.flatten(0, 1) for a, b in steps]
        assert relative(torch.cat(parts), want) < LIMIT, cache


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen2_moe"])
def test_right_padding(name, mode):
    """Positions before the padding agree; those in it are garbage in every implementation, and finite."""
    model, ids, mask = model_of(name), tokens(), left_padded().flip(1)
    want = logits(model, None, ids, mask, steps=((0, 20),))
    with attnops.patch(model, mask=mode):
        assert relative(logits(model, None, ids, mask, steps=((0, 20),)), want) < LIMIT


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_a_request_without_any_token(name, mode):
    """One row of the batch is padding only. Nothing of it may spill over, and nothing may become NaN."""
    model, ids, mask = model_of(name), tokens(), left_padded()
    want = logits(model, "dynamic", ids, mask, steps=((0, 14),))
    mask[2] = 0
    with attnops.patch(model, mask=mode):
        ours = logits(model, "dynamic", ids, mask, steps=((0, 14),))
    others = int(left_padded()[:2, :14].sum())
    assert relative(ours, want[:others]) < LIMIT


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_mask_with_holes(cache, mode):
    """Tokens are masked in the middle: lengths cannot say that, so both modes give a mask."""
    model, ids, mask = model_of("llama"), tokens(), left_padded()
    mask[0, 6] = mask[2, 3:5] = 0
    want = logits(model, cache, ids, mask)
    with attnops.patch(model, mask=mode):
        assert relative(logits(model, cache, ids, mask), want) < LIMIT


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_inside_a_conversation(cache, mode):
    """Right padding, then more tokens: the padding has become a hole."""
    model, ids, mask = model_of("mistral"), tokens(), torch.ones(3, 20, dtype=torch.int64)
    mask[0, 5:9] = mask[1, 8:9] = 0
    steps = ((0, 9), (9, 12), (12, 13), (13, 14))
    want = logits(model, cache, ids, mask, steps=steps)
    with attnops.patch(model, mask=mode):
        assert relative(logits(model, cache, ids, mask, steps=steps), want) < LIMIT


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prefill_chunk_size": 4}, {"num_beams": 2, "num_return_sequences": 2}, {"repetition_penalty": 1.3}],
    ids=lambda options: "-".join(options),
)
def test_ways_to_generate(options, mode):
    model = model_of("llama")
    want = generated(model, **options)
    with attnops.patch(model, mask=mode):
        assert torch.equal(generated(model, **options), want)


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_assisted_generation(mode):
    model, helper = model_of("llama"), tiny.model("llama", seed=1)
    one = {"attention_mask": left_padded()[:1, :14], "max_new_tokens": 8, "do_sample": False}
    want = model.generate(tokens()[:1, :14], **one)
    with attnops.patch(model, mask=mode), attnops.patch(helper, mask=mode):
        assert torch.equal(model.generate(tokens()[:1, :14], assistant_model=helper, **one), want)


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_packed_requests(mode):
    """Two requests in one row, told apart by their positions: neither sees the other."""
    model, ids = model_of("llama"), tokens(1, 12)
    where = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        want = model(ids, position_ids=where, use_cache=False).logits
        apart = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
        with attnops.patch(model, mask=mode):
            ours = model(ids, position_ids=where, use_cache=False).logits
    assert relative(want, apart) < LIMIT
    assert relative(ours, want) < LIMIT


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_a_mask_of_the_users_own(mask_dtype):
    model, ids = model_of("llama"), tokens(2, 9)
    see = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    see |= torch.eye(9, dtype=torch.bool)
    additive = torch.where(see, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = model(ids, attention_mask=additive).logits
        with attnops.patch(model):
            ours = model(ids, attention_mask=see if mask_dtype == torch.bool else additive).logits
    assert relative(ours, want) < LIMIT


def test_there_are_enough_families():
    assert len(DECODERS) >= 30
