"""What follows the model in a captured loop: the draw, numbers of a request, and threads."""

import copy
import random
import threading
import types

import numpy
import pytest
import torch
import transformers
from transformers.generation import logits_process

from attnops.hf.cache.names import named
from attnops.hf.steps import numbers, sampler_graph as tail
from attnops.hf.steps.captures import MOST, TRIES, Failures
from tests.hf.decoding import Failing, Streamer, in_threads
from tests.hf.test_loop import drawn, fresh, generated, loop_of, model

assert fresh and model, "fixtures"

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1, 7), (3, 128), (2, 50000)])
def test_the_draw_is_that_of_multinomial(shape):
    """Its tokens, and the state in which it leaves the generator."""
    for seed in range(20):
        scores = torch.randn(shape).mul(4).masked_fill(torch.rand(shape) < 0.3, -torch.inf)
        probabilities = torch.softmax(scores, -1)
        noise = torch.ones(shape)
        torch.manual_seed(seed)
        want, after = torch.multinomial(probabilities, 1).squeeze(1), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(tail.drawn(probabilities, noise.exponential_()), want)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution(value, model, fresh):
    """The error of torch.multinomial, from a graph as from transformers' loop."""

    def error(model):
        model.lm_head.weight.data[3] = value
        with pytest.raises(RuntimeError, match="contains either `inf`, `nan`") as raised:
            generated(model, do_sample=True)
        return str(raised.value)

    ours, handle = fresh
    generated(ours, do_sample=True)
    assert error(ours) == error(copy.deepcopy(model)) and handle.took.loop == ""


def random_numbers(seed):
    draw = random.Random(seed).uniform
    return {
        "temperature": draw(0.05, 3),
        "top_p": draw(0, 1),
        "min_p": draw(0, 1),
        "penalty": draw(0.3, 3),
    }


EDGES = (
    {"temperature": 1e-300, "top_p": 0, "min_p": 0, "penalty": 1e300},
    {"temperature": 1e300, "top_p": 1.0, "min_p": 1, "penalty": 1e-45},
)


def processors(given, kinds=tuple(numbers.FIELDS)):
    return [kind(given[numbers.FIELDS[kind]]) for kind in kinds]


@pytest.mark.parametrize(
    "kinds",
    [*((kind,) for kind in numbers.FIELDS), tuple(numbers.FIELDS)],
    ids=lambda kinds: kinds[0].__name__,
)
def test_the_numbers_of_a_request_give_transformers_own_bits(kinds):
    ours = [tail._copied(each, CPU) for each in processors(random_numbers(0), kinds)]
    values = [value for each in ours for value in vars(each).values()]
    assert sum(isinstance(value, numbers.Number) for value in values) == len(kinds)
    torch.manual_seed(5)
    tokens = torch.randint(0, 700, (3, 40))
    for given in (*map(random_numbers, range(60)), *EDGES):
        scores = torch.randn(3, 700) * 6
        want, got = scores, scores
        for theirs, own in zip(processors(given, kinds), ours, strict=True):
            tail.follow(own, theirs)
            want, got = theirs(tokens, want), own(tokens, got)
        assert torch.equal(want.view(torch.int32), got.view(torch.int32)), given


def test_the_reciprocal_of_a_number_is_what_torch_makes_of_one():
    """A GPU multiplies by it, rounded otherwise than on a CPU: tests/gpu/test_streams.py compares
    the bits there."""
    number = numbers.Number(CPU)
    for n in (0.7, 1 / 3, 1.1, 3.3e-7, 6e29):
        number.set(n)
        assert (
            number._reciprocal.item()
            == (torch.ones(()) / n).item()
            == numpy.float32(1) / numpy.float32(n)
        )


@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.full)])
def test_requests_with_numbers_of_their_own_share_a_graph(model, fresh, count):
    calls = [random_numbers(seed) for seed in range(count)]
    for call in calls:
        call["repetition_penalty"] = call.pop("penalty")
    more = {"rows": 1, "do_sample": True, "max_new_tokens": 2, "top_k": 50}
    ours, handle = fresh
    graphs = handle.decode.graphs.graphs
    drawn(ours, **calls[-1], **more)
    captured = len(graphs)
    for call in calls:
        assert drawn(ours, **call, **more) == drawn(model, **call, **more)
        assert handle.took.loop == ""
    assert len(graphs) == captured
    drawn(ours, **{**calls[0], **more, "top_k": 49})
    assert len(graphs) == captured + 1, "a size is a constant"


