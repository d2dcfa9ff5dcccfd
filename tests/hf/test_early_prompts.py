"""Prompts that start while transformers prepares its call of the model."""

import copy
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from attnops.graphs.graphed import Graphed
from attnops.hf import generate, tiny
from attnops.hf.generation import running_generation
from attnops.hf.steps import early, prompt
from tests.hf.decoding import asked, first, generated, in_threads, logits
from tests.hf.helpers import tokens

CALL = (2, 14, 3)
EARLY, LATE = ["prompt", "preparation"], ["preparation", "prompt"]


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Of chunks in graphs."""
    monkeypatch.setattr(prompt, "CAPTURED", (32, 64))


@pytest.fixture
def order(monkeypatch):
    """In the order of a call: prompts in graphs, and transformers' preparation."""
    found = []
    replay, prepare = Graphed._replay, GenerationMixin._prepare_generation_config

    def replayed(self, entry, values, *sizes):
        if "positions" in values:
            found.append("prompt")
        return replay(self, entry, values, *sizes)

    def prepared(self, *args, **kwargs):
        found.append("preparation")
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(Graphed, "_replay", replayed)
    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", prepared)
    return found


@pytest.fixture
def ran(order):
    """Makes the calls of `pair.same`, and returns what ran in each."""

    def calls(pair, *every, **more):
        found = []
        for call in every:
            pair.wanted.setdefault(call, generated(pair.twin, *call))
            order.clear()
            pair.same(*call, **more)
            found.append([*order])
        return found

    return calls


@pytest.mark.parametrize("name", ["llama", "gemma3", "minicpm3"])
def test_a_prompt_starts_before_transformers_prepares_its_call(name, ran):
    """Once a call like it ran in graphs: rows of other lengths, with padding, in graphs of another
    size. Of 50 tokens no prompt ran before."""
    with first(name) as pair:
        calls = [CALL, CALL, CALL, (2, 11, 3), (2, 25, 3), (2, 25, 3), (2, 24, 3)]
        found = ran(pair, *calls)
        assert found == [["preparation"], LATE, EARLY, EARLY, ["preparation"], LATE, EARLY]
        assert pair.handle._paged.early.count == 3
        assert "while transformers prepared its call" in str(pair.handle.report())


@pytest.mark.parametrize("given", [{}, {"max_length": 20}, {"do_sample": True, "top_k": 1}])
def test_without_a_mask_and_with_other_arguments(given, order):
    ids, arguments = tokens(2, 14), {"max_new_tokens": 3, "do_sample": False} | given
    if "max_length" in given:
        del arguments["max_new_tokens"]
    with first() as pair:
        want = pair.twin.generate(ids, **arguments)
        for _ in range(3):
            order.clear()
            assert torch.equal(pair.model.generate(ids, **arguments), want)
    assert order == EARLY


def test_logits_are_those_of_the_model():
    with first() as pair:
        want = logits(pair.twin, *CALL)
        for _ in range(3):
            got = logits(pair.model, *CALL)
            assert torch.allclose(got, want, atol=1e-4)
        assert pair.handle._paged.early.count == 1


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize("column", [-1, 5])
def test_a_prompt_that_was_another_one_runs_again(column, ran, monkeypatch):
    """transformers may hand another prompt to the model than `generate()` was given. After two such
    calls none of the kind starts early."""
    prepare = GenerationMixin.prepare_inputs_for_generation

    def changed(self, input_ids, *args, **kwargs):
        made = prepare(self, input_ids, *args, **kwargs)
        if made["input_ids"].shape[1] > 1:
            made["input_ids"][-1, column] += 1
        return made

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", changed)
    with first() as pair:
        found = ran(pair, *[CALL] * 6)
        assert found[1:] == [LATE, *[["prompt", *LATE]] * 2, LATE, LATE]
        assert "with other tokens" in str(pair.handle.report())
        assert pair.handle._paged.early.count == 0


