"""Drafts of generate() with models whose layers have states: what is taken back leaves no trace in
them."""

import copy

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput, NotCapturable, NotFast
from attnops.hf.cache.names import named
from attnops.hf.models import convolutions, take_back
from attnops.hf.steps import decode
from tests.hf import hybrids
from tests.hf.decoding import ENDS, auto
from tests.hf.drafting import Branches, Oracle, asked, patched, worth

GREEDY = {"do_sample": False, "pad_token_id": 0}
NEAR = {"rtol": 1e-4, "atol": 1e-5}
ONE_OF_EACH = ("qwen3_5", "bamba", "lfm2")


def poison(pages):
    """No state holds a number, and nothing that is kept of tokens."""
    for each in pages.states.written:
        if each.is_floating_point():
            each.fill_(float("nan"))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", hybrids.NAMES)
def test_tokens_are_those_of_plain_decoding(name):
    """Drafts of which a part is wrong, so that rows keep none to all of them, and drafts that are
    looked up. Left padding, rows that end, and memory that holds no numbers before."""
    model, draft = hybrids.model(name), Oracle(5, wrong=0.35)
    ours, handle = patched(model, draft)
    handle.new_cache(3, 64)  # whose pages are idle
    for rows, ends in ((1, None), (3, None), (3, ENDS)):
        given = {**asked(rows), "max_new_tokens": 20, "pad_token_id": 0}
        given["input_ids"][:, 5:8] = given["input_ids"][:, 2:5]
        if ends:
            given["eos_token_id"] = ends
        draft.texts = want = model.generate(**given)
        for more in ({}, {"prompt_lookup_num_tokens": 3}):
            for pages in handle._paged.pool._idle:
                poison(pages)
            assert torch.equal(ours.generate(**given, **more), want)
            assert handle.took.decode == "breakable" and handle.took.loop == ""
            assert worth(handle) >= (0 if ends else 1 if more else 1.3)
            assert "without drafts" not in handle.took.rounds


@pytest.mark.parametrize("name", ("qwen3_next", "nemotron_h", "lfm2", "minimax"))
def test_rounds_in_bfloat16(name):
    """What is kept has the dtypes of the ops' arguments."""
    model, draft = copy.deepcopy(hybrids.model(name)).bfloat16(), Oracle(5, wrong=0.35)
    ours, handle = patched(model, draft)
    given = {**asked(2), "max_new_tokens": 12, "pad_token_id": 0}
    draft.texts = model.generate(**given)
    ours.generate(**given)
    assert worth(handle) >= 1 and "without drafts" not in handle.took.rounds


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", hybrids.NAMES)
def test_turns_of_a_chat_with_one_row(name):
    """Each goes on with the cache of the turn before, with drafts or without, and leaves the states
    behind its last token."""
    model = copy.deepcopy(hybrids.model(name))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, 0.5)  # of prompts: next tokens have no limits
    ours = copy.deepcopy(model)
    draft, how = Oracle(5, wrong=0.35), auto(compile_after=None)
    handle = attnops.patch(ours, cache="paged", decode=how, speculate=draft)
    twin, cache = hybrids.cache(model), handle.new_cache(1, 128)
    poison(cache.state.pages)
    text = asked(1)["input_ids"]
    # The last choice of the second and the third turn is not followed by a step.
    ngrams = {"no_repeat_ngram_size": 3}  # is not drafted with
    turns = (9, {}), (2, {}), (2, {"repetition_penalty": 1.2}), (5, ngrams), (9, {})
    for new, more in turns:
        mask = torch.ones_like(text)
        given = {"max_new_tokens": new, "attention_mask": mask, **GREEDY, **more}
        want = model.generate(text, past_key_values=twin, **given)
        draft.texts = want
        assert torch.equal(ours.generate(text, **named(cache), **given), want)
        assert (more is ngrams) == ("nothing was drafted" in handle.took.rounds)
        assert int(cache.get_seq_length()) == want.shape[1] - 1
        for number in cache.states:
            mine, his = hybrids.states(cache, number), hybrids.states(twin, number)
            torch.testing.assert_close(mine, his, **NEAR)
        text = torch.cat([want, torch.tensor([[7, 8, 9]])], 1)


class Stops(Oracle):
    """Raises when it is asked for the third time."""

    asks = 0

    def propose(self, state):
        self.asks += 1
        if self.asks == 3:
            raise KeyError("the draft's own")
        return super().propose(state)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_cache_after_an_error_of_the_draft(name):
    """It has the tokens of the rounds before."""
    model, draft = hybrids.model(name), Stops(5, wrong=0.35)
    ours = copy.deepcopy(model)
    handle = attnops.patch(ours, cache="paged", decode=auto(compile_after=None), speculate=draft)
    given = {"max_new_tokens": 20, **GREEDY}
    text, cache = asked(1)["input_ids"], handle.new_cache(1, 64)
    mask = torch.ones(1, 64, dtype=torch.int64)
    given["attention_mask"] = mask[:, : text.shape[1]]
    draft.texts = want = model.generate(text, **given)
    with pytest.raises(KeyError, match="the draft's own"):
        ours.generate(text, **named(cache), **given)
    kept = int(cache.get_seq_length())
    assert kept > text.shape[1] + 1
    longer = torch.cat([want[:, :kept], torch.tensor([[7, 8, 9]])], 1)
    given["attention_mask"] = mask[:, : longer.shape[1]]
    draft.texts = want = model.generate(longer, **given)
    assert torch.equal(ours.generate(longer, **named(cache), **given), want)


