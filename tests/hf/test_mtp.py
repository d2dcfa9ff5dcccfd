"""MTP layers in generate(): what they draft, and where they come from."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import attnops
from attnops.core.errors import PatchError
from attnops.hf import tiny
from attnops.hf.cache import model_pages
from attnops.hf.models.experts import is_taken
from attnops.hf.steps.heads import weights_of
from attnops.hf.steps.mtp import Mtp
from attnops.hf.steps.waiting import Room, Waiting
from tests.hf.decoding import Streamer, auto
from tests.hf.drafting import asked, head_of, next_turn, patched, right, worth
from tests.hf.layers_ahead import layer_of, public, saved

KINDS = {
    "latents": ("deepseek_v3", {"first_k_dense_replace": 9}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {}),
}
"""The first and the last have layers that can be recorded on a CPU."""


def target(kind="glm4_moe"):
    name, words = KINDS[kind]
    model = tiny.model(name, **words)
    with torch.no_grad():  # states before the last norm are then others
        weight = model.get_decoder().norm.weight
        weight.add_(torch.linspace(-0.8, 2.0, len(weight)))
    return model


def states_of(model, texts):
    """Behind the last norm, `[B, S, E]`."""
    with torch.no_grad():
        return model.get_decoder()(texts).last_hidden_state


def step(model, layer, tokens, hidden):
    """The layer over whole texts, by transformers' own attention. int64 `[B, S]`, `[B, S, E]`."""
    length = tokens.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    decoder, at = model.get_decoder(), torch.arange(length)[None]
    kinds = 3 if "qwen3_5" in model.config.model_type else 0  # time, height and width
    turned = decoder.rotary_emb(hidden, at.expand(kinds, 1, length) if kinds else at)
    where = {"position_embeddings": turned, "position_ids": at, "attention_mask": mask}
    return layer(model.get_input_embeddings()(tokens), hidden, **where)


@torch.no_grad()
def chain(model, layer, text, drafts, skipped=0):
    """What the layer drafts after a text, from the states of the whole text."""
    hidden, tokens = states_of(model, text[None, :-1])[:, skipped:], text[None, 1 + skipped :]
    for _ in range(drafts):
        logits, states = step(model, layer, tokens, hidden)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        hidden = torch.cat([hidden, states[:, -1:]], 1)
    return tokens[0, -drafts:]


def taught(model, layer, texts, steps=40):
    """The layer, which has learned the next tokens of these texts int64 `[B, S]`."""
    hidden = states_of(model, texts)[:, :-2]
    shared = {id(each) for each in model.parameters()}
    own = [each for each in layer.parameters() if id(each) not in shared]
    learned = torch.optim.Adam(own, 0.01)
    for _ in range(steps):
        logits, _ = step(model, layer, texts[:, 1:-1], hidden)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 2:].flatten()).backward()
        learned.step()
        learned.zero_grad()
    return layer


def check(model, layer, given, want, proposed, skipped=0):
    """Each draft is what the layer drafts after the whole text."""
    right(partial(chain, model, layer, skipped=skipped), given, want, proposed)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_drafts(kind, proposed, tmp_path):
    """From prompts with padding and from rounds whose rows accept different numbers: what it would
    draft after the whole text."""
    model = target(kind)
    calls = [{**asked(rows), "max_new_tokens": 18} for rows in (1, 3, 3)]
    texts = [model.generate(**given) for given in calls]
    layer = taught(model, layer_of(model), texts[2][::2])
    saved(model, tmp_path, public(model, layer))
    ours, handle = patched(model, "mtp")
    for given, want in zip(calls, texts, strict=True):
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        assert worth(handle) >= 1
        check(model, layer, given, want, proposed)
    assert worth(handle) > 1.3


PUBLIC = {
    "mtp.fc.weight",
    "mtp.layers.0.input_layernorm.weight",
    *(f"mtp.layers.0.mlp.{part}_proj.weight" for part in ("down", "gate", "up")),
    "mtp.layers.0.post_attention_layernorm.weight",
    *(f"mtp.layers.0.self_attn.{part}_norm.weight" for part in "kq"),
    *(f"mtp.layers.0.self_attn.{part}_proj.weight" for part in "koqv"),
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
}
"""The names of Qwen3.5-27B. Those of DeepSeek-V3 and GLM-4.5 are in tests/test_heads.py."""


