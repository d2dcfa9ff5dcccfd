"""Paged MLA models: what pages cannot hold is an error, which models they are for, and what people do to models besides."""

import json
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput, PatchError, UnknownKernel
from attnops.core.problem import Target, pretend
from attnops.hf import Decode, tiny
from attnops.hf.attention import mask as masks
from attnops.hf.cache_names import named
from attnops.lowering.explain import packages_of_kernels
from tests.graphs.standin import StandIn
from tests.hf.helpers import (
    LIMIT,
    STEPS,
    by_hand,
    counted,
    eager_tokens,
    generated,
    left_padded,
    logits,
    relative,
    tokens,
)
from tests.hf.test_robust import by_name, lora

# What pages cannot hold -----------------------------------------------------------------------------------------------


def holes(mask):
    mask[0, 6] = 0


def right(mask):
    mask[0, 13] = 0


@pytest.mark.parametrize("spoil", [holes, right])
@pytest.mark.parametrize(
    ("name", "mode"), [("deepseek_v3", "auto"), ("deepseek_v3", "dense"), ("deepseek_v3", "compact"), ("gpt_oss", "auto")]
)
def test_masks_that_are_no_left_padding(spoil, name, mode):
    model, mask = tiny.model(name), left_padded()[:, :14]
    spoil(mask)
    want = logits(model, "dynamic", tokens(), mask, steps=((0, 14),))
    with attnops.patch(model, cache="paged", mask=mode) as handle:
        with pytest.raises(InvalidInput, match="attention_mask"):
            generated(model, attention_mask=mask)
        with pytest.raises(InvalidInput, match="attention_mask"):
            by_hand(model, handle.new_cache(3, 14), tokens(), mask, ((0, 14),))
        assert relative(logits(model, "dynamic", tokens(), mask, steps=((0, 14),)), want) < LIMIT, "with transformers' cache"


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_masks_that_change(name):
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle, torch.no_grad():
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, ids, mask, ((0, 14),))
        with pytest.raises(InvalidInput, match="another padding"):
            model(ids[:, 14:15], attention_mask=torch.ones_like(mask[:, :15]), **named(cache))
        with pytest.raises(InvalidInput, match="another padding"):
            model(ids[:, 14:15], **named(cache))
        with pytest.raises(InvalidInput, match="too few columns"):
            model(ids[:, 14:15], attention_mask=mask[:, :14], **named(cache))
        cache.reset()
        model(ids[:, :14], **named(cache))
        model(ids[:, 14:15], **named(cache))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_batches_that_shrink_and_grow(name):
    """A row that missed a step has a hole in its pages."""
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    want = logits(model, "dynamic", ids[:2], mask[:2], STEPS[:3])
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, ids, mask, STEPS[:1])
        ours = by_hand(model, cache, ids[:2], mask[:2], STEPS[1:3])
        assert relative(ours, want[-len(ours) :]) < LIMIT
        with pytest.raises(InvalidInput, match="rows that the step before left out"):
            by_hand(model, cache, ids, mask, STEPS[3:4])


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_where_the_host_must_not_wait(monkeypatch, name):
    """As on CUDA: in generate() the prompt's mask is looked at, elsewhere the device asserts at one-token steps."""
    monkeypatch.setattr(masks, "_FAR", ("cpu",))
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle:
        assert torch.equal(generated(model), eager_tokens(name))
        spoilt = mask[:, :14].clone()
        holes(spoilt)
        with pytest.raises(InvalidInput, match="holes"):
            generated(model, attention_mask=spoilt)
        cache = handle.new_cache(3, 16)
        by_hand(model, cache, ids, mask, STEPS[:3])
        with pytest.raises(RuntimeError, match="cache that is full"):
            by_hand(model, cache, ids, mask, ((16, 17),))


