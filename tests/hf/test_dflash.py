"""DFlash's block drafts in generate(): greedy tokens are those of plain decoding, and a block is
what the draft says after the whole text."""

import copy
import json
from functools import partial
from itertools import pairwise

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput, PatchError
from attnops.hf import tiny
from attnops.hf.steps import prompt, round_graph, rounds
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.hf.steps.head_calls import Calls
from attnops.hf.steps.speculate import plan_of
from attnops.nn import DFlashHead
from tests.dflash import published
from tests.hf.blocks import BLOCK, IDS, draft_of, words
from tests.hf.decoding import auto
from tests.hf.drafting import asked, next_turn, patched, right, worth


def states_of(model, text):
    """`[L, W]`."""
    with torch.no_grad():
        states = model(text[None], output_hidden_states=True).hidden_states
    return torch.cat([states[number + 1] for number in IDS], -1)[0]


def block(model, draft, states, last):
    """Logits `[N - 1, V]` behind one text. states: of all its tokens but the last."""
    embeddings = model.get_input_embeddings().weight
    hidden = published(draft.words, draft.state_dict(keep_vars=True), embeddings, states, last)
    return model.get_output_embeddings()(hidden)


@torch.no_grad()
def drafts_of(model, draft, text, count, skipped=0):
    """What follows a text, of whose first tokens the draft has read nothing."""
    assert count == BLOCK - 1
    return block(model, draft, states_of(model, text[:-1])[skipped:], text[-1]).argmax(-1)


def taught(model, draft, texts, steps=40):
    """The draft, which has learned what follows in these texts int64 `[B, S]`."""
    draft.requires_grad_(True)
    learned, known = (
        torch.optim.Adam(draft.parameters(), 0.01),
        [states_of(model, t) for t in texts],
    )
    for step in range(steps):
        for text, states in zip(texts, known, strict=True):
            for at in range(9 + step % 3, len(text) - BLOCK, 3):
                logits = block(model, draft, states[:at], text[at])
                wanted = text[at + 1 : at + BLOCK]
                torch.nn.functional.cross_entropy(logits, wanted).backward()
        learned.step()
        learned.zero_grad()
    return draft.requires_grad_(False)


MODELS = {
    "llama": {},
    "qwen3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "qwen3_moe": {"attention_bias": True},
    "qwen3_5": {},
    "gemma3": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "is_causal": False,
    },
}
"""And words of the draft."""
DEEP = {"num_hidden_layers": 4}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_draft_proposes(kind, proposed):
    """From prompts with padding, in graphs and in the model's own layers, and from rounds whose
    rows accept different numbers."""
    model = tiny.model(kind, **({} if kind in ("gemma3", "qwen3_5") else DEEP))
    calls = [{**asked(rows), "max_new_tokens": 22} for rows in (1, 3, 3)]
    texts = [model.generate(**given) for given in calls]
    draft = taught(model, draft_of(model, **MODELS[kind]), texts[2][::2])
    ours, handle = patched(model, draft)
    for given, want in zip(calls, texts, strict=True):
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        assert worth(handle) >= 1
        right(partial(drafts_of, model, draft), given, want, proposed)
    assert worth(handle) > 1.3


def test_a_draft_that_is_seldom_right(proposed, monkeypatch):
    """It reads little while nothing is drafted, every fifth round what it missed, and before it
    drafts again the rest. A prompt comes in chunks, of which the last one has no token of some
    rows."""
    for module in (rounds, round_graph):
        monkeypatch.setattr(module, "PROBE", 5)
    monkeypatch.setattr(rounds, "PROBE_MOST", 20)
    monkeypatch.setattr(prompt, "CHUNK", 12)
    model = tiny.model("llama", **DEEP)
    draft = draft_of(model)
    ours, _ = patched(model, draft)
    given = {**asked(3), "max_new_tokens": 50}
    given["attention_mask"][2, :7] = 0
    want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    idle = [bool((tokens < 0).all()) for _, tokens in proposed]
    assert 4 < len(idle) - sum(idle) < len(idle) / 2
    assert (True, False) in pairwise(idle)
    right(partial(drafts_of, model, draft), given, want, proposed)


def test_a_draft_that_has_not_read_the_turns_before(proposed):
    model = tiny.model("llama", **DEEP)
    draft = draft_of(model)
    given, want, skipped = next_turn(model, draft, proposed)
    right(partial(drafts_of, model, draft, skipped=skipped), given, want, proposed)


