"""Streams and threads in turn on one patched model; a captured choice of tokens, bit for bit.

Every turn begins with a kernel that keeps its stream busy, so that what does not wait for the
stream runs ahead of it.
"""

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attnops.hf.cache_names import named

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")

DEVICE = torch.device("cuda", 0)
BUSY = 40_000_000
"""Cycles of the kernel that keeps a stream busy: some 20 ms."""

Turn = Callable[[], AbstractContextManager[Any]]
Use = Callable[[Any, Any, Turn], Iterator[Tensor]]


def busy() -> None:
    """Keep the current stream busy, and not the host."""
    torch.cuda._sleep(BUSY)


def turns(*streams: torch.cuda.Stream) -> Turn:
    """The blocks run on these streams in turn. The caller's own tensors are there before."""
    calls = iter(range(10_000))

    @contextmanager
    def turn() -> Iterator[None]:
        with torch.cuda.stream(streams[next(calls) % len(streams)]):
            busy()
            yield

    return turn


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    from attnops.hf import tiny

    return tiny.model("llama").to(DEVICE, dtype).eval()


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
    for rows, more in (
        (2, {}),
        (3, {}),
        (1, {"do_sample": True, "top_k": 20}),
        (3, {"eos_token_id": [*range(3, 128, 5)]}),
        (2, {}),
    ) * 2:
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
            given = {**named(cache), "do_sample": False, "max_new_tokens": 4}
            yield model.generate(ids, attention_mask=mask, **given)


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
    import attnops

    torch.cuda.synchronize()
    model = model_of()
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=mode) as handle:
        found = [*use(model, handle, turns(*streams))]
        torch.cuda.synchronize()
        assert mode == "hf" or "generate" not in use.__name__ or handle.took.loop == "", handle.took
    return found


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("mode", ["breakable", "hf"])
def test_two_streams_in_turn(mode: str, use: Any) -> None:
    """What one stream gives."""
    if mode == "hf" and use is steps_by_hand:
        pytest.skip("decode='hf' has no steps")
    first, second = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    want = run(use, mode, first)
    got = run(use, mode, first, second)
    assert len(got) == len(want)
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        shown = [each.flatten()[:40].tolist() for each in (ours, theirs)]
        where = f"{use.__name__}, {mode}, result {number}:\n{shown[0]}\n{shown[1]}"
        assert ours.shape == theirs.shape, where
        if ours.is_floating_point():
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), where
        else:
            assert torch.equal(ours, theirs), where


def test_pages_that_are_freed_while_a_stream_reads_them() -> None:
    """Their memory is not given to another stream before."""
    import attnops

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
            allocations = [each for _, alike in cache.state.pages._allocations for each in alike]
            sizes = [tuple(each.shape) for each in allocations]
            del allocations
            late = model.model.layers[0].register_forward_pre_hook(lambda *_: busy())
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


