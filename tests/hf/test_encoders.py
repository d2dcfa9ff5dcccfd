"""Encoder-decoder, encoder and vision-language models: bidirectional masks, cross-attention, position biases, two configs."""

import pytest
import torch
import transformers

import attnops
from attnops.hf import tiny
from tests.hf.helpers import LIMIT, Counter, generated, relative, tokens, watched

IDS = tokens(2, 9)
PADDED = torch.ones_like(IDS)
PADDED[0, -3:] = 0
FEATURES = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WITH_IMAGE = torch.cat([torch.full((2, 4), 120), IDS], 1)
LEFT = torch.ones_like(WITH_IMAGE)
LEFT[0, :0] = 0

INPUTS = {
    "t5": {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS[:, :5]},
    "bart": {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS[:, :5]},
    "whisper": {"input_features": FEATURES, "decoder_input_ids": IDS[:, :5]},
    "bert": {"input_ids": IDS, "attention_mask": PADDED},
    "llava": {"input_ids": WITH_IMAGE, "pixel_values": IMAGES, "attention_mask": torch.ones_like(WITH_IMAGE)},
}
MODES = ["dense", "compact"]
# Attention modules: encoder, decoder and cross for two layers each; vision and text for two layers each.
MODULES = {"t5": 6, "bart": 6, "whisper": 6, "bert": 2, "llava": 4}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INPUTS)
def test_forward(name, mode):
    model = tiny.model(name)
    with torch.no_grad():
        want = model(**INPUTS[name]).logits
        with attnops.patch(model, mask=mode) as handle, watched() as calls:
            ours = model(**INPUTS[name]).logits
        again = model(**INPUTS[name]).logits
    # The last layer of a vision tower may not be asked for.
    assert len(handle.report().patched) == MODULES[name] and len(calls) >= MODULES[name] - (name == "llava")
    assert torch.isfinite(ours).all()
    assert relative(ours, want) < LIMIT
    assert torch.equal(again, want), "unpatched it is the same model as before"
    if mode == "compact":
        assert all(call["mask"] is None or call["mask"].is_floating_point() for call in calls), "only position biases are masks"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decoder_mask", ["left", "right"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_on_both_sides_of_the_cross_attention(name, decoder_mask, mode):
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, slice(0, 2) if decoder_mask == "left" else slice(3, 5)] = 0
    inputs = {**INPUTS[name], "decoder_attention_mask": mask}
    model = tiny.model(name)
    with torch.no_grad():
        want = model(**inputs).logits
        with attnops.patch(model, mask=mode):
            ours = model(**inputs).logits
    assert torch.isfinite(ours).all()
    assert relative(ours[mask.bool()], want[mask.bool()]) < LIMIT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["t5", "bart", "llava"])
def test_generate(name, cache, mode):
    model = tiny.model(name)
    inputs = {key: value for key, value in INPUTS[name].items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 1, "cache_implementation": cache}
    want = model.generate(**inputs, **options)
    with attnops.patch(model, mask=mode):
        assert torch.equal(model.generate(**inputs, **options), want)


def test_whisper_generates():
    model = tiny.model("whisper")
    options = {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(FEATURES, **options)
    with attnops.patch(model):
        assert torch.equal(model.generate(FEATURES, **options), want)


@pytest.mark.parametrize("mode", MODES)
def test_a_bidirectional_decoder(mode):
    """is_causal=False on a decoder's config makes its masks bidirectional."""
    model = tiny.model("llama", is_causal=False)
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, :4] = mask[1, 15:] = 0
    with torch.no_grad():
        want = model(tokens(), attention_mask=mask, use_cache=False).logits
        causal = tiny.model("llama")(tokens(), attention_mask=mask, use_cache=False).logits
        with attnops.patch(model, mask=mode):
            ours = model(tokens(), attention_mask=mask, use_cache=False).logits
    assert relative(causal, want) > 0.01
    assert relative(ours[mask.bool()], want[mask.bool()]) < LIMIT


def skip_unless_it_compiles_as_it_is(model, inputs):
    """Dynamo of torch 2.11 has no copy.deepcopy of a config, and counts llava's masked_scatter wrong: a patch mends neither."""
    try:
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.InternalTorchDynamoError) as error:
        pytest.skip(f"torch {torch.__version__} cannot compile the model before it is patched: {str(error).splitlines()[0]}")
    torch._dynamo.reset()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", INPUTS)
def test_fullgraph(name):
    model = tiny.model(name)
    with torch.no_grad():
        want = model(**INPUTS[name]).logits
        if torch.__version__ < "2.12":
            skip_unless_it_compiles_as_it_is(model, INPUTS[name])
        attnops.patch(model)
        counter = Counter()
        ours = torch.compile(model, fullgraph=True, backend=counter)(**INPUTS[name]).logits
    assert len(counter) == 1 and sum("attnops.attention" in target for target in counter.targets()) >= MODULES[name] - (name == "llava")
    assert relative(ours, want) < LIMIT


def test_only_a_part_of_a_model():
    """The text model of a vision-language model can be patched by itself; the vision tower stays as it was."""
    model = tiny.model("llava")
    with torch.no_grad():
        want = model(**INPUTS["llava"]).logits
        with attnops.patch(model.model.language_model):
            assert model.config.vision_config._attn_implementation == "eager"
            assert relative(model(**INPUTS["llava"]).logits, want) < LIMIT
            whole = attnops.patch(model)
            assert relative(model(**INPUTS["llava"]).logits, want) < LIMIT
            whole.unpatch()
            assert model.config.text_config._attn_implementation == "attnops"
        assert torch.equal(model(**INPUTS["llava"]).logits, want)
    assert generated(tiny.model("llama")) is not None


def test_a_head_that_makes_a_mask_for_itself():
    """SigLIP 2 pools by torch's own attention, over a mask of transformers': lengths would be nothing to it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(**sizes, num_patches=16, patch_size=4)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation="eager").eval()
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, 12:] = 0
    inputs = {"pixel_values": torch.randn(2, 16, 48), "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[3, 4], [4, 4]])}
    with torch.no_grad():
        want = model(**inputs).pooler_output
        for mode in ("auto", "compact"):
            with attnops.patch(model, mask=mode) as handle:
                assert handle.report().mask == "explicit"
                assert relative(model(**inputs).pooler_output, want) < LIMIT
