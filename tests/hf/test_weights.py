"""output_attentions=True gives attention weights back, as eager attention does, for that call
alone."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.cache.names import named
from tests.hf.helpers import LIMIT, generated, left_padded, near, relative, static, tokens, watched
from tests.hf.test_parity import INPUTS

pytestmark = pytest.mark.filterwarnings("ignore:attnops")
KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def same(ours, eager, seen=...):
    for kind in KINDS:
        got, want = getattr(ours, kind, None), getattr(eager, kind, None)
        assert (got is None) == (want is None), kind
        for one, other in zip(got or (), want or (), strict=True):
            assert one.shape == other.shape
            near(one.transpose(1, 2)[seen], other.transpose(1, 2)[seen])
    return sum(len(getattr(eager, kind, None) or ()) for kind in KINDS)


DECODER = {"input_ids": tokens(), "attention_mask": left_padded()}
TRIED = {
    **dict.fromkeys(
        ("llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "qwen3_next"), DECODER
    ),
    **INPUTS,
}


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", TRIED)
def test_weights(name, mode):
    model, inputs, seen = tiny.model(name), dict(TRIED[name]), left_padded().bool()
    if name in INPUTS:
        inputs.pop("attention_mask", None)
        seen = ...
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True)
        with attnops.patch(model, mask=mode), watched() as calls:
            with pytest.warns(UserWarning, match="output_attentions"):
                ours = model(**inputs, output_attentions=True)
            assert same(ours, eager, seen) and (not calls or name == "llava"), (
                "whose images return none"
            )
            near(ours.logits[seen], eager.logits[seen])
            assert not any(getattr(model(**inputs), kind, None) for kind in KINDS) and calls


@pytest.mark.parametrize("cache", [None, "static"])
def test_weights_of_generate(cache):
    model = tiny.model("gpt_oss")
    more = {
        "output_attentions": True,
        "return_dict_in_generate": True,
        "new": 3,
        "kind": cache,
        "attention_mask": None,
    }
    want = generated(model, **more)
    for how in ({}, {"mask": "compact"}, {"cache": "paged"}):
        told = (
            pytest.warns(UserWarning, match="transformers' own cache")
            if "cache" in how and cache is None
            else nullcontext()
        )
        with attnops.patch(model, **how), told:
            got = generated(model, **more)
        assert torch.equal(got.sequences, want.sequences)
        for ours, eager in zip(got.attentions, want.attentions, strict=True):
            for one, other in zip(ours, eager, strict=True):
                assert one.shape == other.shape and relative(one, other) < LIMIT


def test_pages_have_no_weights():
    model = tiny.model("llama")
    handle = attnops.patch(model, cache="paged")
    with pytest.raises(InvalidInput, match="output_attentions"):
        model(tokens(), **named(handle.new_cache(3, 32)), output_attentions=True)


def test_a_config_that_asks_for_weights(tmp_path):
    """Before the patch or after it, as the argument does. The config is saved as it says, and other
    attention is refused as before."""
    model = transformers.LlamaForCausalLM(
        tiny.config("llama", attn_implementation="eager", output_attentions=True)
    ).eval()
    with torch.no_grad():
        eager = model(tokens())
        with attnops.patch(model) as handle:
            assert same(model(tokens()), eager)
            model.config.output_attentions = False
            assert not model(tokens()).attentions
            model.config.output_attentions = True
            assert same(model(tokens()), eager)
            model.save_pretrained(tmp_path)
            model.set_attn_implementation("eager")
            assert same(model(tokens()), eager)
            handle.unpatch()
        with attnops.patch(model, cache="paged"):
            model.generate(tokens(), max_new_tokens=2)
    assert json.loads((tmp_path / "config.json").read_text())["output_attentions"] is True
    other = transformers.LlamaForCausalLM(tiny.config("llama", attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="output_attentions"):
        other.config.output_attentions = True
    other.config._output_attentions = True
    with pytest.raises(StrictDataclassError, match="validate_output_attentions"):
        other.config.validate()


@pytest.mark.parametrize("cache", [False, True], ids=["all keys", "an empty static cache"])
def test_gradients_of_weights(cache):
    """The output is made of the weights that are returned."""
    made, found = [], []
    for ours in (False, True):
        model = tiny.model("llama")
        given = named(static(model, 32)) if cache else {}
        with attnops.patch(model) if ours else nullcontext():
            made.append(model(tokens(), **given, output_attentions=True))
            for weights in made[-1].attentions:
                weights.retain_grad()
            made[-1].logits.sum().backward()
        found.append([weights.grad for weights in made[-1].attentions])
    assert same(made[1], made[0]) and made[1].attentions[0].shape[-1] == (32 if cache else 20)
    for want, got in zip(*found, strict=True):
        # Weights of keys that are not there yet have a gradient of their own in transformers' way.
        assert got is not None and relative(got[..., :20], want[..., :20]) < LIMIT


def test_a_compiled_model_gives_weights():
    model = tiny.model("llama", num_hidden_layers=1)
    with torch.no_grad():
        eager = model(tokens(), output_attentions=True)
        attnops.patch(model)
        assert same(torch.compile(model, backend="eager")(tokens(), output_attentions=True), eager)