def test_no_slot_is_written_twice(monkeypatch):
    """What lies behind the states of a text has the places of the block, and a GPU writes both at
    once."""
    model = tiny.model("llama", **DEEP)
    own, written = Calls.__call__, []

    def noted(calls, args, where):
        slots = torch.cat([where["context"].slots, where["batch"].slots])
        written.append(slots[slots >= 0].tolist() if type(slots) is torch.Tensor else [])
        return own(calls, args, where)

    monkeypatch.setattr(Calls, "__call__", noted)
    monkeypatch.setattr(ChoiceGraphs, "capture", lambda *_: None)
    ours, handle = patched(model, draft_of(model))
    ours.generate(**asked(3), max_new_tokens=12)
    assert worth(handle) >= 1 and sum(map(bool, written)) > 3
    assert all(len(slots) == len({*slots}) for slots in written)


def test_what_a_draft_reads_is_replaced(proposed):
    """Graphs read weights where they were: there are new ones, of the model, too."""
    model = tiny.model("llama", **DEEP)
    draft = draft_of(model)
    ours, _ = patched(model, draft)
    given = {**asked(1), "max_new_tokens": 10}
    assert torch.equal(ours.generate(**given), model.generate(**given))

    def last_linear():
        fresh = copy.deepcopy(model.lm_head)
        fresh.weight.data.neg_()
        for each in (model, ours):
            each.lm_head = fresh

    def weights():
        draft.load_state_dict(draft_of(model, 6).state_dict(), assign=True)

    for replace in (last_linear, weights):
        replace()
        want = model.generate(**given)
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        right(partial(drafts_of, model, draft), given, want, proposed)


def test_what_a_draft_costs():
    """It runs once a round, and so does the last linear of the model."""
    model = tiny.model("llama", **DEEP)
    draft, width = draft_of(model), 64
    layers = 2 * (2 * 64 * width + 2 * 32 * width + 3 * 2 * width * width)
    read = 2 * width * width + layers + tiny.VOCAB * width
    assert plan_of(draft).form.head.weights(model) == read


WRONG = {
    "vocab_size": ({"vocab_size": 64}, "it has 64 words and LlamaForCausalLM has 128"),
    "states": (
        {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 3}},
        r"it reads the states \(2, 4\), and LlamaForCausalLM has 4 layers",
    ),
    "width": ({"hidden_size": 32}, "it reads states of 32 numbers"),
    "block": ({"block_size": 65}, "num_drafts: got 64, want 1 to 63 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_draft_of_another_model(name):
    more, told = WRONG[name]
    model = tiny.model("llama", **DEEP)
    draft = DFlashHead({**words(model), **more})
    with pytest.raises(InvalidInput if name == "block" else PatchError, match=told):
        attnops.patch(model, speculate=draft)


def test_a_model_without_a_last_linear():
    model = tiny.model("llama", **DEEP)
    draft = draft_of(model)
    model.set_output_embeddings(None)
    with pytest.raises(PatchError, match="last linear, and LlamaForCausalLM has none"):
        attnops.patch(model, speculate=draft)


def test_a_folder(tmp_path):
    model = tiny.model("llama", **DEEP)
    ours, tensors = copy.deepcopy(model), draft_of(model).state_dict()
    (tmp_path / "config.json").write_text(json.dumps(words(model)))
    some = {name: t for name, t in tensors.items() if "1.self_attn.o_proj" not in name}
    torch.save(some, tmp_path / "pytorch_model.bin")
    with pytest.raises(PatchError, match=r"no layers\.1\.self_attn\.o_proj\.weight"):
        attnops.patch(ours, speculate=str(tmp_path))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    how = auto(compile_after=None)
    handle = attnops.patch(ours, decode=how, speculate=tmp_path)
    assert attnops.patch(ours, decode=how, speculate=str(tmp_path)) is handle
    given = {**asked(1), "max_new_tokens": 8}
    with torch.autocast("cpu", torch.bfloat16):
        ours.generate(**given)
    assert worth(handle) >= 1
    assert torch.equal(ours.generate(**given), model.generate(**given))
    # Its layers were recorded, and their linears merged.
    first = handle.decode.speculate.layers[0].self_attn
    query, key = (each.weight.untyped_storage() for each in (first.q_proj, first.k_proj))
    assert query.data_ptr() == key.data_ptr()
