"""Every family gives eager's logits and tokens: decoders with each cache and padding, encoders,
models of two parts, own masks."""

import functools
from typing import Any

import pytest
import torch
import transformers

import attnops
from attnops.hf import tiny
from attnops.hf.cache.names import named
from tests.hf.helpers import (
    COMPACT,
    DECODERS,
    LIMIT,
    STEPS,
    generated,
    left_padded,
    logits,
    make_cache,
    near,
    relative,
    tokens,
    watched,
)

CACHES = [None, "dynamic", "static"]
MODES = pytest.mark.parametrize("mode", ["dense", "compact"])
MATRIX = [*(("dense", name) for name in DECODERS), *(("compact", name) for name in COMPACT)]
# transformers 5.17 passes block_sequence_ids to create_chunked_causal_mask, which does not take it.
STATIC_GENERATE_BROKEN = ("llama4",)

# Built once a process. What eager gives is computed by models that no test patches, lest a patched
# one be compared with itself.
untouched, shared = functools.cache(tiny.model), functools.cache(tiny.model)


def model_of(name):
    """The model that all tests here patch, each for itself."""
    model = shared(name)
    assert model.config._attn_implementation == "eager", "the test before has left it patched"
    return model


@pytest.mark.sweep(9)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("mode", "name"), MATRIX)
def test_decoders(mode, name, cache):
    model = model_of(name)
    want = logits(untouched(name), cache, tokens(), left_padded())
    with attnops.patch(model, mask=mode), watched() as calls:
        ours = logits(model, cache, tokens(), left_padded())
    near(ours, want)
    lengths = any(call["kv_start"] is not None for call in calls)
    assert calls and lengths == (mode == "compact" and name != "doge"), (
        "doge computes with its masks, so it has no lengths"
    )
    assert (
        mode == "dense" or name in ("doge", "llama4") or all(call["mask"] is None for call in calls)
    )
    if cache == "static" and name in STATIC_GENERATE_BROKEN:
        pytest.skip(
            f"transformers itself cannot generate with a static cache for {name}: "
            "create_chunked_causal_mask() raises TypeError"
        )
    kind = None if cache == "dynamic" else cache
    want = generated(untouched(name), kind=kind)
    with attnops.patch(model, mask=mode):
        assert torch.equal(generated(model, kind=kind), want)


@MODES
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_without_a_mask(name, mode):
    """Nothing is padded and no mask is given. The reference has an all-ones mask."""
    model, ids = model_of(name), tokens()
    for cache in CACHES:
        want = logits(model, cache, ids, torch.ones_like(ids))
        with attnops.patch(model, mask=mode), torch.no_grad():
            past = make_cache(cache, model)
            steps = STEPS if past is not None else STEPS[:1]
            parts = [
                model(ids[:, a:b], **named(past), use_cache=past is not None).logits.flatten(0, 1)
                for a, b in steps
            ]
        assert relative(torch.cat(parts), want) < LIMIT, cache


# Padding on the right, behind which more tokens come: then it is a hole. Tokens that are masked in
# the middle. A row without any.
GAPS = {
    "right": lambda mask: mask[:, :14].copy_(left_padded(3, 14).flip(1)),
    "holes": lambda mask: mask[::2, 3:7].fill_(0),
    "empty": lambda mask: mask[2].fill_(0),
}


@pytest.mark.sweep(5)
@MODES
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen2_moe", "qwen3_next"]
)
@pytest.mark.parametrize("gaps", GAPS)
def test_gaps(gaps, name, cache, mode):
    """Positions that are no padding agree; nothing of the others spills over, or becomes NaN."""
    model, mask = model_of(name), torch.ones(3, 20, dtype=torch.int64)
    GAPS[gaps](mask)
    want = logits(model, cache, tokens(), mask)
    with attnops.patch(model, mask=mode):
        near(logits(model, cache, tokens(), mask), want)


