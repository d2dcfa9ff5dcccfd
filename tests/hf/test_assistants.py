"""Models that draft the tokens of others in generate()."""

import copy
import gc
import weakref

import pytest
import torch

import attnops
from attnops.hf import tiny
from attnops.hf.steps.assistant import Assistant
from attnops.hf.steps.rounds import Depth
from attnops.hf.steps.speculate import against_assistant
from tests.hf.decoding import auto
from tests.hf.drafting import asked, assistant, patched, worth


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_assistant(kind):
    """A model that drafts for itself is right, in its own pages, whose rows are of one length no
    more than the model's."""
    model, other = tiny.model("llama"), tiny.model(kind, seed=0 if kind == "llama" else 3)
    ours, handle = patched(model, None)
    first = {**asked(1), "max_new_tokens": 4, "assistant_model": tiny.model("llama")}
    ours.generate(**first)
    assert "it is not patched; want attnops.patch(assistant)" in handle.took.rounds
    attnops.patch(other, decode=auto(compile_after=None))
    for rows in (1, 3):
        given = {**asked(rows), "max_new_tokens": 20}
        want = model.generate(**given)
        for _ in range(2):
            assert torch.equal(ours.generate(**given, assistant_model=other), want)
            right = worth(handle)
            assert right > 2.9 if kind == "llama" else right < 2.9


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_assistant_reads_what_it_missed(monkeypatch, kind):
    """Rows keep different numbers of drafts before a pause, and some end in it. gemma3 has
    windows."""
    model, other = tiny.model("llama"), tiny.model(kind, seed=3)
    if kind == "llama":  # right now and then
        for name, weight in other.named_parameters():
            weight.data.lerp_(model.get_parameter(name).data, 0.85)
    alone, (ours, _), seen = copy.deepcopy(other), patched(model, None), []
    attnops.patch(other, decode=auto(compile_after=None))
    own, pauses = Assistant.propose, iter([0, 1, 0, 3, 0, 12, 0, 0, 9] * 5)
    left, most, step = [next(pauses)], torch.zeros(3), Assistant._step

    def scripted(depth, *_):
        if left[0]:
            left[0] -= 1
            return 1
        left[0] = next(pauses)
        return 6

    def noted(assistant, state):
        most.copy_(state.seq_lens + 4 - (given["attention_mask"] == 0).sum(1))
        proposal = own(assistant, state)
        lengths = state.seq_lens.tolist()
        seen.append((state.tokens.clone(), lengths, state.missed, proposal.tokens.clone()))
        return proposal

    def near(assistant, asks):
        assert (asks.position_ids[:, -1] <= most).all(), "far behind the text, or the pages"
        return step(assistant, asks)

    monkeypatch.setattr(Assistant, "_step", near)
    monkeypatch.setattr(Depth, "next", scripted)
    monkeypatch.setattr(Assistant, "propose", noted)
    given = {**asked(3), "max_new_tokens": 60, "eos_token_id": [125, 102], "pad_token_id": 0}
    want = model.generate(**given)
    assert torch.equal(ours.generate(**given, assistant_model=other), want)
    assert {0, 1, 3, 12} <= {missed for _, _, missed, _ in seen}
    for texts, lengths, _, drafts in seen:
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ids = torch.cat([text[:length], drafts[row]])[None]
            mask = torch.ones_like(ids)
            mask[:, :9] = given["attention_mask"][row]
            at = (mask.cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                logits = alone(ids, attention_mask=mask, position_ids=at).logits
            assert torch.equal(logits[0, length - 1 : -1].argmax(-1), drafts[row])


@pytest.mark.parametrize("mode", ["hf", "piecewise"])
def test_an_assistant_that_is_patched_otherwise(mode):
    model = tiny.model("llama")
    ours, handle = patched(model, None)
    other = tiny.model("llama", seed=3)
    attnops.patch(other, cache="paged", decode=auto(mode))
    given = {**asked(1), "max_new_tokens": 6}
    got = ours.generate(**given, assistant_model=other)
    assert torch.equal(got, model.generate(**given))
    assert f"patched with decode={mode!r}; want 'auto'" in handle.took.rounds


def test_an_assistant_elsewhere():
    model, (other, _) = tiny.model("llama"), assistant()
    with torch.device("meta"):
        away = tiny.model("llama")
    assert against_assistant(model, other) == ""
    assert "it is on cpu, and LlamaForCausalLM on meta" in against_assistant(away, other)
    other.forward = lambda *args, **kwargs: None
    assert "forward was replaced" in against_assistant(model, other)


def test_an_assistant_is_not_held_after_a_call():
    model, (other, theirs) = tiny.model("llama"), assistant()
    ours, _ = patched(model, None)
    given = {**asked(1), "max_new_tokens": 3}

    def fails(*_):
        raise KeyError("the assistant's own")

    ours.generate(**given, assistant_model=other)
    hook = other.register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="own"):
        ours.generate(**given, assistant_model=other)
    assert theirs._paged.pool.idle_bytes > 0
    hook.remove()
    got = ours.generate(**given, assistant_model=other)
    assert torch.equal(got, model.generate(**given))
    theirs.unpatch()
    gone = weakref.ref(other)
    del other, theirs, fails, hook
    gc.collect()
    assert gone() is None