def test_names_of_a_public_checkpoint():
    model = target("qwen3_5")
    assert public(model, layer_of(model)).keys() == PUBLIC


def test_use_mtp(proposed, tmp_path):
    """transformers' own argument: the layer of the checkpoint drafts in the rounds of its call
    alone, of any number of rows, and other heads draft in theirs."""
    model = target()
    layer = layer_of(model)
    saved(model, tmp_path, public(model, layer))
    ours, handle = patched(model, "lookup")
    given = {**asked(3), "max_new_tokens": 12}
    want = model.generate(**given)
    plain = ours.generate(**given)
    for _ in range(2):
        proposed.clear()
        assert torch.equal(ours.generate(**given, use_mtp=True), want)
        assert worth(handle) >= 1
        check(model, layer, given, want, proposed)
    assert torch.equal(plain, want) and torch.equal(ours.generate(**given), want)
    assert not isinstance(handle.decode.speculate, torch.nn.Module)


def test_use_mtp_beside_another_head(proposed, tmp_path):
    """Graphs return the states that one of them reads at a time."""
    model = target("qwen3_5")
    layer, head = layer_of(model), head_of(model)
    saved(model, tmp_path, public(model, layer))
    ours, handle = patched(model, head)
    given = {**asked(2), "max_new_tokens": 10}
    want = model.generate(**given)
    for more in ({}, {"use_mtp": True}, {}, {"use_mtp": True}):
        proposed.clear()
        assert torch.equal(ours.generate(**given, **more), want)
        assert worth(handle) >= 1
        if more:
            check(model, layer, given, want, proposed)


def test_heads_of_calls_that_run_at_once(tmp_path):
    """Graphs stay as they are while a call has them."""
    model, beside = target("qwen3_5"), []
    saved(model, tmp_path, public(model, layer_of(model)))
    ours, handle = patched(model, head_of(model))
    given = {**asked(1), "max_new_tokens": 4}
    want = model.generate(**given)

    class Other(Streamer):
        def put(self, value):
            if not beside:
                with ThreadPoolExecutor(1) as pool:
                    found = pool.submit(ours.generate, **given, use_mtp=True).result()
                beside.append((found, handle.took.rounds))

    assert torch.equal(ours.generate(**given, streamer=Other()), want) and worth(handle) >= 1
    [(found, told)] = beside
    assert torch.equal(found, want) and told.startswith("nothing was drafted: the steps of another")
    assert torch.equal(ours.generate(**given, use_mtp=True), want) and worth(handle) >= 1


def test_a_model_without_an_mtp_layer(tmp_path):
    ours = target("qwen3_5")
    with pytest.raises(PatchError, match=r"config\.name_or_path is '', and no such checkpoint"):
        attnops.patch(ours, speculate="mtp")
    saved(ours, tmp_path, {})
    want = r"none named mtp\.\* or model\.layers\.4\.\*, want a checkpoint with such a layer"
    with pytest.raises(PatchError, match=want):
        attnops.patch(ours, speculate="mtp")
    handle = attnops.patch(ours, decode=auto(compile_after=None))
    with pytest.raises(ValueError, match="not supported with stateful"):  # transformers'
        ours.generate(**asked(1), max_new_tokens=3, use_mtp=True)
    assert "transformers' own loop drafts: PatchError: patch: got speculate='mtp'; " in (
        handle.took.rounds
    )


LACKING = {"longcat_flash": "layers with attention", "gpt2": "layers with", "lfm2": "norm behind"}


@pytest.mark.parametrize("kind", LACKING)
def test_a_model_that_cannot_have_an_mtp_layer(kind, monkeypatch):
    model, want = tiny.model(kind, vocab_size=128), f"has no {LACKING[kind]}"
    monkeypatch.setattr(model.config, "name_or_path", str(Path(__file__).parent))
    with pytest.raises(PatchError, match=want):
        attnops.patch(model, speculate="mtp")
    with pytest.raises(PatchError, match=want):
        attnops.patch(model, speculate=layer_of(target()))


