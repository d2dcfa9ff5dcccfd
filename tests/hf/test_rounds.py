"""Drafts of generate(): greedy tokens are those of plain decoding, samples have its distribution,
and what is drafted costs time alone."""

import copy
import threading
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.errors import InvalidInput, NotCapturable, NotFast, PatchError
from attnops.hf import tiny
from attnops.hf.cache.names import cache_of, named
from attnops.hf.steps import decode
from attnops.hf.steps.calls import StepInputs
from attnops.hf.steps.round_graph import Round
from attnops.hf.steps.round_kinds import PROBE, PROBE_MOST, Kind, News
from attnops.hf.steps.rounds import Depth
from attnops.hf.steps.sampler_graph import Choice
from attnops.nn import Proposal
from tests.hf.decoding import ENDS, Streamer, auto
from tests.hf.drafting import Branches, Oracle, asked, assistant, patched, worth

FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "mistral",
    "granite",
    "olmo2",
    "deepseek_v3",
    "gpt_oss",
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_plain_decoding(kind):
    """Batches whose rows keep different numbers of drafts, left padding, rows that end."""
    model, draft = tiny.model(kind), Oracle()
    ours, handle = patched(model, draft)
    for rows, ends in ((1, None), (3, None), (4, ENDS), (1, ENDS)):
        given = {**asked(rows), "max_new_tokens": 17 + rows}
        if ends:
            given |= {"eos_token_id": ends, "pad_token_id": 0}
        draft.texts = want = model.generate(**given)
        assert torch.equal(ours.generate(**given), want)
        assert handle.took.decode == "breakable" and handle.took.loop == ""
        if not ends:
            assert worth(handle) > 1.7


@pytest.mark.parametrize("drafts", [Oracle, Branches, None])
def test_a_penalty_counts_the_drafts_before_a_token(drafts):
    """A penalty below 1 makes texts that repeat themselves, which are looked up."""
    model, draft = tiny.model("llama"), (drafts or Oracle)(9)
    ours, handle = patched(model, draft if drafts else "lookup")
    for rows, penalty in ((1, 1.5), (3, 2.5), (3, 0.7)):
        given = {**asked(rows), "max_new_tokens": 40, "repetition_penalty": penalty}
        given |= {"min_new_tokens": 9, "eos_token_id": 125, "pad_token_id": 0}
        draft.texts = want = model.generate(**given)
        assert torch.equal(ours.generate(**given), want)
        assert worth(handle) > (1.7 if drafts else 1.2 if penalty < 1 else 0.9)
        plain = model.generate(**{**given, "repetition_penalty": 1.0})
        assert not torch.equal(plain, want)


LOOKED_UP = [{"prompt_lookup_num_tokens": 4}, {}]


@pytest.mark.parametrize("more", LOOKED_UP, ids=["transformers' argument", "patch()"])
def test_tokens_that_are_looked_up(more):
    model = tiny.model("llama")
    ours, handle = patched(model, None if more else "lookup")
    for rows in (1, 2):
        given = {**asked(rows), "max_new_tokens": 40}
        given["input_ids"][:, 5:8] = given["input_ids"][:, 2:5]
        want = model.generate(**given)
        # What the text says twice is found: the second call repeats the text of the first.
        for prompt in (given["input_ids"], torch.cat([want, want[:, :12]], 1)):
            call = {**given, "input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            assert torch.equal(ours.generate(**call, **more), model.generate(**call))
            assert worth(handle) >= 1


@pytest.mark.parametrize("drafts", [Oracle, Branches])
def test_samples_have_the_distribution_of_plain_decoding(drafts):
    """The third token of many rows, whose drafts are right now and then, against exact
    probabilities; the test tells a temperature that is 5% off."""
    model, draft = tiny.model("llama"), drafts(3, wrong=0.3)
    ours, _ = patched(model, draft)
    ids, rows, temperature = torch.tensor([[5, 9, 11, 7]]), 64, 0.35

    def after(text, temperature):
        return torch.softmax(model(text).logits[:, -1].double() / temperature, -1)

    def exact(temperature):
        with torch.no_grad():
            first = after(ids, temperature)[0]
            texts = torch.cat([ids.expand(tiny.VOCAB, -1), torch.arange(tiny.VOCAB)[:, None]], 1)
            return first @ after(texts, temperature)

    draft.texts = model.generate(ids, max_new_tokens=6, do_sample=False).expand(rows, -1)
    torch.manual_seed(3)
    given = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "temperature": temperature}
    found = torch.cat([ours.generate(ids.expand(rows, -1), **given)[:, 5] for _ in range(80)])
    counts = torch.bincount(found, minlength=tiny.VOCAB).double()

    def surprise(temperature):
        want = exact(temperature) * counts.sum()
        often = want > 8
        pairs = (counts[often], want[often]), (counts[~often].sum(), want[~often].sum())
        return sum(((got - due) ** 2 / due).sum() for got, due in pairs), int(often.sum())

    (right, degrees), (off, _) = surprise(temperature), surprise(temperature * 1.05)
    bound = degrees + 4 * (2 * degrees) ** 0.5
    assert right < bound < off


