"""Draft heads in generate(): they read the states of prompts and of steps that verify, and greedy
tokens are those of plain decoding."""

import copy
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch

import attnops
from attnops.core.errors import PatchError
from attnops.hf import tiny
from attnops.hf.steps import hidden, prompt, round_graph, rounds
from attnops.hf.steps.eagle import Eagle
from attnops.hf.steps.hidden import Read
from attnops.hf.steps.round_graph import Round
from attnops.hf.steps.rounds import Rounds
from attnops.hf.steps.waiting import Waiting
from tests.hf.blocks import draft_of
from tests.hf.decoding import auto
from tests.hf.drafting import asked, head_of, next_turn, patched, right, words_of, worth
from tests.hf.layers_ahead import layer_of


@torch.no_grad()
def chain(model, head, text, drafts, skipped=0):
    """What the head drafts after a text, from the states of the whole text."""
    states = model(text[None, :-1], output_hidden_states=True).hidden_states
    hidden = torch.cat([states[n] for n in Eagle(head).states_of(len(states) - 1)], -1)[0, skipped:]
    embed, found = model.get_input_embeddings(), []
    tokens = text[1 + skipped :]
    for _ in range(drafts):
        logits, states = head(embed(tokens)[None], hidden[None])
        found.append(head.to_target(logits[0, -1:].argmax(-1)))
        tokens = torch.cat([tokens, found[-1]])
        hidden = torch.cat(
            [hidden if hidden.shape[-1] == states.shape[-1] else head.fc(hidden), states[0, -1:]]
        )
    return torch.cat(found)


def check(model, head, given, want, proposed, skipped=0):
    """Each draft is what the head drafts after the whole text, of which it has not read the first
    tokens."""
    right(partial(chain, model, head, skipped=skipped), given, want, proposed)


def taught(model, head, texts, steps=60):
    """The head, which has learned the next tokens of these texts int64 `[B, S]`."""
    with torch.no_grad():
        states = model(texts, output_hidden_states=True).hidden_states
        hidden = torch.cat([states[n] for n in Eagle(head).states_of(len(states) - 1)], -1)[:, :-2]
        embeddings = model.get_input_embeddings()(texts[:, 1:-1])
    words = texts[:, 2:]
    learned = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(steps):
        logits, _ = head(embeddings, hidden)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        learned.step()
        learned.zero_grad()
    return head.requires_grad_(False)


def test_states_of_a_prompt_are_freed(monkeypatch):
    """Once the head has read them. Those of a long prompt are large."""
    model = tiny.model("llama", num_hidden_layers=4)
    ours, _ = patched(model, head_of(model))
    made, kept, own = [], [], Rounds._step

    def read(*given):
        made.append(weakref.ref(given[2]))
        return Read(*given)

    def step(*given):
        kept.extend(each() for each in made)
        return own(*given)

    monkeypatch.setattr(hidden, "Read", read)
    monkeypatch.setattr(prompt, "Read", read)
    monkeypatch.setattr(Rounds, "_step", step)
    given = {**asked(1), "max_new_tokens": 4}
    for _ in range(3):
        ours.generate(**given)
    assert len(made) == 3 and len(kept) > 3 and not any(each is not None for each in kept)


HEADS = {"Eagle3Head": head_of, "DFlashHead": draft_of, "MTPLayer": layer_of}


@pytest.mark.parametrize("kind", HEADS)
def test_autocast(kind):
    """A head computes in its own dtype."""
    model = tiny.model("llama", num_hidden_layers=4)
    ours, handle = patched(model, HEADS[kind](model))
    plain, _ = patched(model, None)
    given = {**asked(1), "max_new_tokens": 8}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours.generate(**given), plain.generate(**given))
        assert worth(handle) >= 1


@pytest.mark.parametrize("kind", HEADS)
def test_a_model_whose_dtype_has_changed(kind):
    """The head stays as it is, and drafts again where the model is like it."""
    model = tiny.model("llama", num_hidden_layers=4)
    ours, handle = patched(model, HEADS[kind](model))
    plain, _ = patched(model, None)
    given = {**asked(1), "max_new_tokens": 4}
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        got, want = (each.to(dtype).generate(**given) for each in (ours, plain))
        assert torch.equal(got, want)
        if dtype is torch.float32:
            assert worth(handle) >= 1
        else:
            told = "nothing was drafted: it is torch.float32 on cpu, and LlamaForCausalLM torch.bf"
            assert handle.took.rounds.startswith(told)


