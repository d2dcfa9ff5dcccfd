"""Streams in turn on one patched model: each use of pages and graphs waits for those before it."""

import itertools
from contextlib import contextmanager

import pytest
import torch

import attnops
from attnops.graphs import streams
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.cache.to_dynamic_cache import unpaged
from attnops.hf.steps import prompt
from attnops.hf.steps.early import Early
from tests.graphs.races import Races
from tests.hf.decoding import auto, graphed, prompts_in_graphs
from tests.hf.drafting import head_of
from tests.hf.test_loop import asked, generated


@pytest.fixture
def races(monkeypatch):
    found = Races()
    monkeypatch.setitem(streams.STREAMS, "cpu", found)
    return found


@pytest.fixture
def turn(races):
    """Each call is the next stream's turn. Not stream 0's, on which the test makes its tensors."""
    numbers = itertools.cycle((1, 2))

    def on():
        return races.on(next(numbers))

    return on


@pytest.fixture
def model():
    return tiny.model("llama")


@contextmanager
def no_race(races):
    with races:
        yield
    assert not races.found, "\n".join(races.found)


def calls_of_generate(model, handle, turn):
    for rows, more in (
        (2, {}),
        (2, {}),
        (1, {}),
        (2, {"do_sample": True}),
        (2, {"eos_token_id": [5]}),
        (2, {}),
    ):
        with turn():
            yield generated(model, rows, max_new_tokens=3, **more)


def turns_of_a_conversation(model, handle, turn):
    cache, (text, mask) = handle.new_cache(2, 60), asked(2)
    for _ in range(3):
        with turn():
            given = {**named(cache), "max_new_tokens": 4, "do_sample": False}
            text = model.generate(text, attention_mask=mask, **given)
        text = torch.tensor(text.tolist())  # the caller's own tensors are for the caller to order
        mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.int64)], 1)
        yield text


def steps_by_hand(model, handle, turn):
    """With crops in between; the prompt is a call of the model. The last steps have no graphs."""
    cache, (ids, _) = handle.new_cache(2, 60), asked(2)
    with turn():
        model(ids, **named(cache))
    for at in range(4):
        with turn():
            yield handle.step(ids[:, at : at + 1], cache)
        with turn():
            cache.crop(-1)
        with turn():
            yield handle.step(ids[:, at : at + 1], cache, torch.full((2, 1), 9 + at))
    with turn():
        cache.reset()
    with turn():
        model(ids, **named(cache))
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    for _ in range(2):
        with turn():
            yield handle.step(ids[:, :1], cache)
    hook.remove()


def calls_of_the_model(model, handle, turn):
    cache, (ids, _) = handle.new_cache(2, 60), asked(2)
    for at in range(4):
        with turn():
            yield model(ids[:, 2 * at : 2 * at + 2], **named(cache)).logits
    with turn():
        yield cache.get_seq_length() + 0
    with turn():
        yield cache.layers[0].get_mask_sizes(1)[1] + 0
    with turn():
        model(ids[:, :2], **named(cache))
    with turn():
        yield from (layer.keys for layer in unpaged(cache, model.config).layers)
    with turn():
        model(ids[:, :2], **named(cache))
    start = torch.zeros(2, dtype=torch.int64)
    with turn():
        cache.step_of(cache.first_layer, start, 1, 4)


def steps_of_two_caches(model, handle, turn):
    """Their graphs share the memory of one pool, and no choice of a token is between them."""
    caches, (ids, _) = [handle.new_cache(2, 60) for _ in range(2)], asked(2)
    for cache in caches:
        with turn():
            model(ids, **named(cache))
    for cache in 2 * caches:
        with turn():
            yield handle.step(ids[:, :1], cache)


USES = (
    calls_of_generate,
    turns_of_a_conversation,
    steps_by_hand,
    calls_of_the_model,
    steps_of_two_caches,
)


def found(use, model, handle, turn):
    return [x.clone() for x in use(model, handle, turn)]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("mode", ["breakable", "hf"])
def test_streams_in_turn(mode, use, model, races, turn):
    if mode == "hf" and use in (steps_by_hand, steps_of_two_caches):
        pytest.skip("decode='hf' has no steps")
    with torch.no_grad(), graphed(model, mode) as handle, no_race(races):
        found(use, model, handle, turn)


