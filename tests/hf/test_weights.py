"""output_attentions=True gives attention weights back, as eager attention does, for that call alone."""

import json
import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import StaticCache

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.cache_names import named
from tests.hf.helpers import LIMIT, generated, left_padded, relative, tokens, watched
from tests.hf.test_encoders import INPUTS

KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def same(ours, eager, seen=None):
    for kind in KINDS:
        got, want = getattr(ours, kind, None), getattr(eager, kind, None)
        assert (got is None) == (want is None), kind
        for one, other in zip(got or (), want or (), strict=True):
            assert one.shape == other.shape
            one, other = (x if seen is None else x.transpose(1, 2)[seen] for x in (one, other))
            assert relative(one, other) < LIMIT
    return sum(len(getattr(eager, kind, None) or ()) for kind in KINDS)


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "qwen3_next"])
def test_weights_of_a_decoder(name, mode):
    model, mask = tiny.model(name), left_padded()
    seen = mask.bool()
    with torch.no_grad():
        eager = model(tokens(), attention_mask=mask, output_attentions=True)
        with attnops.patch(model, mask=mode), watched() as calls:
            with pytest.warns(UserWarning, match="output_attentions"):
                ours = model(tokens(), attention_mask=mask, output_attentions=True)
            assert not calls
            assert not model(tokens(), attention_mask=mask).attentions
            assert calls
    assert same(ours, eager, seen) and relative(ours.logits[seen], eager.logits[seen]) < LIMIT


@pytest.mark.filterwarnings("ignore:attnops")
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "bert", "llava"])
def test_weights_of_other_models(name):
    model = tiny.model(name)
    inputs = {key: value for key, value in INPUTS[name].items() if key != "attention_mask"}
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True)
        with attnops.patch(model):
            assert same(model(**inputs, output_attentions=True), eager)


@pytest.mark.filterwarnings("ignore:attnops")
@pytest.mark.parametrize("cache", [None, "static"])
def test_weights_of_generate(cache):
    model = tiny.model("gpt_oss")
    more = {"output_attentions": True, "return_dict_in_generate": True, "new": 3, "kind": cache, "attention_mask": None}
    want = generated(model, **more)
    for how in ({}, {"mask": "compact"}, {"cache": "paged"}):
        with attnops.patch(model, **how):
            got = generated(model, **more)
        assert torch.equal(got.sequences, want.sequences)
        for ours, eager in zip(got.attentions, want.attentions, strict=True):
            for one, other in zip(ours, eager, strict=True):
                assert one.shape == other.shape and relative(one, other) < LIMIT


def test_an_empty_static_cache():
    model = tiny.model("llama")
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = model(tokens(), **named(caches[0]), output_attentions=True)
        with attnops.patch(model):
            ours = model(tokens(), **named(caches[1]), output_attentions=True)
    assert same(ours, eager) and ours.attentions[0].shape[-1] == 32


def test_pages_have_no_weights():
    model = tiny.model("llama")
    handle = attnops.patch(model, cache="paged")
    with pytest.raises(InvalidInput, match="output_attentions"):
        model(tokens(), **named(handle.new_cache(3, 32)), output_attentions=True)
    with pytest.warns(UserWarning, match="transformers' own cache"):
        got = generated(model, new=2, output_attentions=True, return_dict_in_generate=True)
    assert len(got.attentions) == 2


@pytest.mark.filterwarnings("ignore:attnops")
def test_a_config_that_asks_for_weights():
    model = transformers.LlamaForCausalLM(tiny.config("llama", attn_implementation="eager", output_attentions=True)).eval()
    with torch.no_grad():
        eager = model(tokens())
        with attnops.patch(model) as handle:
            assert same(model(tokens()), eager)
            model.set_attn_implementation("eager")
            assert same(model(tokens()), eager)
            handle.unpatch()
        with attnops.patch(model, cache="paged"):
            model.generate(tokens(), max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:attnops")
def test_a_config_that_asks_for_weights_after_the_patch(tmp_path):
    """As the argument does. The config is saved as it says, and other attention is refused as before."""
    model = tiny.model("llama")
    with torch.no_grad():
        eager = model(tokens(), output_attentions=True)
        with attnops.patch(model):
            model.config.output_attentions = True
            assert same(model(tokens()), eager)
            model.save_pretrained(tmp_path)
            model.config.output_attentions = False
            assert not model(tokens()).attentions
    assert json.loads((tmp_path / "config.json").read_text())["output_attentions"] is True
    other = transformers.LlamaForCausalLM(tiny.config("llama", attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="output_attentions"):
        other.config.output_attentions = True
    other.config._output_attentions = True
    with pytest.raises(StrictDataclassError, match="validate_output_attentions"):
        other.config.validate()


@pytest.mark.filterwarnings("ignore:attnops")
@pytest.mark.parametrize("cache", [False, True], ids=["all keys", "an empty static cache"])
def test_gradients_of_weights(cache):
    """The output is made of the weights that are returned."""
    found = []
    for ours in (False, True):
        model = tiny.model("llama")
        given = named(StaticCache(config=model.config, max_cache_len=32)) if cache else {}
        with attnops.patch(model) if ours else nullcontext():
            made = model(tokens(), **given, output_attentions=True)
            for weights in made.attentions:
                weights.retain_grad()
            made.logits.sum().backward()
        found.append([weights.grad for weights in made.attentions])
    for want, got in zip(*found, strict=True):
        # Weights of keys that are not there yet have a gradient of their own in transformers' way.
        assert got is not None and relative(got[..., : tokens().shape[1]], want[..., : tokens().shape[1]]) < LIMIT


@pytest.mark.filterwarnings("ignore:attnops")
def test_a_compiled_model_gives_weights():
    model = tiny.model("llama", num_hidden_layers=1)
    with torch.no_grad():
        eager = model(tokens(), output_attentions=True)
        attnops.patch(model)
        assert same(torch.compile(model, backend="eager")(tokens(), output_attentions=True), eager)
