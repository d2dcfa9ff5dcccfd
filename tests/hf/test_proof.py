"""Models that transformers keeps from its own sdpa are tried before they are patched, and get what
eager attention gets."""

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import attnops
from attnops.core.errors import InvalidInput, PatchError
from attnops.hf import mask_trials as proof, tiny
from attnops.hf.models.attention_modules import match
from benchmarks.census import models
from tests.hf.helpers import generated, left_padded, near, tokens

KINDS = models.kinds()
MODELS = ("bigbird_pegasus", "pegasus_x", "nllb-moe", "splinter", "deepseek_v4")


def build(name):
    if name not in KINDS:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return models.build(models.own(KINDS[name]))


def ids(*sizes, **more):
    return tokens(*sizes, **more).clamp(max=models.VOCAB - 1)


@torch.no_grad()
def outputs(model, **masks):
    more = {"decoder_input_ids": ids(3, 9, seed=2)} if model.config.is_encoder_decoder else {}
    return next(iter(proof.outputs_of(model(input_ids=ids(3, 12), **more, **masks)).values()))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_needs_eagers_masks(name):
    model, masks = build(name), {"attention_mask": left_padded(3, 12)}
    if model.config.is_encoder_decoder:
        masks["decoder_attention_mask"] = left_padded(3, 9, (0, 2, 4))
    seen = masks.get("decoder_attention_mask", masks["attention_mask"]).bool()
    want, padded = outputs(model), outputs(model, **masks)
    with attnops.patch(model) as handle:
        report = handle.report()
        assert (
            report.patched
            and report.mask == "additive"
            and any("a small twin" in note for note in report.notes)
        )
        near(outputs(model), want)
        near(outputs(model, **masks)[seen], padded[seen])
        with pytest.raises(PatchError, match="additive"):
            handle.unpatch() or attnops.patch(model, cache="paged", mask="auto")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_other_masks_are_found_out(name):
    """The trial is worth something only if masks that are wrong fail it."""
    model = build(name)
    with torch.no_grad():
        subject, told = next(proof._subjects(model))
        assert told == "a small twin" and proof._fails(subject, "additive") is None
        assert "differs from eager" in str(proof._fails(subject, "dense"))


@pytest.mark.parametrize("name", ["splinter", "pegasus_x"])
def test_the_name_alone_does_not_serve_them(name):
    model = build(name)
    model.set_attn_implementation("attnops")
    with pytest.raises(InvalidInput, match=r"attnops\.patch\(model\)"):
        outputs(model)


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_sinks_alone_keep_a_model_from_sdpa(name):
    model = tiny.model(name)
    want = generated(model)
    with attnops.patch(model) as handle:
        assert handle.report().mask == "auto" and handle.implementation == "attnops"
        assert any(
            "GptOssModel: tried" in note or "MiMoV2FlashModel: tried" in note
            for note in handle.report().notes
        )
        assert torch.equal(generated(model), want)
    model.set_attn_implementation("attnops")
    assert torch.equal(generated(model), want)


def test_additive_masks_can_be_asked_for():
    model, mask = tiny.model("gemma3"), left_padded()
    want = model(tokens(), attention_mask=mask).logits
    with attnops.patch(model, mask="additive"):
        near(model(tokens(), attention_mask=mask).logits, want)
    with pytest.raises(InvalidInput, match="additive"):
        attnops.patch(model, mask="additive", cache="paged")


class ReadsTheName(transformers.LlamaForCausalLM):
    """It does something else where its attention is not eager."""

    _supports_sdpa = False

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if self.config._attn_implementation != "eager":
            out.logits = out.logits * 2
        return out


class Odd(ReadsTheName):
    """Nothing that is known here is an input of it."""

    def forward(self, waves, **kwargs):
        return super().forward(input_ids=waves, **kwargs)


def test_a_model_that_fails_is_refused(monkeypatch):
    for cls in (transformers.LlamaModel, transformers.LlamaPreTrainedModel):
        monkeypatch.setattr(cls, "_supports_sdpa", False)
    model = ReadsTheName(tiny.config("llama", attn_implementation="eager")).eval()
    with pytest.raises(PatchError, match=r"differs from eager .*: logits"):
        attnops.patch(model)
    assert model.config._attn_implementation == "eager" and not hasattr(model, "_attnops")
    with pytest.raises(PatchError, match="not tried"):
        attnops.patch(Odd(tiny.config("llama", attn_implementation="eager")))


def test_a_model_whose_twin_cannot_be_built_runs_itself(monkeypatch):
    monkeypatch.setattr(proof, "MOST_WEIGHTS", 0)
    model = build("splinter").train()
    with attnops.patch(model) as handle:
        assert any("a short run" in note for note in handle.report().notes)
    assert model.training and model.config._attn_implementation == "eager"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("config", "cls"),
    [
        ("GptOssConfig", "GptOssForCausalLM"),
        ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
        ("PegasusXConfig", "PegasusXModel"),
    ],
)
def test_a_large_model_has_a_small_twin(config, cls):
    with FakeTensorMode():
        model = getattr(transformers, cls)._from_config(
            getattr(transformers, config)(), attn_implementation="eager"
        )
        assert any("a small twin" in note for note in attnops.patch(model).report().notes)


def test_no_trial_for_a_model_of_sdpa(monkeypatch):
    monkeypatch.setattr(proof, "twins", lambda model: pytest.fail("tried"))
    model = tiny.model("llama")
    assert not match(model).unrouted
    assert attnops.patch(model).active
