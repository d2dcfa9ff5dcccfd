"""The names of transformers' cache: one module knows them, and a caller may use each that this
transformers takes."""

import inspect
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

import attnops
from attnops.hf import Decode, tiny
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.names import NAME, argument, cache_in, cache_of, named, renamed
from tests.graphs.standin import StandIn
from tests.helpers import sources
from tests.hf.helpers import tokens

OLD = "past_key_values"


class OldModel:
    """A model of the user's, whose code is older than transformers."""

    def forward(self, input_ids, past_key_values=None):
        pass


class NewModel:
    def forward(self, input_ids, cache=None):
        pass


class AnyModel:
    def forward(self, *args, **kwargs):
        pass


def test_no_other_module_names_it():
    found = {name for name, path in sources().items() if "past_key_value" in path.read_text()}
    assert found == {"attnops.hf.cache.names"}


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v3", "gemma3", "llava"])
def test_it_is_the_name_of_this_transformers(name):
    model = tiny.model(name)
    assert NAME in inspect.signature(type(model).forward).parameters
    assert argument(model, "a cache") == named("a cache") == {NAME: "a cache"}
    assert NAME in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for kind in (CausalLMOutputWithPast, GenerateDecoderOnlyOutput):
        assert NAME in [field.name for field in fields(kind)]
    attentions = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    taking = [m for m in attentions if cache_names.layer_takes_cache(type(m))]
    assert taking and cache_names.model_takes_cache(type(model))
    assert not cache_names.layer_takes_cache(type(model.get_input_embeddings()))


def test_a_model_of_the_users_keeps_its_name(monkeypatch):
    """As transformers 5.24 has it, whose models take `cache`."""
    monkeypatch.setattr(cache_names, "NAME", "cache")
    monkeypatch.setattr(cache_names, "_BY_ITS_NAME", ("cache", OLD))
    for model, name in ((OldModel(), OLD), (NewModel(), "cache"), (AnyModel(), "cache")):
        assert argument(model, 1) == {name: 1}
        for other in ("cache", OLD):
            given = {"input_ids": 0, other: 1}
            assert renamed(given, cache_names.argument_of(model)) == {"input_ids": 0, name: 1}
            assert cache_in(given) == 1 and given[other] == 1, "the caller's are as they were"
    both = {"cache": 1, OLD: 2}
    assert renamed(both, "cache") is both and cache_in(both) == 1
    assert cache_in({"cache": None, OLD: 2}) == 2 and cache_in({"use_cache": True}) is None


def test_the_cache_of_a_result():
    cache = DynamicCache()
    for result in (CausalLMOutputWithPast(**named(cache)), SimpleNamespace(**{OLD: cache})):
        assert cache_of(result) is cache
    for result in (CausalLMOutputWithPast(), SimpleNamespace(), torch.zeros(1), None):
        assert cache_of(result) is None


@pytest.mark.parametrize("name", sorted({NAME, OLD}))
def test_a_patched_model_takes_each_name(name):
    """In graphs, too, and without a warning of transformers', which would name our code."""
    model, ids = tiny.model("llama"), tokens(2, 9)
    given = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(ids, **given)
    with torch.no_grad():
        last = model(want[:, :-1]).logits[:, -1:]
    with (
        attnops.patch(model, decode=Decode("breakable", graphs=StandIn())) as handle,
        torch.no_grad(),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for cache in (handle.new_cache(2, 24), DynamicCache(config=model.config)):
                assert torch.equal(model.generate(ids, **{name: cache}, **given), want)
            cache = handle.new_cache(2, 24)
            first = model(want[:, :-2], **{name: cache})
            second = model(want[:, -2:-1], **{name: cache_of(first)})
        assert cache_of(first) is cache is cache_of(second)
        assert (second.logits - last).abs().max() < 1e-4
        assert handle.graphs is not None
