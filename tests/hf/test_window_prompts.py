"""Prompts over pages of sliding windows in graphs: later chunks and turns, beside copies of what
they overwrite."""

import pytest
import torch
from transformers import DynamicCache

from attnops.core.errors import InvalidInput
from attnops.graphs import Graphed
from attnops.graphs.per_layer import NotRegional
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import prompt
from attnops.hf.steps.captures import Over
from attnops.hf.steps.chunk_step import ChunkStep
from tests.hf.decoding import beside, first, turns
from tests.hf.helpers import left_padded, near, positions, relative, tokens

pytestmark = pytest.mark.usefixtures("small_pages")

FAMILIES = ("mistral", "gemma2", "gemma3", "cohere2")
"""With windows of 8 tokens in some layers or in all, whose pages hold 44."""


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Sets the sizes of chunks in graphs, those of any chunk, and after how many one is captured
    with compiled layers."""

    def given(captured, chunk=prompt.CHUNK, after=0):
        monkeypatch.setattr(prompt, "CAPTURED", captured)
        monkeypatch.setattr(prompt, "CHUNK", chunk)
        monkeypatch.setattr(prompt, "CAPTURE_AFTER", after)

    given((32, 128, 256))
    return given


def called(pair, cache, ids, mask, begin, end):
    """How the tokens from `begin` to `end` ran. The last logits of rows that have a token by then
    are those that the twin has."""
    mask, given = mask[:, :end], {"logits_to_keep": 1}
    where = positions(mask)
    want = pair.twin(ids[:, :end], attention_mask=mask, position_ids=where, **given).logits
    given |= {"attention_mask": mask, "position_ids": where[:, begin:], **named(cache)}
    got, real = pair.model(ids[:, begin:end], **given).logits, mask[:, -1].bool()
    near(got[real], want[real])
    return "" if pair.decoder.prompts.why else pair.decoder.prompts.took


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pad", [0, 5])
def test_turns_of_a_conversation_are_captured(name, pad):
    """Shorter than a window, and longer than its pages."""
    ids, lengths = tokens(2, 260), [14, 60, 9, 0, 33, 5, 90, 40]
    with first(name) as pair:
        want = [*turns(pair.twin, DynamicCache(config=pair.twin.config), ids, lengths, pad)]
        for last in (False, True):
            cache, ran = pair.handle.new_cache(2, 290), []
            pages = cache.state.pages
            assert pages.tables[pages.windows.index(8)].shape[1] * pages.page_size == 44
            for got, right in zip(turns(pair.model, cache, ids, lengths, pad), want, strict=True):
                assert torch.equal(got, right)
                ran.append(pair.took.prompt)
            assert not last or ran == ["captured"] * len(lengths), pair.handle.report()
            del cache  # the next one is of its pages


STEPS = ((0, 40), (40, 95), (95, 96), (96, 150), (150, 157), (157, 158), (158, 200))


@torch.no_grad()
@pytest.mark.sweep(5)
@pytest.mark.parametrize(("name", "window"), [*((name, 8) for name in FAMILIES), ("gemma3", 64)])
@pytest.mark.parametrize("chunk", [prompt.CHUNK, 48])
def test_logits(name, window, chunk, bounds):
    """With left padding that ends in the middle of the second turn, and a window that is longer
    than a chunk."""
    bounds((32, 128, 256), chunk=chunk)
    ids, mask = tokens(3, 200), left_padded(3, 200, (3, 51, 0))
    with first(tiny.model(name, sliding_window=window)) as pair:
        cache = pair.handle.new_cache(3, 220)
        for _ in range(2):
            cache.reset()
            ran = [called(pair, cache, ids, mask, *step) for step in STEPS]
        assert ran[1:2] + ran[3:5] + ran[6:] == ["captured"] * 4, pair.handle.report()


@torch.no_grad()
def test_logits_of_sinks_and_experts():
    """In bfloat16, as experts have no recording in float32. The model's own layers run the first
    conversation."""
    ids, mask = tokens(2, 160), left_padded(2, 160)
    with first(tiny.model("gpt_oss").to(torch.bfloat16)) as pair:
        cache, found = pair.handle.new_cache(2, 220), []
        for _ in range(2):
            cache.reset()
            for begin, end in ((0, 40), (40, 95), (95, 160)):
                given = {"attention_mask": mask[:, :end], "logits_to_keep": 1, **named(cache)}
                where = positions(mask)[:, begin:end]
                out = pair.model(ids[:, begin:end], position_ids=where, **given).logits
            found.append(out)
        assert not pair.decoder.prompts.why and relative(*found) < 0.02


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_long_prompt_is_captured_in_chunks(name, bounds):
    bounds((32, 64), chunk=64)
    with first(name) as pair:
        ran = [pair.same(2, 150, 3).prompt for _ in range(3)]
        assert ran == ["", "captured", "captured"], pair.handle.report()


@pytest.mark.sweep(2)
@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize(("after", "took"), [(99, ["compiled", "", ""]), (0, ["captured"] * 3)])
def test_compiled_layers(name, after, took, bounds):
    """They take long prompts in chunks, and what goes on with a cache in graphs alone."""
    bounds((32, 128, 256), chunk=48, after=after)
    ids, mask = tokens(2, 200), left_padded(2, 200)
    with beside(name, "piecewise") as pair:
        pair.decoder.at_once = True
        cache = pair.handle.new_cache(2, 220)
        for step, way in zip(((0, 100), (100, 190), (190, 200)), took, strict=True):
            assert called(pair, cache, ids, mask, *step) == way, pair.decoder.prompts.why


def conversation(pair, cache, mask):
    """How the second of two turns ran: two chunks, of two rows and of one."""
    cache.reset()
    ids = tokens(3, 110)
    called(pair, cache, ids, mask, 0, 60)
    return called(pair, cache, ids, mask, 60, 110)


@pytest.mark.sweep(2)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize("mode", ["auto", "piecewise"])
def test_a_capture_that_fails_overwrites_nothing(mode, bounds, monkeypatch):
    """Of the second chunk: the model's own layers then run both, over windows as they were."""
    bounds((64, 128), chunk=128)
    step, failed = ChunkStep.__call__, []

    def fails(prompts, tokens, positions, counts, before, last, fresh, *more):
        if not fresh and tokens.shape[0] == 64:
            failed.append(tokens)
            raise NotRegional("no way")
        return step(prompts, tokens, positions, counts, before, last, fresh, *more)

    monkeypatch.setattr(ChunkStep, "__call__", fails)
    monkeypatch.setattr(Over, "begin_chunk", lambda *_: None)
    with beside("gemma3", mode, compile_after=99) as pair:
        cache, mask = pair.handle.new_cache(3, 160), left_padded(3, 110)
        pair.decoder.at_once = mode == "piecewise"
        assert [conversation(pair, cache, mask) for _ in range(3)] == [""] * 3
        assert len(failed) == 1 and "no way" in pair.decoder.prompts.why


@torch.no_grad()
def test_an_error_half_way_leaves_no_cache_to_go_on_with(bounds, monkeypatch):
    """As one of the model's own layers, until the cache is reset."""
    bounds((64, 128), chunk=128)
    replay, ran = Graphed._replay, []

    def fails(*args):
        ran.append(args)
        if len(ran) == 3:
            raise RuntimeError("a test's")
        return replay(*args)

    with first("gemma3") as pair:
        cache, mask = pair.handle.new_cache(3, 160), left_padded(3, 110)
        assert [conversation(pair, cache, mask) for _ in range(3)] == ["", *["captured"] * 2]
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a test's"):
            patched.setattr(Graphed, "_replay", fails)
            conversation(pair, cache, mask)
        assert int(cache.get_seq_length()) == 110
        with pytest.raises(InvalidInput, match="50 positions, did not reach every layer"):
            called(pair, cache, tokens(3, 111), left_padded(3, 111), 110, 111)
        with pytest.raises(InvalidInput, match="a window of 8 needs tokens"):
            cache.crop(-50)
        assert conversation(pair, cache, mask) == "captured"