def test_no_other_thread_looks_at_layers_that_are_read(monkeypatch):
    """They have other forwards then."""
    model = tiny.model("llama", num_hidden_layers=4)
    ours, handle = patched(model, head_of(model))
    handle._settle()
    turn = handle._paged.decoder().turn
    free, own = [], hidden._heard

    def is_free():
        found = turn.acquire(blocking=False)
        if found:
            turn.release()
        return found

    @contextmanager
    def heard(modules):
        with own(modules) as found, ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(is_free).result())
            yield found

    monkeypatch.setattr(hidden, "_heard", heard)
    ours.generate(**asked(1), max_new_tokens=4)
    assert free and not any(free)


def test_forwards_that_are_read_stay_those_of_the_instance():
    """As accelerate's. What another thread computes is not read."""
    layer, given = torch.nn.Identity(), torch.ones(2)
    own = layer.forward = torch.neg
    with hidden._heard([layer]) as found, ThreadPoolExecutor(1) as pool:
        pool.submit(layer, given).result()
        assert not found
        layer(given)
    assert torch.equal(found[layer], -given) and layer.forward is own


LAYERS: dict[str, dict[str, int]] = {"gemma3": {}}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_what_a_head_drafts(kind, proposed):
    """From prompts with padding, in graphs and in the model's own layers, and from rounds whose
    rows accept different numbers: what it would draft after the whole text."""
    model = tiny.model(kind, **LAYERS.get(kind, {"num_hidden_layers": 4}))
    calls = [{**asked(rows), "max_new_tokens": 18} for rows in (1, 3, 3)]
    texts = [model.generate(**given) for given in calls]
    head = taught(model, head_of(model, draft_vocab_size=None), texts[2][::2])
    ours, handle = patched(model, head)
    for given, want in zip(calls, texts, strict=True):
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        assert worth(handle) >= 1
        check(model, head, given, want, proposed)
    assert worth(handle) > 1.3


def test_a_prompt_in_chunks(proposed, monkeypatch):
    """Of which the last one has no token of some rows."""
    monkeypatch.setattr(prompt, "CHUNK", 12)
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    ours, _ = patched(model, head)
    given = {**asked(3), "max_new_tokens": 8}
    given["attention_mask"][2, :7] = 0
    want = model.generate(**given)
    for _ in range(2):
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        check(model, head, given, want, proposed)


def test_a_head_that_has_not_read_the_turns_before(proposed):
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    given, want, skipped = next_turn(model, head, proposed)
    check(model, head, given, want, proposed, skipped)


def test_states_of_a_prompt_that_runs_again(monkeypatch):
    """Its graphs have read a part of it, and then the model's own layers run it all."""
    own, begin, parts = prompt.Prompts._tried, Waiting.begin, []

    def tried(prompts, *given):
        own(prompts, *given)
        prompts.why = "of the test"

    def begun(waiting, read, *given):
        parts.append(len(read))
        begin(waiting, read, *given)

    monkeypatch.setattr(prompt.Prompts, "_tried", tried)
    monkeypatch.setattr(Waiting, "begin", begun)
    model = tiny.model("llama", num_hidden_layers=4)
    ours, _ = patched(model, head_of(model))
    given = {**asked(1), "max_new_tokens": 6}
    want = model.generate(**given)
    for _ in range(3):
        assert torch.equal(ours.generate(**given), want)
    assert parts == [1, 1, 1]


@pytest.mark.parametrize("pack", [True, False])
def test_the_linears_of_a_head_are_together_until_unpatch(pack):
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    linears = head.midlayer.self_attn.q_proj, head.midlayer.self_attn.k_proj

    def together():
        first, second = (each.weight.untyped_storage().data_ptr() for each in linears)
        return first == second

    ours, how = copy.deepcopy(model), auto(compile_after=None, pack=pack)
    handle = attnops.patch(ours, decode=how, speculate=head)
    given = {**asked(1), "max_new_tokens": 6}
    assert torch.equal(ours.generate(**given), model.generate(**given))
    assert together() == pack
    handle.unpatch()
    assert not together()


def test_a_model_whose_layers_have_another_name():
    model = tiny.model("gpt2", n_layer=4)
    with pytest.raises(PatchError, match="GPT2LMHeadModel has no list of them named layers"):
        attnops.patch(model, speculate=head_of(model))


