"""Models of ordinary attention over pages: what pages cannot hold is an error, which models they are for, what patching leaves behind."""

import json
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput, PageSizeConflict, PatchError, UnknownKernel
from attnops.core.problem import Target, pretend
from attnops.hf import Decode, tiny
from attnops.hf.attention import descriptor
from attnops.hf.cache_names import named
from attnops.hf.matching.match import usage_of
from attnops.hf.paged.models import where
from attnops.lowering.explain import packages_of_kernels
from tests.graphs.standin import StandIn
from tests.hf.helpers import (
    eager_tokens,
    generated,
    over_pages,
    tokens,
)
from tests.hf.test_latent_patch import everything
from tests.hf.test_robust import by_name

# What pages cannot hold -----------------------------------------------------------------------------------------------


def test_a_mask_that_sees_more_than_the_pages_keep():
    """A model that is told of another window than its config had when its pages were made."""
    model = tiny.model("mistral")
    with attnops.patch(model, cache="paged") as handle, torch.no_grad():
        cache = handle.new_cache(3, 80, page_size=4)
        for pattern in (descriptor.Pattern(True, 12), descriptor.Pattern(True, 0)):
            mask = descriptor.build(pattern, 3, 0, 14, 0, 0, torch.device("cpu"))
            with pytest.raises(InvalidInput, match=r"window of layer 0.*at most 8"):
                model(tokens()[:, :14], attention_mask=mask, **named(cache))


def test_a_layer_that_does_not_ask_its_cache():
    """It would see the new tokens alone."""
    model = tiny.model("llama")
    with attnops.patch(model, cache="paged") as handle, torch.no_grad():
        cache = handle.new_cache(1, 20)
        cache.layers[1] = DynamicCache(config=model.config).layers[1]
        with pytest.raises(InvalidInput, match="did not ask"):
            model(tokens(1), **named(cache))


# Which models ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "doge": "DogeAttention edits its mask",
    "llama4": "chunked attention",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "bert": "BertSelfAttention may see tokens on both sides",
    "falcon": "nothing to patch",
    "deepseek_v32": "indices",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_pages_cannot_serve(name):
    model = tiny.model(name)
    before = everything(model)
    with pytest.raises(PatchError, match=REFUSED[name]):
        attnops.patch(model, cache="paged")
    assert everything(model) == before and model.config._attn_implementation == "eager"


def test_attention_that_sees_both_ways_and_has_a_cache():
    """PaliGemma's prompts are seen on both sides, by layers that are handed a cache."""
    text = {
        "model_type": "gemma", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=64)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    why = r"GemmaAttention may see tokens on both sides \(is_causal is False\), and pages are for causal attention; want cache=\"hf\""
    with pytest.raises(PatchError, match=why):
        attnops.patch(model, cache="paged")


def test_layers_that_share_their_keys():
    with pytest.raises(PatchError, match="num_kv_shared_layers=2"):
        attnops.patch(tiny.model("gemma4", num_kv_shared_layers=2), cache="paged")


def test_a_model_with_images():
    """The text's layers have pages, the image's layers need none."""
    model = tiny.model("llava")
    want = generated(model, new=4)
    with attnops.patch(model, cache="paged") as handle, over_pages() as calls:
        assert torch.equal(generated(model, new=4), want)
        forms = {bool(row.phases) for row in handle.report().patched if "vision" in row.path}
    assert calls["paged"] == 2 * 3 and forms == {False}


def test_kernels():
    model = tiny.model("llama")
    with pytest.raises(UnknownKernel, match="mla_attention"):
        attnops.patch(model, cache="paged", kernel="varlen")
    with pytest.raises(UnknownKernel, match="op paged_attention"):
        attnops.patch(model, cache="paged", kernel="flashmla")
    with attnops.patch(model, cache="paged", kernel="reference") as handle:
        assert torch.equal(generated(model), eager_tokens("llama"))
        assert handle.new_cache(3, 20).state.pages.choice.takes.keys() == {"reference"}
    model = tiny.model("llama", head_dim=64).to(torch.bfloat16)
    with attnops.patch(model, cache="paged", kernel="xqa") as handle:
        assert handle.new_cache(2, 100).state.pages.page_size in (16, 32, 64, 128)
        with pytest.raises(PageSizeConflict):
            handle.new_cache(2, 100, page_size=1)