def fails(monkeypatch, most):
    """Graphs that verify more than so many tokens of a row cannot be made."""
    own = decode.graphed_steps

    def made(*args):
        if args[-1] > most:
            raise NotCapturable("a step that verifies", "for a test")
        return own(*args)

    monkeypatch.setattr(decode, "graphed_steps", made)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("name", (*ONE_OF_EACH, "minimax"))
def test_steps_without_graphs_that_verify(monkeypatch, name, most):
    """Rounds go on without drafts: in graphs, or by the model's own layers."""
    model, draft = hybrids.model(name), Oracle()
    ours, handle = patched(model, draft)
    fails(monkeypatch, most)
    given = {**asked(3), "max_new_tokens": 6, "pad_token_id": 0}
    draft.texts = want = model.generate(**given)
    with pytest.warns(NotFast):
        assert torch.equal(ours.generate(**given), want)
    assert handle.took.decode == ("breakable" if most else "hf")


def test_an_error_half_way_of_a_step_that_verifies(monkeypatch):
    """Some states have read tokens that others have not: the cache is not used again."""
    ours, own = copy.deepcopy(hybrids.model("lfm2")), convolutions.causal_conv1d
    how = auto(compile_after=None)
    handle = attnops.patch(ours, cache="paged", decode=how, speculate="lookup")
    fails(monkeypatch, 0)
    steps = []

    def second(*args, **kwargs):
        if "accepted" in kwargs:
            steps.append(1)
            if len(steps) == 2:
                raise KeyError("the op's own")
        return own(*args, **kwargs)

    monkeypatch.setattr(convolutions, "causal_conv1d", second)
    cache = handle.new_cache(1, 64)
    given = {"max_new_tokens": 6, **named(cache), **GREEDY}
    with pytest.warns(NotFast), pytest.raises(KeyError, match="the op's own"):
        ours.generate(asked(1)["input_ids"], **given)
    assert cache.state.verified is None
    with pytest.raises(InvalidInput, match="did not reach every layer"):
        ours.generate(torch.arange(1, 20)[None], **given)


def test_more_drafts_than_a_call_before():
    """Graphs of the first one hold memory that is gone. Without drafts nothing is kept."""
    model = hybrids.model("qwen3_5")
    ours, handle = patched(model, None)
    given = {**asked(2), "max_new_tokens": 24, "pad_token_id": 0}
    want = model.generate(**given)
    handle.new_cache(2, 64)  # whose pages are idle
    sizes, counted, owned = [], [], []
    for drafts in (0, 2, 2, 9, 3):
        more = {"prompt_lookup_num_tokens": drafts} if drafts else {}
        assert torch.equal(ours.generate(**given, **more), want)
        assert not drafts or worth(handle) >= 1
        [pages] = handle._paged.pool._idle
        sizes.append(pages.states.slots)
        counted.append(pages.nbytes)
        owned.append(len(pages.stream._tensors))
        assert {*map(id, pages.states.written)} <= {*map(id, pages.stream._tensors)}
        poison(pages)
    assert sizes == [0, 6, 6, 20, 20]
    assert counted[0] < counted[1] == counted[2] < counted[3] == counted[4]
    assert owned[0] < owned[1] == owned[4]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_kernel_takes_tokens_back(name):
    """Plain decoding has the kernel that the policy forces."""
    model = hybrids.model(name)
    ours, handle = patched(model, "lookup")
    given = {**asked(2), "max_new_tokens": 6, "pad_token_id": 0}
    want = model.generate(**given)
    with attnops.use({"causal_conv1d": "aten"}):
        assert torch.equal(ours.generate(**given), want)
    assert "nothing was drafted: no kernel of causal_conv1d" in handle.took.rounds


@pytest.mark.parametrize("of_states", [False, True])
def test_autocast_of_the_call_or_of_the_states_alone(of_states):
    ours = copy.deepcopy(hybrids.model("bamba"))
    handle = attnops.patch(ours, cache="paged", decode=auto(), speculate="lookup")
    with torch.autocast("cpu", torch.bfloat16, enabled=of_states):
        cache = handle.new_cache(1, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=not of_states):
        ours.generate(asked(1)["input_ids"], max_new_tokens=6, **named(cache), **GREEDY)
    assert "nothing was drafted: the states of the cache are" in handle.took.rounds


def test_no_memory_for_what_is_kept(monkeypatch):
    """The pages own their states as before."""
    ours, handle = patched(hybrids.model("lfm2"), "lookup")
    cache = handle.new_cache(1, 64)
    pages = cache.state.pages

    def none(*args):
        raise torch.OutOfMemoryError("for a test")

    monkeypatch.setattr(pages.states, "keep", none)
    with pytest.raises(torch.OutOfMemoryError):
        take_back.begin(ours, cache, 3, torch.tensor([5]))
    assert {*map(id, pages.states.tensors)} <= {*map(id, pages.stream._tensors)}


def test_a_tree_is_refused():
    model, draft = hybrids.model("lfm2"), Branches(4)
    ours, _ = patched(model, draft)
    given = {**asked(1), "max_new_tokens": 12, "pad_token_id": 0}
    draft.texts = model.generate(**given)
    with pytest.raises(InvalidInput, match=r"proposal\.parents: got a tree, want None"):
        ours.generate(**given)
