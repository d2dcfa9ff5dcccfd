"""patch, unpatch, report, verify: what they do to a model, and that nothing of it is left
behind."""

import inspect
import io
import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import attnops
from attnops.core.errors import InvalidInput, NoKernel, PatchError, UnknownKernel
from attnops.core.select import key_for
from attnops.hf import tiny
from attnops.hf.models.attention_modules import Usage, match, usage_of
from tests.hf.helpers import (
    DECODERS,
    ENCODERS,
    LIMIT,
    NOT_THROUGH_THE_INTERFACE,
    PARTLY,
    SPARSE,
    generated,
    left_padded,
    near,
    tokens,
    watched,
)
from tests.hf.kinds import everything

# One of each kind that pages hold.
PAGED = ("llama", "deepseek_v2", "kimi_linear", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((n, "auto") for n in (*DECODERS, *ENCODERS)), *((n, "paged") for n in PAGED)],
)
def test_unpatch_leaves_nothing(name, cache):
    model, want = tiny.model(name), None
    if cache == "paged":
        want = generated(model, new=3)  # which makes transformers note something on the model
    before, weights = everything(model), {k: v.clone() for k, v in model.state_dict().items()}
    handle = attnops.patch(model, cache=cache)
    assert handle.active and {
        m.config._attn_implementation for m in model.modules() if usage_of(type(m))
    } == {handle.implementation}
    assert set(model.state_dict()) == set(weights)
    assert bool(handle.report().skipped) == (name in PARTLY)
    if want is not None:
        generated(model, new=3)
    handle.unpatch()
    handle.unpatch()
    assert everything(model) == before and not handle.active
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    if want is not None:
        assert torch.equal(generated(model, new=3), want)


def test_a_method_has_the_signature_of_the_one_it_stands_for(monkeypatch):
    """transformers asks for it at every call, and the class may have another meanwhile."""
    model = tiny.model("llama")

    def other(self, these): ...

    with attnops.patch(model):
        before = inspect.signature(model.generate)
        assert inspect.signature(model.generate) is before and "inputs" in before.parameters
        monkeypatch.setattr(type(model), "generate", other)
        assert [*inspect.signature(model.generate).parameters] == ["these"]


def test_a_second_call_gives_the_same_handle():
    model = tiny.model("llama")
    handle = attnops.patch(model)
    assert attnops.patch(model) is handle
    with pytest.raises(PatchError, match="unpatch"):
        attnops.patch(model, mask="compact")
    handle.unpatch()
    with pytest.raises(ZeroDivisionError), attnops.patch(model, mask="compact") as again:
        assert again is not handle and again.active
        raise ZeroDivisionError
    assert model.config._attn_implementation == "eager"


def test_unpatch_respects_a_later_choice():
    model = tiny.model("llama")
    handle = attnops.patch(model)
    model.set_attn_implementation("sdpa")
    handle.unpatch()
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_was_built_with_the_name():
    model = tiny.model("llama", attn_implementation="attnops")
    want = generated(tiny.model("llama"))
    with watched() as calls:
        assert torch.equal(generated(model), want)
    assert calls
    with attnops.patch(model):
        assert torch.equal(generated(model), want)
    assert model.config._attn_implementation == "attnops"


@pytest.mark.parametrize("name", NOT_THROUGH_THE_INTERFACE)
def test_a_family_that_computes_by_itself(name):
    model = tiny.model(name)
    before = everything(model)
    with pytest.raises(PatchError, match="computes attention by itself"):
        attnops.patch(model)
    assert everything(model) == before


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention(name):
    with pytest.raises(PatchError, match="indices"):
        attnops.patch(tiny.model(name))
    # Chosen by name it cannot be refused beforehand, but it is not run wrongly.
    model = tiny.model(name)
    model.config._attn_implementation_internal = "attnops"
    with pytest.raises(InvalidInput, match="indices"):
        model(tokens())


@pytest.mark.parametrize("what", [nn.Linear(2, 2), "a model", None])
def test_not_a_model_with_attention(what):
    with pytest.raises(PatchError):
        attnops.patch(what)