def test_report():
    model = tiny.model("gemma3")
    with attnops.patch(model, cache="paged") as handle:
        report = handle.report()
        assert [row.phases.endswith("behind the window of 8 are used again") for row in report.patched] == [True, True, False]
        assert all("decode and every later token over pages" in row.phases for row in report.patched)
        assert json.loads(json.dumps(report.to_dict()))["cache"] == "paged"
    with attnops.patch(model) as handle:
        assert {row.phases for row in handle.report().patched} == {""}


def test_explain():
    model = tiny.model("mistral")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 100, page_size=4)
        prefill = attnops.explain(model, tokens(), **named(cache), quiet=True)
        decode = attnops.explain(model, tokens()[:, :1], **named(cache), target="sm90", quiet=True)
        assert {site.decision.problem.op for site in prefill.sites} >= {"attention", "write_kv"}
        ops = {site.decision.problem.op: site for site in decode.sites}
        assert ops["paged_attention"].count == 2 and ops["paged_attention"].decision.problem.rules.window == (7, -1)
        assert ops["write_kv"].count == 2 and ops["slot_mapping"].count == 1, "metadata are made once a step"
        assert int(cache.get_seq_length()) == 0, "nothing has run"


# Other people's changes to a model ------------------------------------------------------------------------------------


def test_adapters():
    """LoRA on what makes keys and values."""
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    options = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(tiny.model("llama"), options)
    want = by_name(model)
    handle = attnops.patch(model, cache="paged")
    with over_pages() as calls:
        assert torch.equal(by_name(model), want)
        with model.disable_adapter():
            assert torch.equal(by_name(model), by_name(tiny.model("llama")))
    assert calls["paged"]
    handle.unpatch()
    assert torch.equal(by_name(model), want)