def test_compiled_and_captured_prompts(model, races, turn, monkeypatch):
    prompts_in_graphs(monkeypatch, 32, 64, after=1)
    with graphed(model, "piecewise", compile_after=0) as handle:
        for _ in range(4):
            want = generated(model, max_new_tokens=3)
        assert handle.took.prompt == "captured"
        with no_race(races):
            for _ in range(3):
                with turn():
                    assert torch.equal(generated(model, max_new_tokens=3), want)
                    assert handle.took.prompt == "captured" and handle.took.loop == ""
        assert handle._paged.early.count >= 3


def test_the_memory_of_early_prompts_waits_for_their_readers(model, races, turn, monkeypatch):
    prompts_in_graphs(monkeypatch, 32, 64)
    made = []

    def early(*given):
        tokens, [logits] = given[-2:]
        made.append((tokens, logits))
        return Early(*given)

    monkeypatch.setattr(prompt, "Early", early)
    with graphed(model, "auto", compile_after=99) as handle, races:
        for _ in range(4):
            with turn():
                generated(model, max_new_tokens=3)
        assert handle._paged.early.count == len(made) == 2
    for stream, (tokens, logits) in zip((1, 2), made, strict=True):
        read = {("beside", tokens.data_ptr()), (stream, logits.data_ptr())}
        assert read <= set(races.used)


def test_two_tails_of_one_pool(model, races, turn):
    """Graphs of other pages and of other options share the memory of their device's pool."""
    with graphed(model) as handle, no_race(races):
        caches = [handle.new_cache(2, 40) for _ in range(2)]
        for top_k, number in ((5, 0), (5, 1), (6, 0), (5, 1), (6, 0)):
            with turn():
                cache = caches[number]
                generated(model, do_sample=True, top_k=top_k, **named(cache), max_new_tokens=3)
                cache.reset()


def test_the_memory_of_pages_waits_for_each_stream(model, races, turn):
    with torch.no_grad(), graphed(model) as handle:
        cache, (ids, _) = handle.new_cache(2, 40), asked(2)
        for _ in range(4):
            with turn():
                model(ids, **named(cache))
        pages = cache.state.pages
        tensors = [
            *(x for alike in pages.allocations for x in alike.whole),
            *pages.tables,
            pages.pad,
            pages.seen,
        ]
        wanted = [(stream, x.untyped_storage().data_ptr()) for stream in (0, 1, 2) for x in tensors]
        assert len(races.used) == len(set(races.used)) and set(wanted) <= set(races.used)


def test_the_detector_finds_what_nobody_orders(model, races, turn, monkeypatch):
    monkeypatch.setattr(streams.LastStream, "use", lambda self: None)
    with torch.no_grad(), graphed(model) as handle, races:
        found(steps_by_hand, model, handle, turn)
    assert any("[2]" in each for each in races.found), "the padding of the rows"


def test_a_stream_that_is_captured_waits_for_nothing(races, monkeypatch):
    waits = []
    monkeypatch.setattr(races, "wait", lambda *given: waits.append(given))
    last = streams.LastStream(torch.device("cpu"))
    for stream, captured in ((1, False), (2, True), (1, False), (3, False), (3, False)):
        monkeypatch.setattr(races, "capturing", lambda device, captured=captured: captured)
        with races.on(stream):
            last.use()
    assert waits == [(3, 1)]


def test_what_it_owns_later_is_used_too(races):
    first, second = torch.zeros(2), torch.zeros(3)
    last = streams.LastStream(torch.device("cpu"), (first,))
    with races, races.on(1):
        last.use()
        last.own(second)
        last.use()
    used = [(1, x.untyped_storage().data_ptr()) for x in (first, second)]
    assert set(used) <= set(races.used)


def test_rounds_of_a_head(races, turn):
    """Whose buffers a choice in a graph writes."""
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    with attnops.patch(model, decode=auto(compile_after=None), speculate=head) as handle:
        with no_race(races):
            for _ in range(3):
                with turn():
                    generated(model, max_new_tokens=6)
        [made] = handle._paged.loop._idle
        buffers = (x for x in vars(made._head).values() if isinstance(x, torch.Tensor))
        written = {x.untyped_storage().data_ptr() for x in buffers if x is not made._head._first}
        assert {(stream, at) for stream in (1, 2) for at in written} <= set(races.used)
