"""What pages cannot hold is an error, or refused at patch(): masks, sizes, training, attention of
other kinds."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from attnops.core.errors import InvalidInput, NoGradient, PatchError
from attnops.hf import tiny
from attnops.hf.attention import descriptor
from attnops.hf.cache.names import named
from attnops.hf.models.attention_modules import usage_of
from tests.hf.helpers import (
    LIMIT,
    STEPS,
    by_hand,
    generated,
    gives_eagers_tokens,
    left_padded,
    logits,
    near,
    over_pages,
    paged,
    relative,
    tokens,
)
from tests.hf.kinds import both, everything

# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [(0, 6), (0, 13)], ids=["holes", "right"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("deepseek_v3", "auto"),
        ("deepseek_v3", "dense"),
        ("deepseek_v3", "compact"),
        ("gpt_oss", "auto"),
    ],
)
def test_masks_that_are_no_left_padding(spoilt, name, mode):
    model, mask = tiny.model(name), left_padded()[:, :14]
    mask[spoilt] = 0
    want = logits(model, "dynamic", tokens(), mask, steps=STEPS[:1])
    with paged(model, mask=mode) as handle:
        with pytest.raises(InvalidInput, match="attention_mask"):
            generated(model, attention_mask=mask)
        with pytest.raises(InvalidInput, match="attention_mask"):
            by_hand(model, handle.new_cache(3, 14), tokens(), mask, STEPS[:1])
        assert relative(logits(model, "dynamic", tokens(), mask, steps=STEPS[:1]), want) < LIMIT, (
            "with transformers' cache"
        )


@both("gpt_oss")
def test_masks_that_change(name):
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    with paged(model) as handle, torch.no_grad():
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, ids, mask, STEPS[:1])
        for given, why in (
            (torch.ones(3, 15), "another padding"),
            (None, "another padding"),
            (mask[:, :14], "too few columns"),
        ):
            with pytest.raises(InvalidInput, match=why):
                model(ids[:, 14:15], attention_mask=given, **named(cache))
        cache.reset()
        model(ids[:, :14], **named(cache))
        model(ids[:, 14:15], **named(cache))


@both("gpt_oss")
def test_batches_that_shrink_and_grow(name):
    """A row that missed a step has a hole in its pages."""
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    want = logits(model, "dynamic", ids[:2], mask[:2], STEPS[:3])
    with paged(model) as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, ids, mask, STEPS[:1])
        ours = by_hand(model, cache, ids[:2], mask[:2], STEPS[1:3])
        near(ours, want[-len(ours) :])
        with pytest.raises(InvalidInput, match="rows that the step before left out"):
            by_hand(model, cache, ids, mask, STEPS[3:4])


@both("gpt_oss")
def test_where_the_host_must_not_wait(monkeypatch, name):
    """As on CUDA: in generate() the prompt's mask is looked at, elsewhere the device asserts at
    one-token steps."""
    monkeypatch.setattr(descriptor, "_FAR", ("cpu",))
    model, ids, mask = tiny.model(name), tokens(), left_padded()
    with paged(model) as handle:
        gives_eagers_tokens(model, name)
        spoilt = mask[:, :14].clone()
        spoilt[0, 6] = 0
        with pytest.raises(InvalidInput, match="holes"):
            generated(model, attention_mask=spoilt)
        cache = handle.new_cache(3, 16)
        by_hand(model, cache, ids, mask, STEPS[:3])
        with pytest.raises(RuntimeError, match="cache that is full"):
            by_hand(model, cache, ids, mask, ((16, 17),))


@pytest.mark.parametrize("mode", ["auto", "compact"])
def test_the_host_trusts_only_what_it_has_seen(monkeypatch, mode):
    """As on CUDA: not a prompt's last chunk of one token, nor another cache that someone uses while
    generate() runs."""
    monkeypatch.setattr(descriptor, "_FAR", ("cpu",))
    model, spoilt, looks = tiny.model("deepseek_v3"), left_padded()[:, :9], []
    with torch.no_grad():
        want, first = generated(model, 4, length=9), model(tokens()[:, :1]).logits

    def beside(ids, scores):
        with torch.no_grad():
            looks.append(
                relative(model(tokens()[:, :1], **named(handle.new_cache(3, 4))).logits, first)
            )
        return scores

    with paged(model, mask=mode) as handle:
        assert torch.equal(generated(model, 4, length=9, prefill_chunk_size=1), want)
        assert (
            torch.equal(generated(model, 4, length=9, logits_processor=[beside]), want)
            and max(looks) < LIMIT
        )
        spoilt[1, 8] = 0
        with pytest.raises(
            (InvalidInput, RuntimeError), match=r"attention_mask|pages cannot follow"
        ):
            generated(model, 4, length=9, attention_mask=spoilt, prefill_chunk_size=4)


@both("mistral")
def test_calls_that_pages_cannot_serve(name):
    """Masks of the user's own, a larger window than that of the pages, a batch or a text without
    room."""
    model, see = tiny.model(name), torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
    with paged(model) as handle, torch.no_grad():
        for given in (see, torch.where(see, 0.0, -1e9)):
            with pytest.raises(InvalidInput, match=r"attention_mask.*2-D"):
                model(tokens()[:, :9], attention_mask=given, **named(handle.new_cache(3, 9)))
        for window in (12, 0) if name == "mistral" else ():
            mask = descriptor.build(
                descriptor.Pattern(True, window), 3, 0, 14, 0, 0, torch.device("cpu")
            )
            with pytest.raises(InvalidInput, match=r"window of layer 0.*at most 8"):
                model(
                    tokens()[:, :14],
                    attention_mask=mask,
                    **named(handle.new_cache(3, 80, page_size=4)),
                )
        for rows, length, why in ((2, 40, "rows"), (3, 20, "length")):
            with pytest.raises(InvalidInput, match=why):
                generated(model, **named(handle.new_cache(rows, length)))
        for rows, length, why in ((3, 16, "at most 16 positions"), (2, 20, "at most 2")):
            with pytest.raises(InvalidInput, match=why):
                by_hand(model, handle.new_cache(rows, length), tokens(), left_padded())
        with pytest.raises(InvalidInput):
            handle.new_cache(0, 20)


def test_a_layer_that_does_not_ask_its_cache():
    """It would see the new tokens alone."""
    model = tiny.model("llama")
    with paged(model) as handle, torch.no_grad():
        cache = handle.new_cache(1, 20)
        cache.layers[1] = DynamicCache(config=model.config).layers[1]
        with pytest.raises(InvalidInput, match="did not ask"):
            model(tokens(1), **named(cache))


@both("llama")
def test_training(name):
    """Gradients and dropout need transformers' cache, or none. With pages they are an error."""
    model, ids = tiny.model(name, attention_dropout=0.3), tokens(3, 9)
    with paged(model) as handle:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        cache = handle.new_cache(3, 9)
        assert model.training, "a look at what the layers keep leaves the mode as it was"
        with pytest.raises(InvalidInput, match="dropout"):
            model(ids, **named(cache))
        model.eval()
        with pytest.raises(NoGradient):
            model(ids, **named(handle.new_cache(3, 9)))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama", 1), ("gpt_neox", 1), ("gpt_bigcode", 1), ("gemma2", 1), ("deepseek_v3", 3)],
)
def test_a_consumer_that_does_not_know_pages_fails(name, rows):
    """Be it the mask function or the layer: never with numbers."""
    model = tiny.model(name)
    handle = paged(model)
    cache = handle.new_cache(rows, 20)
    handle.unpatch()
    with pytest.raises((RuntimeError, ValueError, IndexError)), torch.no_grad():
        model(tokens(rows), **named(cache))
    with pytest.raises(PatchError, match="not patched"):
        handle.new_cache(3, 20)