def test_streamed_once_and_in_order():
    model, draft = tiny.model("llama"), Oracle()
    ours, _ = patched(model, draft)
    given, streamer = {**asked(1), "max_new_tokens": 20}, Streamer()
    draft.texts = want = model.generate(**given)
    ours.generate(**given, streamer=streamer)
    *tokens, end = streamer.got
    assert end is None and [each for put in tokens[1:] for each in put] == want[0, 9:].tolist()


def test_rotations_that_follow_from_the_length_of_the_text():
    """A draft behind the boundary would choose the frequencies of tokens before it, too."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    model = tiny.model(
        "llama",
        rope_parameters=rope,
        original_max_position_embeddings=16,
        max_position_embeddings=64,
    )
    draft = Oracle()
    ours, handle = patched(model, draft)
    given = {**asked(1), "max_new_tokens": 20}
    draft.texts = want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    assert "longest position" in handle.took.rounds


OLD = [
    ("lookup", 36, "has no room for drafts"),
    ("lookup", 64, "tokens of a row a round"),
    ("assistant", 64, "leaves tokens of the cache out"),
]


@pytest.mark.parametrize(("drafts", "room", "told"), OLD)
def test_a_cache_with_tokens_that_the_text_leaves_out(drafts, room, told):
    model = tiny.model("llama")
    ours = copy.deepcopy(model)
    speculate = "lookup" if drafts == "lookup" else assistant()[0]
    how = auto(compile_after=None)
    handle = attnops.patch(ours, cache="paged", decode=how, speculate=speculate)
    given = {**asked(1), "max_new_tokens": 12, "return_dict_in_generate": True}
    want = model.generate(**given)
    got = ours.generate(**given, **named(handle.new_cache(1, room)))
    turn = torch.tensor([[7, 8, 9]])
    more = {**given, "input_ids": turn, "attention_mask": torch.ones(1, 23, dtype=torch.int64)}
    again = model.generate(**more, **named(cache_of(want)))
    found = ours.generate(**more, **named(cache_of(got)))
    assert torch.equal(found.sequences, again.sequences)
    assert told in handle.took.rounds


@pytest.mark.parametrize("drafts", [Oracle, Branches])
def test_no_position_is_behind_the_text(monkeypatch, drafts):
    """A model with learned positions may have no more."""
    model, draft = tiny.model("llama"), drafts(7, wrong=0)
    ours, handle = patched(model, draft)
    own, positions = decode.Decoder.try_step, []

    def noted(decoder, asks, cache):
        positions.append(int(asks.position_ids.max()))
        return own(decoder, asks, cache)

    monkeypatch.setattr(decode.Decoder, "try_step", noted)
    given = {**asked(1), "max_new_tokens": 12}
    draft.texts = want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    assert worth(handle) > 2 and max(positions) == 9 + 12 - 2


@pytest.mark.parametrize("drafts", [Oracle, Branches])
def test_a_cache_that_the_caller_keeps(drafts):
    """It counts the tokens that were kept alone, and its padding. The next turn goes on with it."""
    model, draft = tiny.model("llama"), drafts()
    ours = copy.deepcopy(model)
    handle = attnops.patch(ours, cache="paged", decode=auto(compile_after=None), speculate=draft)
    given = {**asked(1), "max_new_tokens": 12, "return_dict_in_generate": True}
    given["attention_mask"][:, :2] = 0
    want = model.generate(**given)
    draft.texts = torch.cat([want.sequences, want.sequences], 1)
    got = ours.generate(**given, **named(handle.new_cache(1, 64)))
    assert torch.equal(got.sequences, want.sequences) and worth(handle) > 1.7
    assert int(cache_of(got).get_seq_length()) == want.past_key_values.get_seq_length()
    turn = torch.cat([want.sequences, torch.tensor([[7, 8, 9]])], 1)
    mask = torch.ones_like(turn)
    mask[:, :2] = 0
    more = {**given, "input_ids": turn, "attention_mask": mask}
    again = model.generate(**more, **named(cache_of(want)))
    found = ours.generate(**more, **named(cache_of(got)))
    assert torch.equal(found.sequences, again.sequences)


NONE = {
    "the caller keeps their cache": {"return_dict_in_generate": True},
    "the streamer hears one of each": {"streamer": Streamer()},
}


@pytest.mark.parametrize("why", NONE)
def test_calls_without_drafts_say_why(why):
    model = tiny.model("llama")
    ours, handle = patched(model, "lookup")
    given = {**asked(2), "max_new_tokens": 6, **NONE[why]}
    got, want = ours.generate(**given), model.generate(**given)
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    assert why in handle.took.rounds and handle.took.decode == "breakable"


TOLD = {
    "tokens of a row a round": {"max_matching_ngram_size": 64},
    "nothing was drafted: output_scores=True": {"output_scores": True},
    "attnops drafted nothing: num_beams=": {"num_beams": 2},
}


@pytest.mark.parametrize("told", TOLD)
def test_what_became_of_the_drafts_that_a_call_asks_for(told):
    model = tiny.model("llama")
    ours, handle = patched(model, None)
    given = {**asked(1), "max_new_tokens": 6, **TOLD[told]}
    got = ours.generate(**given, prompt_lookup_num_tokens=3)
    assert torch.equal(got, model.generate(**given)) and told in handle.took.rounds


@pytest.mark.parametrize("most", [0, 1])
def test_steps_without_graphs_that_verify(monkeypatch, most):
    """Rounds go on without drafts: in graphs, or without any. Either is told."""
    model, draft, own = tiny.model("llama"), Oracle(), decode.graphed_steps
    ours, handle = patched(model, draft)

    def fails(*args):
        if args[-1] > most:
            raise NotCapturable("a step that verifies", "for a test")
        return own(*args)

    monkeypatch.setattr(decode, "graphed_steps", fails)
    given = {**asked(1), "max_new_tokens": 6}
    draft.texts = want = model.generate(**given)
    with pytest.warns(NotFast):
        assert torch.equal(ours.generate(**given), want)
    assert handle.took.decode == ("breakable" if most else "hf")
    assert ("for a test" in handle.took.why) is not bool(most)
    assert "some without drafts: NotCapturable" in handle.took.rounds


def test_a_draft_runs_beside_the_steps_of_other_threads():
    """An assistant has its own lock: two models that draft for each other would wait for ever."""
    model = tiny.model("llama")
    free = []

    def proposal():
        turn = handle._paged.decoder().turn

        def other():
            if turn.acquire(blocking=False):
                free.append(True)
                turn.release()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return Proposal(torch.tensor([[5, 6]]))

    ours, handle = patched(model, Broken(proposal))
    given = {**asked(1), "max_new_tokens": 3}
    assert torch.equal(ours.generate(**given), model.generate(**given)) and free


ASKED = {
    "never right": (lambda: Oracle(wrong=1), False, 9, 12, 2 * PROBE - 1, 1),
    "right later": (lambda: Oracle(wrong=1), True, 30, 60, PROBE - 1, 2),
    "finds nothing": (
        lambda: Broken(lambda: Proposal(torch.full((1, 3), -1))),
        False,
        198,
        200,
        0,
        1,
    ),
}


@pytest.mark.parametrize("kind", ASKED)
def test_a_draft_is_asked_where_its_tokens_are_verified(kind):
    """Where they are not, after 32 rounds, and then after 64."""
    make, learns, least, most, longest, tokens = ASKED[kind]
    model, draft, missed = tiny.model("llama"), make(), []
    ours, handle = patched(model, draft)
    own = draft.propose

    def noted(state):
        missed.append(state.missed)
        if learns and state.missed == PROBE - 1:
            draft.wrong = 0
        return own(state)

    draft.propose = noted
    given = {**asked(1), "max_new_tokens": 200}
    draft.texts = want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    assert least <= len(missed) <= most and max(missed) == longest
    assert tokens <= worth(handle) < tokens + 1
    missed.clear()
    ours.generate(**{**given, "max_new_tokens": 4})
    assert missed[0] == 0  # a call before does not count


def test_a_model_without_graphs_says_that_nothing_was_drafted():
    model = tiny.model("llama")
    handle = attnops.patch(model, speculate="lookup")
    model.generate(**asked(1), max_new_tokens=3)
    assert handle.took.rounds.startswith("nothing was drafted")


class Broken:
    """Drafts nonsense of a kind."""

    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, state):
        return self.proposal() if state.tokens.shape[0] else None


def raises():
    raise KeyError("the draft's own")


BROKEN = {
    "error": (raises, KeyError, "own"),
    "shape": (lambda: Proposal(torch.zeros(3, 2, dtype=torch.int64)), InvalidInput, "tokens.shape"),
    "dtype": (lambda: Proposal(torch.zeros(1, 2)), InvalidInput, "tokens.dtype"),
    "parents": (
        lambda: Proposal(torch.zeros(1, 2).long(), torch.zeros(1, 3, dtype=torch.int32)),
        InvalidInput,
        "parents.shape",
    ),
    "probabilities": (
        lambda: Proposal(torch.zeros(1, 2).long(), None, torch.zeros(1, 2, tiny.VOCAB)),
        InvalidInput,
        "proposal.probabilities: got Tensor, want None",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_errors_of_a_draft_end_the_call(what):
    proposal, error, why = BROKEN[what]
    model = tiny.model("llama")
    draft = Broken(proposal)
    ours, _ = patched(model, draft)
    given = {**asked(1), "max_new_tokens": 8}
    with pytest.raises(error, match=why):
        ours.generate(**given)
    # Ids that are no words are not accepted, and are no address. Nor are parents that are none.
    words, parents = [tiny.VOCAB + 7, -5, 2**40], [2, -(2**31), 2**31 - 1]
    for tree in (None, torch.tensor([parents], dtype=torch.int32)):
        draft.proposal = partial(Proposal, torch.tensor([words]), tree)
        assert torch.equal(ours.generate(**given), model.generate(**given))


def test_options_that_cannot_draft():
    model = tiny.model("llama")
    with pytest.raises(InvalidInput, match="speculate: got 'look', want None, 'lookup'"):
        attnops.patch(model, speculate="look")
    with pytest.raises(InvalidInput, match=r"num_drafts: got 64, want 1 to 63"):
        attnops.patch(model, speculate=Oracle(64))
    with pytest.raises(InvalidInput, match="speculate"):
        attnops.patch(torch.nn.MultiheadAttention(8, 2), speculate="lookup")
    other = tiny.model("qwen3", vocab_size=96)
    attnops.patch(other, decode=auto())
    with pytest.raises(PatchError, match="it has 96 words and LlamaForCausalLM has 128"):
        attnops.patch(model, decode=auto(), speculate=other)


def test_a_step_that_verifies_ends_with_its_pages():
    """All tokens of a row must have room, and nothing is written where they do not."""
    model = tiny.model("llama")
    ours = copy.deepcopy(model)
    handle = attnops.patch(ours, cache="paged", decode=auto(compile_after=None))
    cache, ids = handle.new_cache(1, 12), torch.arange(5, 14)[None]
    with torch.no_grad():
        ours(ids, past_key_values=cache, logits_to_keep=1)
        decoder, drafts = handle._decoder("step"), ids[:, :3]
        for stored in (9, 10):
            lengths = torch.tensor([stored])
            inputs = StepInputs(drafts, lengths[:, None] + torch.arange(3), lengths)
            room = pytest.raises(RuntimeError, match="a cache that is full")
            with room if stored == 10 else nullcontext():
                logits = decoder.try_step(inputs, cache).logits
        want = model(torch.cat([ids, drafts], 1)).logits[:, -3:]
    torch.testing.assert_close(logits, want)


def test_a_choice_is_four_launches():
    """Each would be a kernel that runs for less time than it takes to start."""
    ran = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not (func.is_view or func is torch.ops.aten._unsafe_view.default):
                ran.append(func.name().removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    choice = Choice(torch.device("cpu"), 2, 32, 16, ends=2, sampled=False, processors=())
    made = Round(choice, [], None)
    with Launches():
        made._choose(Kind(8, ""))
    tail = [f"attnops::{op}" for op in ("advance_rows", "lookup_drafts", "next_inputs")]
    assert ran == ["aten::argmax", *tail]


def test_the_depth_of_a_round_follows_what_drafts_were_worth():
    depth = Depth((1, 5, 8), rows=1, cost=0.3)
    right, wrong = News([8], [], 7, False), News([1], [], 7, False)
    assert depth.next(7) == 8 and depth.next(0) == 1
    for _ in range(60):
        depth.note(8, wrong)
    waits = [PROBE, 2 * PROBE, PROBE_MOST, PROBE_MOST]
    found = [depth.next(7) for _ in range(sum(waits))]
    tries = [number for number, queries in enumerate(found, 1) if queries > 1]
    assert tries == [*accumulate(waits)] and {*found} == {1, 8}
    depth.note(8, right)  # what was known is old
    assert depth.next(7) == 5
    for _ in range(9):
        depth.note(8, wrong)
    assert [depth.next(7) for _ in range(PROBE)] == [1] * (PROBE - 1) + [8]
    assert Depth((1, 5, 8), rows=1, cost=3.0).next(7) == 1  # drafts take as long as three tokens