def together(runs: list[Callable[[], None]]) -> None:
    """Run these in threads; raises the first error of any."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_on_streams_of_their_own() -> None:
    """Prompts, steps and choices of two threads at once give the tokens of one after the other."""
    import attnops

    model = model_of()
    given = [text(rows) for rows in (2, 3)]
    torch.cuda.synchronize()

    def generated(number: int) -> list[int]:
        ids, mask = given[number]
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
        tokens: list[int] = out.tolist()
        return tokens

    with attnops.patch(model, cache="paged", decode="breakable"):
        want = [generated(number) for number in range(2)]
        found: list[list[list[int]]] = [[], []]

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                for _ in range(8):
                    found[number].append(generated(number))

        together([lambda number=number: work(number) for number in range(2)])
    for number in range(2):
        for call, tokens in enumerate(found[number]):
            assert tokens == want[number], f"thread {number}, call {call}"


class Meets:
    """A streamer that waits for those of other threads, while each has a choice of tokens."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier, self.puts = barrier, 0

    def put(self, tokens: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the first is the prompt, before the loop
            self.barrier.wait(120)

    def end(self) -> None:
        pass


def test_threads_of_equal_options_capture_one_choice_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, in four rounds."""
    import attnops
    from attnops.hf.loop.tail import Tail

    count, rounds, real = 4, 4, Tail.capture
    captured: list[Tail] = []

    def capture(self: Tail, graphs: Any) -> None:
        captured.append(self)
        real(self, graphs)

    monkeypatch.setattr(Tail, "capture", capture)
    model, (ids, mask), barrier = model_of(), text(2), threading.Barrier(count)
    found = []
    with attnops.patch(model, cache="paged", decode="breakable") as handle:

        def work() -> None:
            for _ in range(rounds):
                more = {"do_sample": False, "max_new_tokens": 4, "streamer": Meets(barrier)}
                found.append(model.generate(ids, attention_mask=mask, **more).tolist())

        together([work] * count)
        assert [each.reason for each in captured] == [""] * count, handle.took
    assert len(found) == count * rounds and all(each == found[0] for each in found)


def test_the_draw_is_that_of_multinomial() -> None:
    """Its tokens, and where it leaves the generator of the GPU."""
    from attnops.hf.loop.tail import _drawn

    for seed, shape in enumerate([(1, 7), (3, 128), (2, 50257), (16, 128256)] * 3):
        gone = torch.rand(shape, device=DEVICE) < 0.3
        scores = torch.randn(shape, device=DEVICE).mul(4).masked_fill(gone, -torch.inf)
        probabilities = torch.softmax(scores, -1)
        torch.manual_seed(seed)
        want, after = (
            torch.multinomial(probabilities, 1).squeeze(1),
            torch.cuda.get_rng_state(DEVICE),
        )
        torch.manual_seed(seed)
        got = _drawn(probabilities, torch.ones_like(probabilities).exponential_())
        assert torch.equal(got, want), (shape, got.tolist(), want.tolist())
        assert torch.equal(torch.cuda.get_rng_state(DEVICE), after), shape


NAMES = (
    "TemperatureLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
)


def numbers_of(seed: int) -> dict[str, float]:
    """Numbers of a request, by the class of the processor."""
    draw = random.Random(seed).uniform
    bounds = ((0.05, 3), (0, 1), (0, 1), (0.3, 3))
    return {name: draw(*each) for name, each in zip(NAMES, bounds, strict=True)}


@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_numbers_of_a_request_give_transformers_own_bits(name: str) -> None:
    """Logits after the processors."""
    from attnops.hf.loop.numbers import FIELDS, Number, field_of
    from attnops.hf.loop.tail import _copied, _follow

    names = NAMES if name == "all" else (name,)

    def processors(seed: int) -> list[Any]:
        given = numbers_of(seed)
        return [getattr(transformers, each)(given[each]) for each in names]

    for each in processors(0):
        assert field_of(each, DEVICE) == FIELDS[type(each)], "a trial on the GPU failed"
    ours = [_copied(each, DEVICE) for each in processors(0)]
    values = [value for each in ours for value in vars(each).values()]
    assert sum(isinstance(value, Number) for value in values) == len(names)
    tokens = torch.randint(0, 32000, (4, 60), device=DEVICE)
    for seed in range(60):
        theirs = processors(seed)
        want = got = torch.randn(4, 32000, device=DEVICE) * 6
        for own, each in zip(ours, theirs, strict=True):
            _follow(own, each)
            want, got = each(tokens, want), own(tokens, got)
        differ = int((want.view(torch.int32) != got.view(torch.int32)).sum())
        assert not differ, f"{names}, {numbers_of(seed)}: {differ} of {want.numel()} differ"


def test_a_captured_choice_draws_transformers_tokens() -> None:
    """One graph for requests with numbers of their own; random numbers in transformers' order."""
    from attnops.graphs import CudaGraphs
    from attnops.hf.loop.plain import Asked, fields
    from attnops.hf.loop.tail import Choice, Tail
    from attnops.hf.paged.around import flags

    rows, vocab, length, steps = 3, 32000, 10, 5

    def processors(seed: int) -> list[Any]:
        given = numbers_of(seed)
        order = (
            "RepetitionPenaltyLogitsProcessor",
            "TemperatureLogitsWarper",
            "TopPLogitsWarper",
            "MinPLogitsWarper",
        )
        made = [getattr(transformers, name)(given[name]) for name in order]
        return [*made[:2], transformers.TopKLogitsWarper(50), *made[2:]]

    first = processors(0)
    choice = Choice(DEVICE, rows, 64, vocab, 0, True, fields(first, DEVICE), flags())
    tail = Tail(choice, first)
    state = torch.cuda.get_rng_state(DEVICE)
    tail.capture(CudaGraphs(DEVICE))
    assert tail.reason == ""
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state), "a capture drew"
    ids = torch.randint(0, vocab, (rows, length), device=DEVICE)
    positions = torch.arange(length, device=DEVICE).expand(rows, -1)
    for seed in range(30):
        given = processors(seed)
        assert fields(given, DEVICE) == choice.processors
        logits = torch.randn(steps, rows, 1, vocab, device=DEVICE) * 5
        torch.manual_seed(seed)
        want = ids
        for each in logits:
            scores = transformers.LogitsProcessorList(given)(want, each[:, -1].clone())
            drawn = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)
            want = torch.cat([want, drawn], 1)
        after = torch.cuda.get_rng_state(DEVICE)
        torch.manual_seed(seed)
        tail.begin(Asked(None, ids, given, [], None, None, {"position_ids": positions}), False)
        for each in logits:
            tail.choose(each)
        got = tail.tokens[:, : length + steps]
        new = [each[:, length:].tolist() for each in (got, want)]
        assert torch.equal(got, want), f"{numbers_of(seed)}\n{new[0]}\n{new[1]}"
        assert torch.equal(torch.cuda.get_rng_state(DEVICE), after)
    tail.reset()


def test_sampled_tokens_of_generate_are_those_of_transformers() -> None:
    """Of a float32 model. Requests have numbers of their own, and one captured choice."""
    import attnops

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

    def drawn(more: dict[str, Any]) -> list[list[int]]:
        torch.manual_seed(9)
        tokens = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=10, **more)
        return [*tokens.tolist(), torch.cuda.get_rng_state(DEVICE).tolist()]

    want = [drawn(more) for more in calls]
    with attnops.patch(model, cache="paged", decode="breakable") as handle:
        for more, tokens in zip(calls, want, strict=True):
            got = drawn(more)
            assert handle.took.loop == "", handle.took
            assert got[-1] == tokens[-1], "the generator is elsewhere"
            assert got == tokens, more
        assert len(handle._paged.loop._idle) == 1
