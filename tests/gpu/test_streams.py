"""Streams and threads in turn on one patched model; a captured choice of tokens, bit for bit.

Every turn begins with a kernel that keeps its stream busy, so that what does not wait for the
stream runs ahead of it.
"""

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

import attnops
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps.numbers import FIELDS, Number, field_of
from attnops.hf.steps.sampler_graph import _copied, drawn, follow
from tests.gpu.helpers import together

DEVICE = torch.device("cuda", 0)
BUSY = 40_000_000
"""Cycles of the kernel that keeps a stream busy: some 20 ms."""

Turn = Callable[[], AbstractContextManager[Any]]
Use = Callable[[Any, Any, Turn], Iterator[Tensor]]


def turns(*streams: torch.cuda.Stream) -> Turn:
    """The blocks run on these streams in turn. The caller's own tensors are there before."""
    calls = iter(range(10_000))

    @contextmanager
    def turn() -> Iterator[None]:
        with torch.cuda.stream(streams[next(calls) % len(streams)]):
            torch.cuda._sleep(BUSY)
            yield

    return turn


def model_of() -> Any:
    return tiny.model("llama").to(DEVICE).eval()


def text(rows: int, length: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and a mask, with padding in the first row."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 90, (rows, length), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    mask[0, : 2 + rows] = 0
    return ids.to(DEVICE), mask.to(DEVICE)


def calls_of_generate(model: Any, handle: Any, turn: Turn) -> Iterator[Tensor]:
    """Other rows and so another padding; drawn tokens; and rows that end."""
    given = {rows: text(rows) for rows in (1, 2, 3)}
    torch.cuda.synchronize()
    drawn, ends = {"do_sample": True, "top_k": 20}, {"eos_token_id": [*range(3, 128, 5)]}
    for rows, more in ((2, {}), (3, {}), (1, drawn), (3, ends), (2, {})) * 2:
        ids, mask = given[rows]
        torch.manual_seed(rows)
        with turn():
            yield model.generate(
                ids,
                attention_mask=mask,
                **{"do_sample": False, "max_new_tokens": 6, "pad_token_id": 1, **more},
            )


def turns_of_a_conversation(model: Any, handle: Any, turn: Turn) -> Iterator[Tensor]:
    """On one cache. The texts are given, so that none waits for the stream of the turn before."""
    cache = handle.new_cache(2, 80)
    whole = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    texts = [whole[:, :length].clone() for length in (8, 16, 24, 32)]
    masks = [torch.ones_like(each) for each in texts]
    torch.cuda.synchronize()
    for ids, mask in zip(texts, masks, strict=True):
        with turn():
            yield model.generate(
                ids, attention_mask=mask, **named(cache), do_sample=False, max_new_tokens=4
            )


def steps_by_hand(model: Any, handle: Any, turn: Turn) -> Iterator[Tensor]:
    """With a crop and a reset between them."""
    cache, (ids, _) = handle.new_cache(2, 60), text(2)
    torch.cuda.synchronize()
    for _ in range(2):
        with turn():
            yield model(ids, **named(cache)).logits
        for at in range(4):
            with turn():
                yield handle.step(ids[:, at : at + 1], cache)
            with turn():
                cache.crop(-1)
            with turn():
                yield handle.step(ids[:, at + 1 : at + 2], cache)
        with turn():
            cache.reset()


def calls_of_the_model(model: Any, handle: Any, turn: Turn) -> Iterator[Tensor]:
    """Without graphs, and the length that the cache tells."""
    cache, (ids, _) = handle.new_cache(2, 60), text(2)
    torch.cuda.synchronize()
    for at in range(4):
        with turn():
            yield model(ids[:, 3 * at : 3 * at + 3], **named(cache)).logits
        with turn():
            yield cache.get_seq_length().clone()


USES: tuple[Any, ...] = (
    calls_of_generate,
    turns_of_a_conversation,
    steps_by_hand,
    calls_of_the_model,
)


def run(use: Use, mode: Any, *streams: torch.cuda.Stream) -> list[Tensor]:
    """What a use gives on these streams, in turn."""
    torch.cuda.synchronize()
    model = model_of()
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=mode) as handle:
        found = [*use(model, handle, turns(*streams))]
        torch.cuda.synchronize()
        assert mode == "hf" or "generate" not in use.__name__ or handle.took.loop == "", handle.took
    return found


@pytest.mark.parametrize(
    ("mode", "use"),
    [("breakable", use) for use in USES]
    + [("hf", use) for use in USES if use is not steps_by_hand],
)
def test_two_streams_in_turn(mode: str, use: Any) -> None:
    """What one stream gives."""
    first, second = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    want = run(use, mode, first)
    for number, both in enumerate(zip(run(use, mode, first, second), want, strict=True)):
        torch.testing.assert_close(
            *both, rtol=1e-4, atol=1e-4, msg=lambda m, n=number: f"result {n}: {m}"
        )