def compares(self, input_ids, scores):
    return scores * 2 if self.top_p > 0.5 else scores  # a number of a tensor cannot be compared


def of_transformers(function):
    return types.FunctionType(function.__code__, vars(logits_process))


@pytest.mark.parametrize(
    "code",
    [compares, of_transformers(compares)],
    ids=["somebody's", "another transformers'"],
)
def test_code_that_is_not_known_keeps_its_numbers(code, model, fresh, monkeypatch):
    monkeypatch.setattr(transformers.TopPLogitsWarper, "__call__", code)
    ours, handle = fresh
    for top_p in (0.3, 0.8):
        call = {"do_sample": True, "max_new_tokens": 2, "top_p": top_p}
        assert drawn(ours, **call) == drawn(model, **call)
    assert len(loop_of(handle)._idle) == 2 and handle.took.loop == ""


def test_code_that_counts_tokens_and_is_somebodys(model, fresh, monkeypatch):
    kind = transformers.MinNewTokensLengthLogitsProcessor
    monkeypatch.setattr(kind, "__call__", lambda self, ids, scores: scores * self.min_new_tokens)
    call, (ours, handle) = {"do_sample": True, "min_new_tokens": 3, "eos_token_id": [5]}, fresh
    assert drawn(ours, **call) == drawn(model, **call) and "is code of its own" in handle.took.loop


def test_threads_of_equal_options_capture_one_tail_each(model, fresh, monkeypatch):
    """All of them choose at once, in five rounds."""
    count, rounds, (ours, handle) = 4, 5, fresh
    meet, captured, found, real = threading.Barrier(count), [], [], tail.Tail.capture

    def capture(self, graphs):
        captured.append(self)
        real(self, graphs)

    monkeypatch.setattr(tail.Tail, "capture", capture)

    class Meets(Streamer):
        def put(self, tokens):
            super().put(tokens)
            if len(self.got) == 2:  # the first is the prompt, before the loop
                meet.wait(60)

    def run():
        for _ in range(rounds):
            found.append(generated(ours, max_new_tokens=3, streamer=Meets()).tolist())

    in_threads(run, count)
    assert found == [generated(model, max_new_tokens=3).tolist()] * (count * rounds)
    assert len(captured) == count and len(loop_of(handle)._idle) == count


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_tail_that_is_full_is_captured_again(fresh, monkeypatch):
    """A capture that failed in passing is tried again on the buffers of a text that has filled
    them."""
    captured = tail.Tail.capture
    short = Failing(lambda: torch.OutOfMemoryError("CUDA out of memory"), 1)
    devices, (ours, handle) = [], fresh

    def capture(self, graphs):
        devices.append(graphs if devices else short)
        captured(self, devices[-1])

    monkeypatch.setattr(tail.Tail, "capture", capture)
    cache = handle.new_cache(1, 15)
    for call in range(3):
        cache.reset()
        given = {**named(cache), "max_new_tokens": 10, "do_sample": True, "eos_token_id": None}
        out = ours.generate(torch.arange(3, 9)[None], pad_token_id=0, **given)
        assert out.shape == (1, 16)
        assert ("tries again" in handle.took.loop) == (call == 0)
    assert len(devices) == 2


def test_failures_in_turn_with_successes_are_none_in_a_row():
    failures, short = Failures(), torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2 * TRIES):
        assert failures.note("a", short) and "tries again" in failures.why("a")
        failures.done("b")
        failures.done("a")
        assert not failures.passing
    assert [failures.note("a", short) for _ in range(TRIES + 1)] == [True] * TRIES + [False]
    assert failures.why("a") == failures.lasting["a"]
    for key in range(2 * MOST):
        failures.note(key, short)
        failures.note(f"of the model {key}", ValueError())
    assert len(failures.passing) == len(failures.lasting) == MOST


def test_numbers_are_tried_in_the_dtype_of_scores(monkeypatch):
    numbers._holds.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        for kind, field in numbers.FIELDS.items():
            assert numbers.field_of(kind(0.5), CPU) == field
    finally:
        torch.set_default_dtype(torch.float32)
        numbers._holds.cache_clear()
