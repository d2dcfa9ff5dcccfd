"""What people do to models over pages: adapters by row, writes to weights, shards, methods and
configs that are replaced."""

import warnings

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import DynamicCache

from attnops.core.errors import InvalidInput
from attnops.hf import Decode, tiny
from attnops.hf.cache.names import named
from attnops.hf.cache.support import where
from tests.graphs.standin import StandIn
from tests.hf.helpers import (
    LATENT,
    generated,
    gives_eagers_tokens,
    left_padded,
    near,
    over_pages,
    paged,
    tokens,
)
from tests.hf.kinds import attending, both
from tests.hf.test_robust import by_name, lora

# Adapters and weights -----------------------------------------------------------------------------


def learnt(kind):
    def wrap(peft):
        return peft.get_peft_model(
            tiny.model("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        ).eval()

    return wrap


def of_each_row(peft):
    options = peft.LoraConfig(
        target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny.model("llama"), options)
    model.add_adapter("other", options)
    return model.eval()


ADAPTED = {
    "prefix": (learnt("PrefixTuningConfig"), {}, "prepare_inputs_for_generation was replaced"),
    "prompt": (learnt("PromptTuningConfig"), {}, "prepare_inputs_for_generation was replaced"),
    "rows": (
        of_each_row,
        {"adapter_names": ["default", "other", "__base__"]},
        "hooks on Linear hand each row",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:Position ids")
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_that_pages_do_not_follow(kind, graphs):
    """Prompts that are learnt, and adapters by row: transformers' own cache, with a warning, as by
    default. A cache of pages is refused."""
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    wrap, more, why = ADAPTED[kind]
    model = wrap(peft)
    given = {
        "input_ids": tokens()[:, :9],
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        **more,
    }
    want = model.generate(**given)
    decode = Decode("breakable", graphs=StandIn()) if graphs else "hf"
    with paged(model, decode=decode) as handle:
        with pytest.warns(UserWarning, match=f"{why}.*transformers' own cache and not pages"):
            assert torch.equal(model.generate(**given), want)
        assert handle.took.cache == "hf" and why in handle.took.why
        cache = handle.new_cache(3, 32)
        if kind == "rows" and not graphs:
            assert torch.equal(model.generate(**given, **named(cache)), want), (
                "its rows are those of the call"
            )
        else:
            with pytest.raises(InvalidInput, match=why):
                model.generate(**given, **named(cache))


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
    """Also at the prompt of one token by which a conversation goes on. Graphs are replayed, and
    read what was made anew."""
    model = wrap(tiny.model("deepseek_v3"))
    stock = wrap(tiny.model("deepseek_v3"))
    device = StandIn()
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with paged(model, decode=Decode(decode, graphs=device)) as handle:
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


def test_where_a_quantised_layer_computes():
    """Weights of four bits have no dtype to tell, and lie where the model's others do."""
    packed, model = torch.nn.Module(), torch.nn.Module()
    packed.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    model.packed, model.norm = packed, torch.nn.LayerNorm(2, dtype=torch.bfloat16, device="meta")
    assert (
        where(packed, model)[1] == torch.bfloat16 and where(packed)[1] == torch.get_default_dtype()
    )
    # Eight bits, with a scale of float32 beside them.
    packed.weight = torch.nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    packed.weight_scale_inv = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    assert where(packed, model) == (torch.device("cpu"), torch.bfloat16)
    # A layer that keeps its model is a cycle.
    owner = torch.nn.Module()
    owner.packed, packed.owner = packed, owner
    assert where(packed)[1] == torch.get_default_dtype()


SHARDED = {
    "llama": {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1},
    "deepseek_v3": {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1},
}


@both("llama")
def test_a_shard_of_the_heads(name):
    """As tensor parallelism leaves a layer: half the heads in its weights, all in its config."""
    model = tiny.model(name)
    for layer in model.model.layers:
        for part, dim in SHARDED[name].items():
            linear = getattr(layer.self_attn, part)
            linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(2, dim)[0].contiguous())
    want = generated(model)
    with paged(model) as handle, attending(name) as calls:
        assert torch.equal(generated(model), want)
        assert name in LATENT or handle.new_cache(1, 9).pages_of(0)[0].shape[2] == 1
    assert calls.later


# Parts, methods and configs -----------------------------------------------------------------------


def test_a_method_that_was_wrapped_after_the_patch():
    """The wrapper still calls what the patch had put there, which then does what the model did
    before, also beneath a second patch."""
    model = tiny.model("gpt_oss")
    want = generated(model, new=3)
    handle = paged(model)
    for name in ("forward", "_prepare_cache_for_generation"):
        patched = getattr(model, name)
        setattr(model, name, lambda *args, patched=patched, **kwargs: patched(*args, **kwargs))
    handle.unpatch()
    assert torch.equal(generated(model, new=3), want)
    with paged(model):
        assert torch.equal(generated(model, new=3), want)


def test_two_models_of_one_config():
    """The one that is unpatched takes the other's attention away, too: that one goes on with
    transformers' own."""
    model = tiny.model("deepseek_v3")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    first, second = paged(model), paged(other)
    first.unpatch()
    gives_eagers_tokens(other, "deepseek_v3")
    second.unpatch()
    assert model.config._attn_implementation == "eager"


@both("mistral")
def test_switched_to_another_implementation_while_patched(name):
    """Whoever takes the model elsewhere meanwhile gets what it gives, with transformers' caches."""
    model = tiny.model(name)
    with paged(model) as handle:
        assert handle.verify(tokens(), attention_mask=left_padded()).passed
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            result = model(
                tokens(), attention_mask=left_padded(), **named(DynamicCache(config=model.config))
            ).logits
        assert torch.isfinite(result).all()
        gives_eagers_tokens(model, name)
        with pytest.raises(InvalidInput, match="with attention 'sdpa'"):
            generated(model, **named(handle.new_cache(3, 40)))


@both("gemma2")
def test_a_bare_model(name):
    """Without generate() there is nothing to hook into: the cache is made by hand."""
    bare, mask = tiny.model(name).model, left_padded()
    with torch.no_grad():
        want = bare(tokens(), attention_mask=mask).last_hidden_state[mask.bool()]
        with paged(bare) as handle, warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = bare(
                tokens(), attention_mask=mask, **named(handle.new_cache(3, 20))
            ).last_hidden_state
    near(ours[mask.bool()], want)


def test_a_model_with_images():
    """The text's layers have pages, the image's layers need none."""
    model = tiny.model("llava")
    want = generated(model, new=4)
    with paged(model) as handle, over_pages() as calls:
        assert torch.equal(generated(model, new=4), want)
        assert {bool(row.phases) for row in handle.report().patched if "vision" in row.path} == {
            False
        }
    assert calls["paged"] == 2 * 3