# Models -------------------------------------------------------------------------------------------

_TEXT = {**tiny._BASE, "head_dim": 16}
_JET = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "intermediate_size": 48,
}
_COMPUTES = "computes with all the keys that its cache returns"
_ELSEWHERE = "in other layers of its cache than its own"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "doge": ({}, "DogeAttention edits its mask"),
    "llama4": ({}, "chunked attention"),
    "t5": ({}, "encoder-decoder"),
    "bart": ({}, "encoder-decoder"),
    "bert": ({}, r"BertSelfAttention may see tokens on both sides .*want cache=\"hf\""),
    "falcon": ({}, "nothing to patch"),
    "deepseek_v32": ({}, "indices"),
    "gemma4": ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
    "DiffLlamaForCausalLM": (tiny._BASE, _COMPUTES),
    "JetMoeForCausalLM": ({**_JET, "num_local_experts": 4}, _COMPUTES),
    "MiniMaxForCausalLM": ({**_TEXT, "num_local_experts": 4}, "a cache of its own class"),
    "MllamaForCausalLM": (
        {**_TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        _COMPUTES,
    ),
    "HrmTextForCausalLM": ({**_TEXT, "num_layers_per_stack": 1}, _ELSEWHERE),
    "DoryForCausalLM": (_TEXT, _ELSEWHERE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_pages_cannot_serve(name):
    values, why = REFUSED[name]
    if not name.endswith("ForCausalLM"):
        model = tiny.model(name, **values)
    elif hasattr(transformers, name):
        cls = getattr(transformers, name)
        model = cls._from_config(cls.config_class(**values), attn_implementation="eager").eval()
    else:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    before = everything(model)
    with pytest.raises(PatchError, match=why):
        paged(model)
    assert everything(model) == before and model.config._attn_implementation == "eager"


def test_a_norm_after_the_cache_is_no_edit():
    """What is new is all that a module sees, and its norm is the same."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
    from transformers.models.idefics.modeling_idefics import IdeficsAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    usages = {
        cls: usage_of(cls)
        for cls in (LlamaAttention, IdeficsAttention, DiffLlamaAttention, DeepseekV3Attention)
    }
    assert [usage is not None and usage.edits_cached for usage in usages.values()] == [
        False,
        False,
        True,
        True,
    ]


def test_models_with_latents_in_part():
    model = tiny.model("deepseek_v3")
    model.model.layers[1].self_attn = tiny.model("llama").model.layers[1].self_attn
    with pytest.raises(
        PatchError, match=r"caches latents, or none.*\n.*layers.1.self_attn \(LlamaAttention\)"
    ):
        paged(model)
    assert model.config._attn_implementation == "eager"


def test_a_projection_that_does_more(monkeypatch):
    model = tiny.model("deepseek_v3")
    module = model.model.layers[1].self_attn
    own = type(module).expand_kv
    monkeypatch.setattr(
        type(module), "expand_kv", lambda self, c, k: tuple(2 * x for x in own(self, c, k))
    )
    with pytest.raises(PatchError, match=r"layers.0.self_attn.*does more"):
        paged(model)
    monkeypatch.undo()
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    with pytest.raises(PatchError, match=r"layers.1.self_attn.*bias"):
        paged(model)
    assert "expand_kv" not in vars(module) and not module._forward_pre_hooks


def test_images_whose_tokens_see_each_other():
    """Gemma 3: blocks of an image are bidirectional, which pages cannot hold; texts without them
    are over pages."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=tiny.config("gemma3").to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=120,
        image_token_id=120,
    )
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    ids = tokens(2, 14)
    text = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    shown = ids.clone()
    shown[:, 3:7] = 120
    image = {
        **text,
        "token_type_ids": (shown == 120).long(),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    want = model.generate(ids, **text), model.generate(shown, **image)
    handle = paged(model)
    with over_pages() as calls:
        assert torch.equal(model.generate(ids, **text), want[0]) and calls["paged"]
    with over_pages() as calls, pytest.warns(UserWarning, match="transformers' own cache"):
        assert torch.equal(model.generate(shown, **image), want[1]) and not any(calls.values())
    assert any("token_type_ids" in note for note in handle.report().notes)
    with pytest.raises(InvalidInput, match="token_type_ids"):
        model(shown, token_type_ids=image["token_type_ids"], **named(handle.new_cache(2, 20)))
