"""Layers are recorded, and their kernels begin to be compiled, before a call waits for them, and a
capture does once what equal layers share."""

from collections import Counter

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import attnops
from attnops.graphs import kinds
from attnops.graphs.any_size import AnySize
from attnops.graphs.compile_pieces import Program
from attnops.graphs.forms import Form
from attnops.hf import tiny
from attnops.hf.steps import graphed_steps
from attnops.hf.steps.decode import Decoder
from tests.hf.blocks import draft_of
from tests.hf.decoding import asked, first, generated
from tests.hf.drafting import asked as drafted, head_of, patched
from tests.hf.layers_ahead import layer_of
from tests.ops.test_ahead import tell_ahead

OPS = ("decode_attention", "paged_attention", "rotate_and_write_kv", "write_kv", "attention")
STEP = ["LlamaRotaryEmbedding", "LlamaDecoderLayer", "LlamaRMSNorm", "Linear"]


@pytest.fixture
def events(monkeypatch):
    """In order: the classes of modules that are recorded, "prompt" and "step", and the ops whose
    kernels begin to be built."""
    found = []

    def before(owner, name, event):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            found.append(event(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    before(kinds, "record", lambda module, *_: type(module).__name__)
    before(Decoder, "try_prompt", lambda *_: "prompt")
    before(Decoder, "try_step", lambda *_: "step")
    tell_ahead(monkeypatch, OPS, lambda call: found.append(call.spec.op))
    yield found
    monkeypatch.undo()
    attnops.core.kernel.renew()


def recorded(events):
    return [event for event in events if event not in OPS]


def test_layers_of_the_first_step_are_recorded_before_the_prompt(events):
    """Those of the prompt's size while the device runs it. Nothing is recorded twice."""
    with first() as pair:
        pair.same(2, 9, 3)
        assert recorded(events) == [*STEP, "prompt", "LlamaDecoderLayer", "step", "step"]
        events.clear()
        assert pair.same(2, 9, 3).prompt == "captured"
        assert recorded(events) == ["prompt", "step", "step"]


def test_layers_of_further_sizes_are_recorded_with_their_graphs(events):
    """Of many lengths, most come once. Kernels are those of the first size."""
    with first() as pair:
        pair.same(2, 9, 1)
        events.clear()
        assert pair.same(2, 60, 1).prompt == "" and recorded(events) == ["prompt"]
        events.clear()
        assert pair.same(2, 60, 1).prompt == "captured"
        assert recorded(events) == ["prompt", "LlamaDecoderLayer"]


@pytest.mark.parametrize(
    "held", [str, lambda name: {"kwargs": {"name": name}}], ids=["word", "dict"]
)
def test_layers_whose_parts_hold_their_names_are_alike(events, held):
    """As those of peft do."""
    model = tiny.model("llama")
    for layer in ("layers.0", "layers.1"):
        for path, part in model.model.get_submodule(layer).named_children():
            part.held = held(f"model.{layer}.{path}")
    with first(model) as pair:
        pair.same(2, 9, 3)
    assert recorded(events)[: len(STEP)] == STEP


def test_kernels_begin_in_the_order_of_their_launches(events):
    """All that the step launches, and the layer's own code beside it, before the prompt."""
    with first() as pair:
        generated(pair.model, 2, 9, 3)
    ahead = [event for event in events[: events.index("prompt")] if event in OPS]
    assert ahead == ["write_kv", "paged_attention", "rotate_and_write_kv", "paged_attention"]
    steps = events[events.index("step") :]
    assert not set(OPS).intersection(steps)


HEADS = {
    # After steps of one, four and six tokens, after rounds without drafts, and twice of a draft,
    # because its first state has another place.
    "Eagle3Head": (head_of, 6),
    # After steps of one, four and six tokens, and after rounds without drafts.
    "DFlashHead": (draft_of, 4),
    "MTPLayer": (layer_of, 6),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_recorded_before_the_prompt(head, events):
    """And so are the steps that verify its drafts. Nothing is recorded twice."""
    model, (made, count) = tiny.model("llama", num_hidden_layers=4), HEADS[head]
    ours, handle = patched(model, made(model))
    given = {**drafted(2), "max_new_tokens": 12}
    assert torch.equal(ours.generate(**given), model.generate(**given))
    at = events.index("prompt")
    assert recorded(events[:at]) == [*STEP, *[head] * count, *STEP, *STEP]
    of_the_prompt = ["LlamaDecoderLayer"]
    again = [event for event in recorded(events[at:]) if event not in ("prompt", "step")]
    assert again == of_the_prompt and handle.took.decode == "breakable"
    assert not set(OPS).intersection(events[events.index("step") :])


def test_a_head_that_may_not_draft_is_recorded_once(events):
    """A caller who keeps the cache of two rows gets no drafts in any call."""
    model = tiny.model("llama", num_hidden_layers=4)
    ours, handle = patched(model, head_of(model))
    given = {**drafted(2), "max_new_tokens": 3, "return_dict_in_generate": True}
    for again in (False, True):
        events.clear()
        ours.generate(**given)
        assert "the caller keeps their cache" in handle.took.rounds
        assert ("Eagle3Head" in events) is not again


def test_a_call_of_one_token_records_no_step(events):
    with first() as pair:
        pair.same(2, 9, 1)
        assert recorded(events) == ["prompt", "LlamaDecoderLayer"]


@pytest.mark.parametrize("how", [{"deterministic": True}, {}], ids=["policy", "piecewise"])
def test_steps_of_other_layers_record_nothing(events, how):
    with first(compile_after=99 if how else 0) as pair, attnops.use(**how):
        pair.same(2, 9, 3)
        assert not set(STEP).intersection(events[: events.index("prompt")])


def test_an_error_of_a_recording_is_left_to_the_step(monkeypatch):
    def fails(*_):
        raise RuntimeError("a test's")

    monkeypatch.setattr(kinds, "record", fails)
    with first() as pair:
        pair.same(2, 9, 3)
        assert "a test's" in pair.handle.graphs.report().not_recorded


@pytest.fixture
def counted(monkeypatch):
    """How often programs run, and layers are looked at, recorded, compared, and called."""
    found = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            found[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (Program, "run"),
        (Form, "of_module"),
        (kinds, "record"),
        (kinds, "differs"),
        (kinds.Kinds, "__call__"),
        (kinds.Kinds, "runs_again"),
        (AnySize, "_chooses"),
    ):
        count(owner, name)
    return found


def test_a_capture_does_once_what_equal_layers_share(counted):
    """A whole forward is captured, and at the first size over some pages one of the layers' own
    code is watched. No layer is described a second time."""
    once = {"differs": 1, "run": 1 + 6}
    with first(tiny.model("llama", num_hidden_layers=6)) as pair:
        for length, counts in (
            (90, {"__call__": 3 * 6}),
            (60, {"__call__": 2 * 6, "record": 1}),
            (20, {"__call__": 2 * 6}),
        ):
            assert pair.same(2, length, 1).prompt == ""
            counted.clear()
            assert pair.same(2, length, 1).prompt == "captured", pair.decoder.prompts.why
            assert counted == {**once, **counts}


def test_pages_like_others_are_captured_without_a_run(counted):
    """Which would launch what is loaded, and compare what was compared. Layers that were dropped
    since are recorded anew. Pages of another size and another policy have other kernels."""
    kept, logits, other = [], {}, {"paged_attention": "reference"}
    with first(tiny.model("llama", num_hidden_layers=6)) as pair, torch.no_grad():
        ids, _ = asked(1, 9, 1)
        steps = (None, 20, {}), (None, 90, {}), (None, 20, other), (False, 20, other)
        again = (True, 20, {}), (None, 20, {}), (False, 20, {})
        for dropped, room, policy in (*steps, *again):
            cache = pair.handle.new_cache(1, room)
            pair.model(ids, past_key_values=cache, logits_to_keep=1)
            if dropped:
                pair.decoder._recorded.kinds.clear()
            counted.clear()
            with attnops.use(policy):
                found = pair.handle.step(ids[:, :1], cache)
            assert torch.equal(found, logits.setdefault(len(policy), found))
            assert not pair.handle.graphs.report().not_recorded
            assert counted["runs_again"] == bool(dropped)
            if dropped is not None:
                layers = counted["__call__"] - 1  # without the call of a function
                assert (counted["run"] == layers) is not dropped
                assert (counted["differs"] == 0) is not dropped
            kept.append(cache)


def test_prompts_over_pages_like_others_are_captured_without_a_run(counted):
    kept = []
    with first(tiny.model("llama", num_hidden_layers=6)) as pair, torch.no_grad():
        ids, _ = asked(1, 9, 1)
        for alike, dropped in ((False, False), (True, False), (False, True)):
            cache = pair.handle.new_cache(1, 20)
            pair.model(ids, past_key_values=cache, logits_to_keep=1)
            cache.reset()
            if dropped:
                pair.decoder._recorded.kinds.clear()
            counted.clear()
            pair.model(ids, past_key_values=cache, logits_to_keep=1)
            assert pair.decoder.prompts.took == "captured", pair.decoder.prompts.why
            assert counted["runs_again"] == dropped and (counted["differs"] == 0) is alike
            kept.append(cache)


def test_no_call_captures_its_prompt_and_its_steps():
    steps = (4, 9, 3, ""), (2, 9, 3, ""), (2, 9, 3, "captured")
    with first() as pair:
        for *call, prompt in (*steps, (1, 90, 1, ""), (1, 90, 1, "captured")):
            assert pair.same(*call).prompt == prompt, call


def test_a_prompt_without_a_graph_records_the_second_size(counted):
    """Not the one that records the first."""
    found = []
    with first() as pair:
        for length in (9, 40, 90, 150):
            counted.clear()
            pair.same(2, length, 1)
            found.append(counted["record"])
    assert found == [1, 0, 1, 0]


def test_own_code_is_watched_once_over_any_pages(monkeypatch):
    """Of each bucket. A capture is watched, too."""
    kept, runs, watched = [], [], graphed_steps.watched
    monkeypatch.setattr(
        graphed_steps, "watched", lambda model: (runs.append(rows), watched(model))[1]
    )
    with first() as pair, torch.no_grad():
        for rows in (2, 1, 2):
            ids, _ = asked(rows, 9, 1)
            cache = pair.handle.new_cache(rows, 20)
            pair.model(ids, past_key_values=cache, logits_to_keep=1)
            pair.handle.step(ids[:, :1], cache)
            assert pair.handle.graphs.captured
            kept.append(cache)
    assert runs == [2, 2, 1, 1, 2]


class Chunked(LlamaRotaryEmbedding):
    """Its results share memory."""

    def forward(self, x, position_ids):
        return torch.cat(super().forward(x, position_ids), -1).chunk(2, -1)


class Sliced(LlamaDecoderLayer):
    """Its result has gaps."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return torch.cat((out, out), -1)[..., : out.shape[-1]]


@pytest.mark.parametrize("kind", [Chunked, Sliced])
def test_results_that_are_views(kind):
    """A run of one layer of a kind gives the others results of the same layout."""
    model = tiny.model("llama", num_hidden_layers=3)
    for module in model.modules():
        if type(module) is kind.__base__:
            module.__class__ = kind
    with first(model) as pair:
        took = [pair.same(2, 9, 3).prompt for _ in range(2)]
        assert took == ["", "captured"], pair.decoder.prompts.why
        assert pair.handle.graphs.report().not_recorded == ""


def test_a_step_is_recorded_ahead_after_calls_of_one_token(events):
    with first() as pair:
        pair.same(2, 62, 1)
        events.clear()
        pair.same(2, 62, 3)
        assert recorded(events)[: len(STEP) + 1] == [*STEP, "prompt"]