@pytest.mark.parametrize("mode", ["auto", "compact"])
def test_the_host_trusts_only_what_it_has_seen(monkeypatch, mode):
    """As on CUDA: not a prompt's last chunk of one token, nor another cache that someone uses while generate() runs."""
    monkeypatch.setattr(masks, "_FAR", ("cpu",))
    model, spoilt, looks = tiny.model("deepseek_v3"), left_padded()[:, :9], []
    with torch.no_grad():
        want, first = generated(model, 4, length=9), model(tokens()[:, :1]).logits

    def beside(ids, scores):
        with torch.no_grad():
            looks.append(relative(model(tokens()[:, :1], **named(handle.new_cache(3, 4))).logits, first))
        return scores

    with attnops.patch(model, cache="paged", mask=mode) as handle:
        assert torch.equal(generated(model, 4, length=9, prefill_chunk_size=1), want)
        assert torch.equal(generated(model, 4, length=9, logits_processor=[beside]), want) and max(looks) < LIMIT
        spoilt[1, 8] = 0
        with pytest.raises((InvalidInput, RuntimeError), match=r"attention_mask|pages cannot follow"):
            generated(model, 4, length=9, attention_mask=spoilt, prefill_chunk_size=4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_users_own(dtype):
    model, see = tiny.model("deepseek_v3"), torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
    given = see if dtype == torch.bool else torch.where(see, 0.0, -1e9)
    with attnops.patch(model, cache="paged") as handle, torch.no_grad(), pytest.raises(InvalidInput, match=r"attention_mask.*2-D"):
        model(tokens()[:, :9], attention_mask=given, **named(handle.new_cache(3, 9)))


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_room(name):
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle:
        with pytest.raises(InvalidInput, match="rows"):
            generated(model, **named(handle.new_cache(2, 40)))
        with pytest.raises(InvalidInput, match="length"):
            generated(model, **named(handle.new_cache(3, 20)))
        with pytest.raises(InvalidInput, match="at most 16 positions"):
            by_hand(model, handle.new_cache(3, 16), tokens(), left_padded())
        with pytest.raises(InvalidInput, match="at most 2"):
            by_hand(model, handle.new_cache(2, 20), tokens(), left_padded())
        with pytest.raises(InvalidInput):
            handle.new_cache(0, 20)


# Which models ---------------------------------------------------------------------------------------------------------


def test_models_with_latents_in_part():
    model = tiny.model("deepseek_v3")
    model.model.layers[1].self_attn = tiny.model("llama").model.layers[1].self_attn
    with pytest.raises(PatchError, match=r"caches latents, or none.*\n.*layers.1.self_attn \(LlamaAttention\)"):
        attnops.patch(model, cache="paged")
    assert model.config._attn_implementation == "eager"


def test_indexed_models():
    with pytest.raises(PatchError, match="indices"):
        attnops.patch(tiny.model("deepseek_v32"), cache="paged")


def test_a_projection_that_does_more(monkeypatch):
    model = tiny.model("deepseek_v3")
    module = model.model.layers[1].self_attn
    own = type(module).expand_kv
    monkeypatch.setattr(type(module), "expand_kv", lambda self, c, k: tuple(2 * x for x in own(self, c, k)))
    with pytest.raises(PatchError, match=r"layers.0.self_attn.*does more"):
        attnops.patch(model, cache="paged")
    monkeypatch.undo()
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    with pytest.raises(PatchError, match=r"layers.1.self_attn.*bias"):
        attnops.patch(model, cache="paged")
    assert "expand_kv" not in vars(module) and not module._forward_pre_hooks


def test_options():
    model = tiny.model("deepseek_v3")
    wrong: Any = "elsewhere"
    with pytest.raises(InvalidInput, match="cache"):
        attnops.patch(model, cache=wrong)
    with pytest.raises(UnknownKernel):
        attnops.patch(model, cache="paged", kernel="varlen")
    with attnops.patch(model, cache="paged", kernel="reference") as handle:
        assert attnops.patch(model, cache="paged", kernel="reference") is handle
        with pytest.raises(PatchError, match="unpatch"):
            attnops.patch(model)
        assert torch.equal(generated(model), eager_tokens("deepseek_v3"))
    with attnops.patch(model) as handle, pytest.raises(PatchError, match="without pages"):
        handle.new_cache(3, 20)


def test_report():
    model = tiny.model("kimi_linear")
    with attnops.patch(model, cache="paged") as handle:
        report = handle.report()
        assert len(report.patched) == 2 and len(report.skipped) == 2, "states of linear attention stay as they are"
        assert all("decode and every later token absorbed" in row.phases for row in report.patched)
        assert json.loads(json.dumps(report.to_dict()))["cache"] == "paged"
        assert "patched: prefill into an empty cache" in str(report) and "cache=paged" in str(report)
    with attnops.patch(model) as handle:
        assert {row.phases for row in handle.report().patched} == {"expanded in prefill and decode"}


def test_explain():
    model = tiny.model("minicpm3")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        prefill = attnops.explain(model, tokens(), **named(cache), quiet=True)
        decode = attnops.explain(model, tokens()[:, :1], **named(cache), target="sm90", quiet=True)
        assert {site.decision.problem.op for site in prefill.sites} >= {"attention", "write_latent"}
        assert {site.decision.problem.op for site in decode.sites} >= {"mla_attention", "write_latent"}
        assert int(cache.get_seq_length()) == 0, "nothing has run"


def test_a_kernel_that_reads_a_plan_gets_one():
    """FlashMLA's schedule, which every layer would work out for itself, is made once a step, and only for decode."""
    model = tiny.model("minicpm3", kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=3).to(torch.bfloat16)
    with attnops.patch(model, cache="paged", kernel="flashmla") as handle:
        with pretend(Target.parse("sm90", packages_of_kernels())):
            cache = handle.new_cache(2, 100)
        assert cache.state.pages.page_size == 64
        for tokens_now, planned in ((1, 1), (4, 1), (9, 0)):
            cache.state.filled = True
            sites = attnops.explain(model, tokens(2, tokens_now), **named(cache), target="sm90", quiet=True).sites
            calls = {site.decision.problem.op: site for site in sites}
            assert sum(site.count for site in sites if site.decision.problem.op == "decode_rows") == planned
            assert calls["mla_attention"].decision.problem.step.plan == ("device" if planned else "none")
            assert calls["mla_attention"].count == 3


# Other people's changes to a model ------------------------------------------------------------------------------------


def everything(model):
    return {path: (set(vars(m)), len(m._forward_pre_hooks), len(m._forward_hooks)) for path, m in model.named_modules()}


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear", "gpt_oss", "qwen3_next"])
def test_unpatch_leaves_nothing(name):
    model = tiny.model(name)
    before, weights = everything(model), {k: v.clone() for k, v in model.state_dict().items()}
    want = generated(model, new=3)  # which makes transformers note something on the model
    before = everything(model)
    handle = attnops.patch(model, cache="paged")
    assert set(model.state_dict()) == set(weights)
    generated(model, new=3)
    handle.unpatch()
    handle.unpatch()
    assert everything(model) == before and model.config._attn_implementation == "eager"
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert torch.equal(generated(model, new=3), want)


def test_a_method_that_was_wrapped_after_the_patch():
    """The wrapper still calls what the patch had put there, which then does what the model did before, also beneath a second patch."""
    model = tiny.model("gpt_oss")
    want = generated(model, new=3)
    handle = attnops.patch(model, cache="paged")
    names = ("forward", "_prepare_cache_for_generation")
    for name in names:
        patched = getattr(model, name)
        setattr(model, name, lambda *args, patched=patched, **kwargs: patched(*args, **kwargs))
    handle.unpatch()
    assert torch.equal(generated(model, new=3), want)
    with attnops.patch(model, cache="paged"):
        assert torch.equal(generated(model, new=3), want)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_adapters(order):
    """LoRA on kv_b_proj: the absorbed weights are the adapted ones, and follow when the adapter is switched off."""
    want, plain = by_name(lora(tiny.model("deepseek_v3"))), by_name(tiny.model("deepseek_v3"))
    assert not torch.equal(want, plain)
    model = lora(tiny.model("deepseek_v3")) if order == "outside" else tiny.model("deepseek_v3")
    handle = attnops.patch(model, cache="paged")
    wrapped = model if order == "outside" else lora(model)
    with counted() as calls:
        assert torch.equal(by_name(wrapped), want)
        with wrapped.disable_adapter():
            assert torch.equal(by_name(wrapped), plain)
        assert torch.equal(by_name(wrapped), want)
    assert calls["absorbed"]
    handle.unpatch()
    assert torch.equal(by_name(wrapped), want)
    assert not any("_attnops" in name for m in wrapped.modules() for name in vars(m))


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrised(model):
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.kv_b_proj, "weight", Doubled())
    return model