def test_a_model_of_two_kinds():
    """One attention module goes through the interface, another one does not: the first is patched,
    the second reported."""
    model = tiny.model("llava")
    model.model.extra = nn.MultiheadAttention(8, 2)
    rows = {row.path: row.status for row in attnops.patch(model).report().rows}
    assert rows["model.extra"].startswith(
        "skipped: MultiheadAttention computes attention by itself"
    )
    assert rows["model.language_model.layers.0.self_attn"] == "patched"


class KeepsItsMasks(nn.Module):
    """Attention that adds a float mask by itself, and holds the config of its neighbours."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, hidden_states, attention_mask):
        return hidden_states + attention_mask


class OddAttention(KeepsItsMasks):
    pass


def test_modules_that_share_a_config_stay_together(monkeypatch):
    """A neighbour that adds masks to scores would be handed bool masks. Its class never said that
    it can take them."""
    model = tiny.model("llama")
    model.model.layers[1].odd = OddAttention(model.config)
    with attnops.patch(model) as handle:  # Llama says that it can (_supports_sdpa)
        assert handle.report().mask == "explicit"
    for cls in (
        transformers.LlamaForCausalLM,
        transformers.LlamaModel,
        transformers.LlamaPreTrainedModel,
    ):
        monkeypatch.setattr(cls, "_supports_sdpa", False)
    with pytest.raises(PatchError, match=r"shares its config object with model.layers.1.odd"):
        attnops.patch(model)


# report() and verify() ----------------------------------------------------------------------------


def test_report():
    handle = attnops.patch(tiny.model("llava"), kernel="reference")
    report = handle.report()
    assert len(report.patched) == 4 and not report.skipped
    assert {row.cls for row in report.rows} == {"CLIPAttention", "LlamaAttention"}
    again = json.loads(json.dumps(report.to_dict()))
    assert (
        again["kernel"] == "reference"
        and again["rows"][0]["status"] == "patched"
        and again["notes"]
    )
    text = str(report)
    assert (
        "4 of 4" in text and "model.language_model.layers.1.self_attn" in text and "dropout" in text
    )
    assert "kernel=reference" in repr(handle)


def test_report_with_rich():
    rich = pytest.importorskip("rich.console", reason="the extra cli is not installed")
    written = io.StringIO()
    rich.Console(width=160, file=written).print(attnops.patch(tiny.model("llama")).report())
    assert "model.layers.0.self_attn" in written.getvalue()


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_verify(name, mode):
    model = tiny.model(name).train()
    handle = attnops.patch(model, mask=mode)
    figures = handle.verify(tokens(), attention_mask=left_padded())
    assert (
        figures.passed
        and figures.max_rel < LIMIT
        and figures.same_argmax == 1.0
        and figures.dtype == "float32"
    )
    assert figures.positions == int(left_padded().sum())
    json.dumps(figures.to_dict())
    assert "passed" in str(figures)
    assert model.training and model.config._attn_implementation == handle.implementation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verify_in_half_precision(dtype):
    assert (
        attnops.patch(tiny.model("llama").to(dtype))
        .verify(tokens(), attention_mask=left_padded())
        .passed
    )


def test_verify_fails_with_figures():
    handle = attnops.patch(tiny.model("llama"))
    with pytest.raises(PatchError, match=r"FAILED.*relative"):
        handle.verify(tokens(), tolerance=0.0)
    assert not handle.verify(tokens(), tolerance=0.0, strict=False).passed
    assert handle.active
    handle.unpatch()
    with pytest.raises(PatchError, match="not patched"):
        handle.verify(tokens())


def test_verify_of_other_outputs():
    bare = transformers.LlamaModel(tiny.config("llama", attn_implementation="eager"))
    assert attnops.patch(bare).verify(tokens()).output == "last_hidden_state"
    pixels = torch.ones(2, 3, 32, 32)
    ids = torch.cat([torch.full((2, 4), 120), tokens(2, 9)], 1)
    assert attnops.patch(tiny.model("llava")).verify(ids, pixel_values=pixels).passed


# kernel= ------------------------------------------------------------------------------------------


def test_a_forced_kernel():
    model, ids = tiny.model("llama"), tokens()
    with torch.no_grad():
        want = model(ids).logits
        for kernel in ("reference", "sdpa"):
            with attnops.patch(model, kernel=kernel), watched() as calls:
                near(model(ids).logits, want)
            assert {call["policy"] for call in calls} == {key_for("attention", kernel)}


def test_a_forced_kernel_that_cannot():
    model = tiny.model("gpt_oss")  # sinks, which torch's sdpa does not know
    with attnops.patch(model, kernel="sdpa"), pytest.raises(NoKernel, match="sinks"):
        model(tokens())
    with pytest.raises(UnknownKernel):
        attnops.patch(model, kernel="no_such")
    wrong: Any = "no_such"
    with pytest.raises(InvalidInput, match="mask"):
        attnops.patch(model, mask=wrong)
    assert model.config._attn_implementation == "eager"


# Configs ------------------------------------------------------------------------------------------


def test_a_config_shared_between_models():
    """Both switch, because transformers reads the implementation from the config; the report says
    so."""
    config = tiny.config("llama", attn_implementation="eager")
    one, two = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    assert one.config is two.config
    with attnops.patch(one) as handle:
        assert two.config._attn_implementation == "attnops"
        assert any("outside this model" in note for note in handle.report().notes)
        assert handle.verify(tokens()).passed
    assert two.config._attn_implementation == "eager"


def test_copied_configs_are_found():
    """T5's encoder and decoder hold copies of the config, which transformers' own switch misses in
    some versions."""
    model = tiny.model("t5")
    assert (
        model.encoder.config is not model.config
        and model.encoder.config._attn_implementation == "eager"
    )
    attnops.patch(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {
        "attnops"
    }


# Reading code -------------------------------------------------------------------------------------


def test_edited_masks_are_noticed():
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
    from transformers.models.esm.modeling_esm import EsmSelfAttention
    from transformers.models.t5.modeling_t5 import T5Attention

    # From 5.24 on its cache holds two parts of a key, which it joins afterwards.
    joins = "k_rot = cache.update(" in inspect.getsource(DeepseekV32Attention.forward)
    assert usage_of(DeepseekV32Attention) == Usage(
        ("indices",), edits_mask=True, edits_cached=joins
    )
    assert usage_of(EsmSelfAttention) == Usage((), edits_mask=False), (
        "choosing one of two parameters is no edit"
    )
    assert usage_of(T5Attention) == Usage((), edits_mask=False)
    assert usage_of(nn.Linear) is None


class Inherits(transformers.models.llama.modeling_llama.LlamaAttention):
    """Goes through the interface in the forward of its base."""


class Wraps(transformers.models.llama.modeling_llama.LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Replaces(transformers.models.llama.modeling_llama.LlamaAttention):
    def forward(self, hidden_states):
        return hidden_states


def test_subclasses():
    assert usage_of(Inherits) and usage_of(Wraps) and usage_of(Replaces) is None


def test_every_attention_module_is_a_row():
    for name in ("llama", "bart", "llava", "qwen3_next"):
        model = tiny.model(name)
        paths = {site.path for site in match(model).sites}
        assert paths == {
            path for path, m in model.named_modules() if type(m).__name__.endswith("Attention")
        }


def test_another_attention_set_after_the_patch():
    model = tiny.model("llama")
    with attnops.patch(model) as handle:
        model.set_attn_implementation("sdpa")
        assert all(
            row.status == "skipped: its attention was set to 'sdpa' after patch()"
            for row in handle.report().rows
        )
        with pytest.raises(PatchError, match="set to 'sdpa' after patch"):
            handle.verify(torch.arange(9)[None])
        model.set_attn_implementation(handle.implementation)
        assert handle.verify(torch.arange(9)[None]).passed and all(
            row.status == "patched" for row in handle.report().rows
        )