def test_a_model_with_a_head_returns_what_it_did():
    model = tiny.model("llama", num_hidden_layers=4)
    ours, handle = patched(model, head_of(model))
    given = asked(2)
    del given["do_sample"]
    with torch.no_grad():
        assert ours(**given).hidden_states is None
        assert len(ours(**given, output_hidden_states=True).hidden_states) == 5
    call = {**asked(1), "max_new_tokens": 6}
    want = model.generate(**call)
    assert torch.equal(ours.generate(**call, prompt_lookup_num_tokens=3), want)
    assert torch.equal(ours.generate(**call, num_beams=2), model.generate(**call, num_beams=2))
    assert handle.took.rounds == "attnops drafted nothing: num_beams="


def test_what_a_head_reads_is_replaced(proposed):
    """Graphs read weights where they were: there are new ones."""
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    ours, _ = patched(model, head)
    given = {**asked(1), "max_new_tokens": 12}
    want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)

    def weights():
        head.load_state_dict(head_of(model, 6).state_dict(), assign=True)

    def words():
        head.d2t = head.d2t + 1

    def embeddings():
        fresh = copy.deepcopy(model.get_input_embeddings())
        fresh.weight.data.neg_()
        for each in (model, ours):
            each.set_input_embeddings(fresh)

    def layers():
        for each in (model, ours):
            each.model.layers[1] = copy.deepcopy(each.model.layers[1])

    for replace in (weights, words, embeddings, layers):
        replace()
        want = model.generate(**given)
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        check(model, head, given, want, proposed)


WRONG = {
    "vocab_size": ({"vocab_size": 64}, "it has 64 words and LlamaForCausalLM has 128"),
    "states": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        "and LlamaForCausalLM has 4 layers",
    ),
    "width": ({"target_hidden_size": 32}, "it reads states of 32 numbers"),
    "embeddings": ({"hidden_size": 32, "target_hidden_size": 64}, "it has no embeddings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_of_another_model(name):
    words, told = WRONG[name]
    model = tiny.model("llama", num_hidden_layers=4)
    with pytest.raises(PatchError, match=told):
        attnops.patch(copy.deepcopy(model), speculate=head_of(model, **words))


def test_a_head_of_another_dtype():
    model = tiny.model("llama", num_hidden_layers=4)
    with pytest.raises(PatchError, match=r"it is torch\.float16 on cpu, and Llama"):
        attnops.patch(copy.deepcopy(model), speculate=head_of(model).half())


def test_a_folder(tmp_path):
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    ours = copy.deepcopy(model)
    with pytest.raises(PatchError, match="the folder of a checkpoint"):
        attnops.patch(ours, speculate=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(words_of(model)))
    tensors = head.state_dict()
    torch.save(
        {k: v for k, v in tensors.items() if "o_proj" not in k}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(PatchError, match=r"no midlayer\.self_attn\.o_proj\.weight"):
        attnops.patch(ours, speculate=str(tmp_path))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    how = auto(compile_after=None)
    handle = attnops.patch(ours, decode=how, speculate=tmp_path)
    assert attnops.patch(ours, decode=how, speculate=str(tmp_path)) is handle
    given = {**asked(1), "max_new_tokens": 8}
    assert torch.equal(ours.generate(**given), model.generate(**given))
    assert worth(handle) >= 1


def test_a_head_that_is_seldom_right(proposed, monkeypatch):
    """It reads little while nothing is drafted, every fifth round what it missed, and before it
    drafts again the rest."""
    for module in (rounds, round_graph):
        monkeypatch.setattr(module, "PROBE", 5)
    monkeypatch.setattr(rounds, "PROBE_MOST", 20)
    ways, own = [], Round._way

    def noted(made, drafts):
        ways.append(own(made, drafts))
        return ways[-1]

    monkeypatch.setattr(Round, "_way", noted)
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    ours, _ = patched(model, head)
    given = {**asked(3), "max_new_tokens": 50}
    want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    idle = [bool((tokens < 0).all()) for _, tokens in proposed]
    assert 4 < len(idle) - sum(idle) < len(idle) / 2
    assert (True, False) in pairwise(idle)
    assert ways.count("late") > 1 and ways.count("reads") > ways.count("late")
    assert all(ways[at - 4 : at] == ["waits"] * 4 for at, way in enumerate(ways) if way == "reads")
    check(model, head, given, want, proposed)