@torch.no_grad()
def unseen_writes(model):
    """To what makes kv_b_proj in place of its weight: no version of a parameter tells."""
    for name, p in model.named_parameters():
        if "kv_b_proj" in name and "lora_B" not in name:
            p.data.mul_(1.5)
        if "kv_b_proj" in name and "lora_B" in name:
            array = p.detach().numpy()
            array *= -3


@pytest.mark.parametrize(
    ("decode", "wrap"),
    [
        ("hf", lora),
        pytest.param("hf", parametrised, marks=pytest.mark.full),  # each way and each wrap once
        pytest.param("breakable", lora, marks=pytest.mark.full),
        ("breakable", parametrised),
    ],
)
def test_writes_that_no_version_tells_are_seen_at_the_next_prompt(wrap, decode):
    """Also at the prompt of one token by which a conversation goes on. Graphs are replayed, and read what was made anew."""
    model, stock, device = wrap(tiny.model("deepseek_v3")), wrap(tiny.model("deepseek_v3")), StandIn()
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with attnops.patch(model, cache="paged", decode=Decode(decode, graphs=device)) as handle:
        ours, theirs = handle.new_cache(1, 40), DynamicCache(config=stock.config)
        text, captured = torch.full((1, 5), 7), 0
        for turn in range(3):
            for each in (model, stock) if turn else ():
                unseen_writes(each)
            given = {"input_ids": text, "attention_mask": torch.ones_like(text), **more}
            text = stock.generate(**given, **named(theirs))
            assert torch.equal(model.generate(**given, **named(ours)), text), turn
            for each in (model, stock):
                unseen_writes(each)
            assert torch.equal(by_name(model), by_name(stock)), turn
            captured = captured or len(device.graphs)
        assert len(device.graphs) == captured
    assert not any("_attnops" in name for m in model.modules() for name in vars(m))


def test_quantised_weights():
    quantization = pytest.importorskip("torchao.quantization", reason="the package torchao (extra dev) is not installed")
    model = tiny.model("deepseek_v3")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    want = generated(model)
    with attnops.patch(model, cache="paged"), counted() as calls:
        assert torch.equal(generated(model), want)
    assert calls["absorbed"]


def test_two_models_of_one_config():
    """The one that is unpatched takes the other's attention away, too: that one goes on with transformers' own."""
    model = tiny.model("deepseek_v3")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    first, second = attnops.patch(model, cache="paged"), attnops.patch(other, cache="paged")
    first.unpatch()
    assert torch.equal(generated(other), eager_tokens("deepseek_v3"))
    second.unpatch()
    assert model.config._attn_implementation == "eager"
