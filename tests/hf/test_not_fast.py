"""`NotFast`: a model that could have had pages or graphs and does not get them says so, once a
process and class of model."""

import warnings

import pytest
import torch
from transformers import GenerationMixin

import attnops
from attnops.core.errors import NotFast
from attnops.hf import Took, not_fast, tiny
from attnops.hf.private import PREPARE
from tests.hf.decoding import auto, graphed
from tests.hf.helpers import paged, tokens

GIVEN = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def model():
    return tiny.model("llama")


def told_by(call):
    """The NotFast warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if w.category is NotFast]


def told_in(model, **more):
    """Those of a generate()."""
    return told_by(lambda: model.generate(tokens(1, 6), **GIVEN, **more))


def test_tests_see_it_as_an_error(model):
    with pytest.raises(NotFast):
        not_fast.warn(model, not_fast.PAGES, "a test's reason")


def test_once_a_class_and_loss(model):
    """As Python shows it by default, from one place as from several."""
    others = [tiny.model("llama"), tiny.model("qwen3")]
    losses = not_fast.PAGES, not_fast.GRAPHS, not_fast.COMPILED, not_fast.CHOICE

    def call():
        for _ in range(2):
            for each in (model, *others):
                for loss in losses:
                    not_fast.warn(each, loss, "a test's reason")

    told = told_by(call)
    assert len(told) == len(set(told)) == 2 * len(losses)
    for text in told:
        assert "a test's reason" in text and (
            "LlamaForCausalLM" in text or "Qwen3ForCausalLM" in text
        )


@pytest.mark.parametrize("name", ["t5", "kimi_linear"])
def test_on_a_cpu_nobody_is_told(name):
    model = tiny.model(name)
    with attnops.patch(model) as handle:
        assert told_in(model) == []
        assert "pages and graphs are for a GPU" in handle.took.why


def test_the_way_out_that_it_names(model, monkeypatch):
    """What the text tells a user to do asks for the same, and is silent."""
    model = tiny.model("kimi_linear")
    with attnops.patch(model, decode=auto()) as handle:
        [text] = told_in(model)
        assert handle.took.cache == "hf" and "have states, which a cache of latents" in text
    assert 'attnops.patch(model, cache="hf")' in text
    attnops.core.errors._WARNED.clear()
    with attnops.patch(model, cache="hf", decode=auto()) as handle:
        assert told_in(model) == [] and handle.took.cache == "hf"


def test_pages_that_were_asked_for_without_graphs():
    """patch() itself says so, once the model is patched."""
    model, handles = tiny.model("kimi_linear"), []
    [text] = told_by(lambda: handles.append(paged(model, decode=auto())))
    assert (
        "KimiLinearForCausalLM has no CUDA graphs" in text
        and 'decode="hf"' in text
        and "have states, which a cache of latents" in text
    )
    with handles[0] as handle:
        assert told_in(model) == []
        assert (handle.took.cache, handle.took.decode) == ("paged", "hf")
    assert told_by(lambda: paged(model, decode="hf").unpatch()) == []


def settled(handle):
    """The warnings of a first `generate()`, as far as the model as a whole decides."""
    return told_by(handle._settle) + told_by(handle._tell)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"kernel": "flex"}, "flex"), ({"mask": "additive"}, "additive masks were asked for")],
)
def test_options_are_the_callers_choice(options, why, model):
    with attnops.patch(model, decode=auto(), **options) as handle:
        assert settled(handle) == [] and handle._paged is None
        assert any(why in note for note in handle.report().notes)


def test_a_cache_that_the_checkpoint_names(model):
    model.generation_config.cache_implementation = "static"
    with attnops.patch(model, decode=auto()) as handle:
        [text] = told_in(model)
        assert (
            "set model.generation_config.cache_implementation = None for pages" in text
            and handle.took.cache == "hf"
        )
        attnops.core.errors._WARNED.clear()
        # Beside the caller's own choice it is no reason.
        assert told_in(model, num_beams=2) == []
        model.generation_config.cache_implementation = None
        model.generate(tokens(1, 6), **GIVEN)
        assert handle.took == Took("paged", "breakable")


def test_arguments_that_keep_steps_out_of_graphs(model):
    """As tokenizers bring them unasked. What the caller asks for is no surprise."""
    model._validate_model_kwargs = lambda _: (
        None
    )  # the model takes them, and hands them to its layers
    for asked, told in (
        ({"seq_idx": torch.zeros(1, 6)}, 1),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, 0),
    ):
        attnops.core.errors._WARNED.clear()
        with graphed(model) as handle:
            texts = told_in(model, **asked)
            assert len(texts) == told and all(
                "no CUDA graphs for its decode steps: they get seq_idx" in text for text in texts
            )
            assert handle.plain_steps == GIVEN["max_new_tokens"] - 1


def other_arguments(self, generation_config, model_kwargs, batch_size):
    raise AssertionError("it is not to be called")


@pytest.mark.parametrize(
    ("of_class", "why"),
    [(False, f"has a {PREPARE} of other arguments"), (True, f"whose {PREPARE} is its own")],
)
def test_a_method_that_makes_caches_otherwise(of_class, why, model, monkeypatch):
    """It is refused at patch() where pages are asked for, and said where they are not."""
    kind = type(model)
    real = getattr(kind, PREPARE)

    def own(self, *given):
        return real(self, *given)

    monkeypatch.setattr(
        kind if of_class else GenerationMixin, PREPARE, own if of_class else other_arguments
    )
    with pytest.raises(attnops.core.errors.PatchError, match=why):
        paged(model)
    with attnops.patch(model, decode=auto()) as handle:
        [text] = settled(handle)
        assert why in text