def test_a_checkpoint_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    model = target("qwen3_5")
    folder = tmp_path / "models--some--model" / "snapshots" / "main"
    saved(model, folder, public(model, layer_of(model)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("/some/model", "another/model"):
        model.config.name_or_path = name
        with pytest.raises(PatchError, match=f"config.name_or_path is '{name}', and no such"):
            attnops.patch(model, speculate="mtp")
    model.config.name_or_path = "some/model"
    handle = attnops.patch(model, speculate="mtp")
    assert handle.decode.speculate.folder == str(folder)
    assert attnops.patch(model, speculate="mtp") is handle


def without(name):
    return lambda tensors: tensors.pop(name)


def wrong(name, shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


SPOILT = {
    "no layer.self_attn.o_proj.weight, want all": without("model.layers.2.self_attn.o_proj.weight"),
    r"eh_proj.weight.shape: got \(64, 64\), want \(64, 128\), by config": wrong(
        "model.layers.2.eh_proj.weight", (64, 64)
    ),
    "got layer.mlp.gate.weight_scale_inv, want only the": wrong(
        "model.layers.2.mlp.gate.weight_scale_inv", (1,)
    ),
}


@pytest.mark.parametrize("told", SPOILT)
def test_a_checkpoint_that_does_not_fit(told, tmp_path):
    model = target()
    tensors = public(model, layer_of(model))
    SPOILT[told](tensors)
    saved(model, tmp_path, tensors)
    with pytest.raises(PatchError, match=told):
        attnops.patch(model, speculate="mtp")


def test_a_layer_of_another_model():
    model, other = target(), target("qwen3_5")
    with pytest.raises(PatchError, match="its layer is a Glm4MoeDecoderLayer; want one of Qwen3_5"):
        attnops.patch(other, speculate=layer_of(model))
    other = tiny.model("glm4_moe", vocab_size=64)
    with pytest.raises(PatchError, match=r"it has 128 words and Glm4Moe\w+ has 64; want"):
        attnops.patch(other, speculate=layer_of(model))
    with pytest.raises(PatchError, match=r"it is torch\.float16 on cpu, and Glm4Moe"):
        attnops.patch(copy.deepcopy(model), speculate=layer_of(model).half())


def test_a_module_drafts_in_a_chat(proposed):
    model = target("latents")
    layer = layer_of(model)
    given, want, skipped = next_turn(model, copy.deepcopy(layer), proposed)
    check(model, layer, given, want, proposed, skipped)


def test_what_patch_takes_over_in_a_layer(tmp_path):
    """As in the model, until unpatch(): experts, routers and rows. So are rotation and latents."""
    model = target("deepseek_v3")
    layer = layer_of(model)
    before = [type(each) for each in layer.layer.modules()]
    handle = attnops.patch(model, speculate=layer)
    taken = [type(each) for each in layer.layer.modules()]
    assert is_taken(layer.layer.mlp.experts) and taken != before
    attention = layer.layer.self_attn
    assert attention.config is model.config and layer.rotary_emb is model.model.rotary_emb
    assert "expand_kv" in vars(attention)
    assert attnops.patch(model, speculate=layer) is handle
    handle.unpatch()
    assert not is_taken(layer.layer.mlp.experts)
    assert layer.rotary_emb is None and "expand_kv" not in vars(attention)
    assert [type(each) for each in layer.layer.modules()] == before


def test_what_a_step_reads():
    """Of experts as many as a token takes."""
    model = target("deepseek_v3")
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    experts = model.model.layers[1].mlp.experts
    numbers = experts.gate_up_proj.numel() + experts.down_proj.numel()
    assert weights_of(model) == linears + numbers * 2 / 8


def test_steps_over_latents_have_the_plan_of_their_kernel(monkeypatch):
    plan = torch.zeros(3, dtype=torch.int32)
    head = Mtp(layer_of(target("latents")))
    waiting = Waiting(Room(2, 32, 4, 8), head.width, head.layers, plan.device, torch.float32)
    monkeypatch.setattr(model_pages, "device_plan", lambda *given: plan)
    waiting.base.fill_(1)
    steps = waiting.steps(torch.tensor([5, 7]), 2)
    assert all(each.plan is plan for each in steps)
    assert [each.seq_lens.tolist() for each in steps] == [[5, 7], [6, 8]]