def test_pages_that_are_freed_while_a_stream_reads_them() -> None:
    """Their memory is not given to another stream before."""
    first, second = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    ids, _ = text(2)
    found = []
    for freed in (False, True):
        torch.cuda.synchronize()
        model = model_of()
        with torch.no_grad(), attnops.patch(model, cache="paged", decode="hf") as handle:
            with torch.cuda.stream(first):
                cache = handle.new_cache(2, 4000)
                model(ids, **named(cache))
            torch.cuda.synchronize()
            pages = weakref.ref(cache.state.pages)
            alike = cache.state.pages.allocations
            sizes = [tuple(whole.shape) for each in alike for whole in each.whole]
            del alike
            late = model.model.layers[0].register_forward_pre_hook(
                lambda *_: torch.cuda._sleep(BUSY)
            )
            with torch.cuda.stream(second):
                logits = model(ids[:, :1], **named(cache)).logits
            late.remove()
            if freed:
                del cache
                handle.release()
                assert pages() is None, "they are held still"
                with torch.cuda.stream(first):
                    others = [torch.full(size, float("nan"), device=DEVICE) for size in sizes]
            torch.cuda.synchronize()
            found.append(logits.clone())
            others = []
    assert not others and not found[1].isnan().any(), "the pages were written over"
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_threads_on_streams_of_their_own() -> None:
    """Prompts, steps and choices of two threads at once give the tokens of one after the other."""
    model = model_of()
    given = [text(rows) for rows in (2, 3)]
    torch.cuda.synchronize()

    def generated(number: int) -> list[int]:
        ids, mask = given[number]
        tokens: list[int] = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=24
        ).tolist()
        return tokens

    with attnops.patch(model, cache="paged", decode="breakable"):
        want = [generated(number) for number in range(2)]

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                for call in range(8):
                    assert generated(number) == want[number], f"thread {number}, call {call}"

        together([partial(work, number) for number in range(2)])


def test_the_draw_is_that_of_multinomial() -> None:
    """Its tokens, and where it leaves the generator of the GPU."""
    for seed, shape in enumerate([(1, 7), (3, 128), (2, 50257), (16, 128256)] * 3):
        gone = torch.rand(shape, device=DEVICE) < 0.3
        probabilities = (
            torch.randn(shape, device=DEVICE).mul(4).masked_fill(gone, -torch.inf).softmax(-1)
        )
        torch.manual_seed(seed)
        want = torch.multinomial(probabilities, 1).squeeze(1)
        after = torch.cuda.get_rng_state(DEVICE)
        torch.manual_seed(seed)
        assert torch.equal(
            drawn(probabilities, torch.ones_like(probabilities).exponential_()), want
        ), shape
        assert torch.equal(torch.cuda.get_rng_state(DEVICE), after), shape


BOUNDS = {
    "TemperatureLogitsWarper": (0.05, 3),
    "TopPLogitsWarper": (0, 1),
    "MinPLogitsWarper": (0, 1),
    "RepetitionPenaltyLogitsProcessor": (0.3, 3),
}


@pytest.mark.parametrize("names", [*((name,) for name in BOUNDS), (*BOUNDS,)], ids=[*BOUNDS, "all"])
def test_numbers_of_a_request_give_transformers_own_bits(names: tuple[str, ...]) -> None:
    """Logits after the processors."""

    def processors(seed: int) -> list[Any]:
        draw = random.Random(seed).uniform
        return [getattr(transformers, name)(draw(*BOUNDS[name])) for name in names]

    for each in processors(0):
        assert field_of(each, DEVICE) == FIELDS[type(each)], "a trial on the GPU failed"
    ours = [_copied(each, DEVICE) for each in processors(0)]
    assert sum(isinstance(value, Number) for each in ours for value in vars(each).values()) == len(
        names
    )
    tokens = torch.randint(0, 32000, (4, 60), device=DEVICE)
    for seed in range(60):
        theirs = processors(seed)
        want = got = torch.randn(4, 32000, device=DEVICE) * 6
        for own, each in zip(ours, theirs, strict=True):
            follow(own, each)
            want, got = each(tokens, want), own(tokens, got)
        differ = int((want.view(torch.int32) != got.view(torch.int32)).sum())
        assert not differ, f"{names}, seed {seed}: {differ} of {want.numel()} differ"


def test_sampled_tokens_of_generate_are_those_of_transformers() -> None:
    """Of a float32 model. Requests have numbers of their own, and one captured choice."""
    model, (ids, mask) = model_of(), text(3)
    calls: list[dict[str, Any]] = [
        {
            "temperature": 0.3 + 0.2 * n,
            "top_p": 0.95 - 0.06 * n,
            "min_p": 0.01 * n,
            "repetition_penalty": 1.05 + 0.03 * n,
        }
        for n in range(6)
    ]

    def drawn(more: dict[str, Any]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(9)
        return model.generate(
            ids, attention_mask=mask, do_sample=True, max_new_tokens=10, **more
        ), torch.cuda.get_rng_state(DEVICE)

    want = [drawn(more) for more in calls]
    with attnops.patch(model, cache="paged", decode="breakable") as handle:
        for more, (tokens, state) in zip(calls, want, strict=True):
            got, after = drawn(more)
            assert handle.took.loop == "", handle.took
            assert torch.equal(after, state), "the generator is elsewhere"
            assert torch.equal(got, tokens), more
        assert len(handle._paged.loop._idle) == 1