@MODES
def test_assisted_generation(mode):
    model, helper = model_of("llama"), tiny.model("llama", seed=1)
    one = {"attention_mask": left_padded()[:1, :14], "max_new_tokens": 8, "do_sample": False}
    want = model.generate(tokens()[:1, :14], **one)
    with attnops.patch(model, mask=mode), attnops.patch(helper, mask=mode):
        assert torch.equal(model.generate(tokens()[:1, :14], assistant_model=helper, **one), want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_the_users_own(dtype):
    model, ids = model_of("llama"), tokens(2, 9)
    see = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    see |= torch.eye(9, dtype=torch.bool)
    additive = torch.where(see, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = model(ids, attention_mask=additive).logits
        with attnops.patch(model):
            ours = model(ids, attention_mask=see if dtype == torch.bool else additive).logits
    near(ours, want)


# Encoders, and models of two parts ----------------------------------------------------------------

IDS = tokens(2, 9)
PADDED = torch.ones_like(IDS)
PADDED[0, -3:] = 0
FEATURES = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WITH_IMAGE = torch.cat([torch.full((2, 4), 120), IDS], 1)
BOTH = {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS[:, :5]}
INPUTS: dict[str, dict[str, Any]] = {
    "t5": BOTH,
    "bart": BOTH,
    "whisper": {"input_features": FEATURES, "decoder_input_ids": IDS[:, :5]},
    "bert": {"input_ids": IDS, "attention_mask": PADDED},
    "llava": {
        "input_ids": WITH_IMAGE,
        "pixel_values": IMAGES,
        "attention_mask": torch.ones_like(WITH_IMAGE),
    },
}
# Attention modules: encoder, decoder and cross for two layers each; vision and text for two layers
# each.
MODULES = {"t5": 6, "bart": 6, "whisper": 6, "bert": 2, "llava": 4}
# The last layer of a vision tower may not be asked for.
CALLED = {**MODULES, "llava": 3}
SIDES = {None: slice(0), "left": slice(2), "right": slice(3, 5)}


@MODES
@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, None) for name in INPUTS),
        *((name, side) for name in ("t5", "bart") for side in ("left", "right")),
    ],
)
def test_encoders(name, side, mode):
    """side: where padding of the decoder is, beside that of the encoder."""
    model, inputs, seen = tiny.model(name), dict(INPUTS[name]), torch.ones(2, 5, dtype=torch.int64)
    seen[1, SIDES[side]] = 0
    if side:
        inputs["decoder_attention_mask"] = seen
    with torch.no_grad():
        want = model(**inputs).logits
        with attnops.patch(model, mask=mode) as handle, watched() as calls:
            ours = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, want), "unpatched it is the same model as before"
    assert len(handle.report().patched) == MODULES[name] and len(calls) >= CALLED[name]
    assert torch.isfinite(ours).all()
    shown = seen.bool() if side else ...
    near(ours[shown], want[shown])
    only_biases = all(call["mask"] is None or call["mask"].is_floating_point() for call in calls)
    assert mode == "dense" or only_biases, "only position biases are masks"


@MODES
@pytest.mark.parametrize(
    ("name", "cache"),
    [("whisper", None), *((n, c) for n in ("t5", "bart", "llava") for c in (None, "static"))],
)
def test_generate(name, cache, mode):
    model = tiny.model(name)
    inputs = {key: value for key, value in INPUTS[name].items() if key != "decoder_input_ids"}
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": 1,
        "cache_implementation": cache,
    }
    want = model.generate(**inputs, **options)
    with attnops.patch(model, mask=mode):
        assert torch.equal(model.generate(**inputs, **options), want)


@MODES
def test_a_bidirectional_decoder(mode):
    """is_causal=False on a decoder's config makes its masks bidirectional."""
    model, mask = tiny.model("llama", is_causal=False), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :4] = mask[1, 15:] = 0
    with torch.no_grad():
        want = model(tokens(), attention_mask=mask, use_cache=False).logits
        causal = untouched("llama")(tokens(), attention_mask=mask, use_cache=False).logits
        with attnops.patch(model, mask=mode):
            ours = model(tokens(), attention_mask=mask, use_cache=False).logits
    assert relative(causal, want) > 0.01
    near(ours[mask.bool()], want[mask.bool()])


def test_only_a_part_of_a_model():
    """The text model of a vision-language model can be patched by itself; the vision tower stays as
    it was."""
    model = tiny.model("llava")
    with torch.no_grad():
        want = model(**INPUTS["llava"]).logits
        with attnops.patch(model.model.language_model):
            assert model.config.vision_config._attn_implementation == "eager"
            near(model(**INPUTS["llava"]).logits, want)
            with attnops.patch(model):
                near(model(**INPUTS["llava"]).logits, want)
            assert model.config.text_config._attn_implementation == "attnops"
        assert torch.equal(model(**INPUTS["llava"]).logits, want)


def test_a_head_that_makes_a_mask_for_itself():
    """SigLIP 2 pools by torch's own attention, over a mask of transformers': lengths would be
    nothing to it."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = transformers.Siglip2VisionConfig(**sizes, num_patches=16, patch_size=4)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation="eager").eval()
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, 12:] = 0
    inputs = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[3, 4], [4, 4]]),
    }
    with torch.no_grad():
        want = model(**inputs).pooler_output
        for mode in ("auto", "compact"):
            with attnops.patch(model, mask=mode) as handle:
                assert handle.report().mask == "explicit"
                near(model(**inputs).pooler_output, want)


def test_there_are_enough_families():
    assert len(DECODERS) >= 30