def learnt(kind):
    def wrap(peft):
        return peft.get_peft_model(tiny.model("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    return wrap


def of_each_row(peft):
    options = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.model("llama"), options)
    model.add_adapter("other", options)
    return model.eval()


ADAPTED = {
    "prefix": (learnt("PrefixTuningConfig"), {}, "prepare_inputs_for_generation was replaced"),
    "prompt": (learnt("PromptTuningConfig"), {}, "prepare_inputs_for_generation was replaced"),
    "rows": (of_each_row, {"adapter_names": ["default", "other", "__base__"]}, "hooks on Linear hand each row"),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:Position ids")
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_that_pages_do_not_follow(kind, graphs):
    """Prompts that are learnt, and adapters by row: transformers' own cache, with a warning, as by default. A cache of pages is refused."""
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    wrap, more, why = ADAPTED[kind]
    model = wrap(peft)
    given = {"input_ids": tokens()[:, :9], "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **more}
    want = model.generate(**given)
    decode = Decode("breakable", graphs=StandIn()) if graphs else "hf"
    with attnops.patch(model, cache="paged", decode=decode) as handle:
        with pytest.warns(UserWarning, match=f"{why}.*transformers' own cache and not pages"):
            assert torch.equal(model.generate(**given), want)
        assert handle.took.cache == "hf" and why in handle.took.why
        cache = handle.new_cache(3, 32)
        if kind == "rows" and not graphs:
            assert torch.equal(model.generate(**given, **named(cache)), want), "its rows are those of the call"
        else:
            with pytest.raises(InvalidInput, match=why):
                model.generate(**given, **named(cache))


def test_where_a_quantised_layer_computes():
    """Weights of four bits have no dtype to tell, and lie where the model's others do."""
    packed, model = torch.nn.Module(), torch.nn.Module()
    packed.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    model.packed, model.norm = packed, torch.nn.LayerNorm(2, dtype=torch.bfloat16, device="meta")
    assert where(packed, model)[1] == torch.bfloat16 and where(packed)[1] == torch.get_default_dtype()
    # Eight bits, with a scale of float32 beside them.
    packed.weight = torch.nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    packed.weight_scale_inv = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    assert where(packed, model) == (torch.device("cpu"), torch.bfloat16)


def test_pages_for_another_machine():
    """Made as that machine's kernels want them, after a look at the model that runs here."""
    model = tiny.model("llama", head_dim=64).to(torch.bfloat16)
    with attnops.patch(model, cache="paged") as handle, pretend(Target.parse("sm90", packages_of_kernels())):
        choice = handle.new_cache(2, 100).state.pages.choice
    assert choice.target.arch == 90 and "triton" in choice.takes


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_threads(name):
    model = tiny.model(name)
    got = [None, None]

    def work(i):
        got[i] = [generated(model) for _ in range(3)]

    with attnops.patch(model, cache="paged"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(one, eager_tokens(name)) for some in got for one in some)


# Models that pages cannot serve ---------------------------------------------------------------------------------------

_TEXT = {**tiny._BASE, "head_dim": 16}
_JET = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 48}
NOT_HELD = {
    "DiffLlamaForCausalLM": ("DiffLlamaConfig", tiny._BASE, "computes with all the keys that its cache returns"),
    "JetMoeForCausalLM": ("JetMoeConfig", {**_JET, "num_local_experts": 4}, "computes with all the keys that its cache returns"),
    "MiniMaxForCausalLM": ("MiniMaxConfig", {**_TEXT, "num_local_experts": 4}, "a cache of its own class"),
    "MllamaForCausalLM": (
        "MllamaTextConfig", {**_TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        "computes with all the keys that its cache returns",
    ),
    "HrmTextForCausalLM": ("HrmTextConfig", {**_TEXT, "num_layers_per_stack": 1}, "in other layers of its cache than its own"),
    "DoryForCausalLM": ("DoryConfig", _TEXT, "in other layers of its cache than its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_pages_cannot_hold_is_refused_before_a_call(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config, values, why = NOT_HELD[name]
    model = getattr(transformers, name)._from_config(getattr(transformers, config)(**values), attn_implementation="eager").eval()
    with pytest.raises(PatchError, match=why):
        attnops.patch(model, cache="paged")
    with attnops.patch(model):
        assert model.config._attn_implementation != "eager"


def test_a_norm_after_the_cache_is_no_edit():
    """What is new is all that a module sees, and its norm is the same."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
    from transformers.models.idefics.modeling_idefics import IdeficsAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    usages = {cls: usage_of(cls) for cls in (LlamaAttention, IdeficsAttention, DiffLlamaAttention, DeepseekV3Attention)}
    assert [usage is not None and usage.edits_cached for usage in usages.values()] == [False, False, True, True]


def test_images_whose_tokens_see_each_other():
    """Gemma 3: blocks of an image are bidirectional, which pages cannot hold; texts without them are over pages."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=tiny.config("gemma3").to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=120, image_token_id=120
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    ids = tokens(2, 14)
    text = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    shown = ids.clone()
    shown[:, 3:7] = 120
    image = {**text, "token_type_ids": (shown == 120).long(), "pixel_values": torch.randn(2, 3, 16, 16)}
    want = model.generate(ids, **text), model.generate(shown, **image)
    handle = attnops.patch(model, cache="paged")
    with over_pages() as calls:
        assert torch.equal(model.generate(ids, **text), want[0]) and calls["paged"]
    with over_pages() as calls, pytest.warns(UserWarning, match="transformers' own cache"):
        assert torch.equal(model.generate(shown, **image), want[1]) and not any(calls.values())
    assert any("token_type_ids" in note for note in handle.report().notes)
    with pytest.raises(InvalidInput, match="token_type_ids"):
        model(shown, token_type_ids=image["token_type_ids"], **named(handle.new_cache(2, 20)))