def test_weights_that_were_replaced(ran):
    """The first call looks at the model, and has no graphs of its new state."""

    def change(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(0)

    with first() as pair:
        assert ran(pair, CALL, CALL, CALL)[-1] == EARLY
        pair.change(change)
        assert "prompt" not in ran(pair, CALL)[0][:1]
        assert ran(pair, CALL, CALL)[-1] == EARLY


def test_a_weight_that_is_replaced_after_the_start(monkeypatch, ran):
    """The call looks at the model again. Graphs have prompts with either weight."""
    prepare, due = GenerationMixin._prepare_generation_config, []

    def prepared(self, *args, **kwargs):
        if due:
            replace(self)
        return prepare(self, *args, **kwargs)

    def replace(model):
        norm = model.model.norm
        norm.weight, norm.other = norm.other, norm.weight

    def has_two(model):
        norm = model.model.norm
        norm.other = nn.Parameter(-norm.weight.detach())

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", prepared)
    with first() as pair:
        pair.change(has_two)
        ran(pair, CALL, CALL)
        pair.change(replace)
        ran(pair, CALL, CALL)
        want = generated(pair.twin, *CALL)
        pair.change(replace)
        assert ran(pair, CALL) == [EARLY]
        due.append(True)
        assert torch.equal(generated(pair.model, *CALL), want)
        assert pair.handle._paged.early.count == 1


def test_an_attribute_that_is_switched_at_every_call(ran):
    """One prompt starts by what the model was. Then each start looks at all of it."""

    def switch(model):
        norm = model.model.norm
        norm.variance_epsilon, norm.other = norm.other, norm.variance_epsilon

    with first() as pair:
        pair.change(lambda model: setattr(model.model.norm, "other", 0.5))
        found = [ran(pair, CALL, CALL, CALL)[-1]]
        pair.change(switch)
        ran(pair, CALL, CALL, CALL)
        for _ in range(3):
            pair.change(switch)
            found += ran(pair, CALL)
        assert found == [EARLY, ["prompt", *LATE], EARLY, EARLY]


def test_the_caller_s_generate_may_write_weights(ran):
    """The prompt has the weights that the model has by then."""
    twin, due = tiny.model("llama"), []

    class Own(type(twin)):
        def generate(self, *args, **kwargs):
            if due:
                self.model.norm.weight.data.neg_()
            return super().generate(*args, **kwargs)

    model = copy.deepcopy(twin)
    model.__class__ = Own
    with first(model, twin=twin) as pair:
        assert ran(pair, CALL, CALL, CALL)[1:] == [LATE, LATE]
        due.append(True)
        twin.model.norm.weight.data.neg_()
        assert torch.equal(generated(model, *CALL), generated(twin, *CALL))


def test_a_call_that_asks_for_more_pages_than_the_one_before(order):
    """The length of its pages is not known from its arguments. Those of the early prompt are idle
    before it gets others, into which they are merged."""
    ids, given = asked(*CALL)
    found = []
    with first() as pair:
        for new in (3, 3, 3, 40, 40, 40):
            order.clear()
            outs = []
            for model in (pair.twin, pair.model):
                config = model.generation_config
                config.max_new_tokens, config.do_sample = new, False
                outs.append(model.generate(ids, attention_mask=given["attention_mask"]))
            assert torch.equal(*outs) and pair.took.cache == "paged"
            assert len(pair.handle._paged.pool._idle) == 1
            found.append([each for each in order if each == "prompt"])
        assert found == [[], ["prompt"], ["prompt"], ["prompt"], ["prompt"], ["prompt"]]
        assert pair.handle._paged.early.count == 2


def test_a_call_that_fails_leaves_no_pages_behind(order):
    with first() as pair:
        pair.same(*CALL), pair.same(*CALL)
        idle = pair.handle._paged.pool.idle_bytes
        for error in (ValueError, torch.OutOfMemoryError):
            order.clear()
            with pytest.raises(error):
                generated(pair.model, *CALL, prefix_allowed_tokens_fn=Raises(error))
        pair.same(*CALL)
        assert pair.handle._paged.pool.idle_bytes == idle


class Raises:
    """Of a kind of its own in each call."""

    def __init__(self, error):
        self.error = error

    def __call__(self, *args):
        raise self.error("of the caller's own")


def test_calls_that_fail_are_no_wrong_guesses():
    due = []

    class Fails:
        def put(self, tokens):
            if due:
                raise KeyError("the streamer's own")

        def end(self):
            """Nothing more."""

    with first() as pair:
        for fails in (False, False, False, True, True, False):
            due[:] = [True] * fails
            with pytest.raises(KeyError) if fails else nullcontext():
                generated(pair.model, *CALL, streamer=Fails())
        assert pair.handle._paged.early.count == 2


def test_logits_are_not_held_for_the_whole_call():
    held = []

    class Looks:
        def put(self, tokens):
            early = running_generation().early
            held.append(None if early is None else len(early.logits))

        def end(self):
            """Nothing more."""

    with first() as pair:
        for _ in range(3):
            generated(pair.model, *CALL, streamer=Looks())
    assert held[-4:] == [1, 0, 0, 0]


def test_another_thread_ends_the_patch_in_the_call():
    due = []

    class Ends:
        def put(self, tokens):
            """No token of interest."""

        def end(self):
            for run in due:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()

    with first() as pair:
        for _ in range(3):
            generated(pair.model, *CALL, streamer=Ends())
        assert pair.handle._paged.early.count == 1
        due.append(pair.handle.unpatch)
        got = generated(pair.model, *CALL, streamer=Ends())
        assert torch.equal(got, generated(pair.twin, *CALL))


def test_an_error_of_the_early_start_is_told_by_the_report(monkeypatch, ran):
    """After two of them the prompt starts late, and early again after release()."""
    with first() as pair:
        assert ran(pair, CALL, CALL, CALL)[-1] == EARLY
        tries = []

        def fails(*args):
            tries.append(len(args))
            raise RuntimeError("no stream")

        with monkeypatch.context() as patched:
            patched.setattr(generate, "started", fails)
            assert ran(pair, CALL, CALL, CALL) == [LATE] * 3 and len(tries) == 2
        assert "no longer start early, until release(): 1;" in str(pair.handle.report())
        assert "no stream" in str(pair.handle.report())
        pair.handle.release()
        assert ran(pair, *[CALL] * 3)[-1] == EARLY
        assert "no longer start early" not in str(pair.handle.report())


def test_one_of_several_processes_starts_late(monkeypatch, ran):
    """Its prompt may hold collectives, in which all take part."""
    monkeypatch.setattr(generate, "several_processes", lambda: True)
    with first() as pair:
        assert ran(pair, CALL, CALL, CALL)[1:] == [LATE] * 2


def test_threads(ran):
    """One starts early while another has the graphs, or does not."""
    with first() as pair:
        ran(pair, CALL, CALL, CALL)
        want, found = generated(pair.twin, *CALL), []
        in_threads(lambda: found.append(generated(pair.model, *CALL)))
        assert len(found) == 3 and all(torch.equal(each, want) for each in found)


def test_calls_whose_prompt_is_not_in_their_arguments():
    ids = tokens(2, 5)
    for args, kwargs in (
        ((), {}),
        ((ids,), {"inputs": ids}),
        ((ids.float(),), {}),
        ((ids[0],), {}),
        ((ids,), {"attention_mask": ids[:, 1:]}),
        ((ids,), {"inputs_embeds": ids.float()}),
        ((ids[:, :0],), {}),
        ((ids,), {"custom_generate": print}),
    ):
        assert early.asked_of(args, kwargs) is None
    assert early.asked_of((ids,), {}).kind == early.asked_of((), {"input_ids": ids}).kind


def test_kinds_of_calls():
    """They hold no object of the caller's, and follow a copy of the model or its pickle."""
    ids, given = tokens(2, 5), {"prefix_allowed_tokens_fn": lambda *_: [1], "eos_token_id": [1, 2]}

    def kind(**more):
        config = GenerationConfig(max_new_tokens=3, **more)
        return early.asked_of((ids, config), given).kind

    assert pickle.loads(pickle.dumps(kind())) == kind() != kind(top_k=5)
