"""`Tail`: what follows the model in a decode step, from logits to the next token, as one captured
graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.cache.paged import ordinary
from attnops.core.private_torch import assert_async
from attnops.graphs.cuda_graphs import Device
from attnops.graphs.streams import LastStream
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.hf.steps.eligibility import Asked, held
from attnops.hf.steps.numbers import Number, field_of

# The error of torch.multinomial, where a step's logits are NaN or infinite.
_INVALID = "probability tensor contains either `inf`, `nan` or element < 0"


class Choice(NamedTuple):
    """The constants of a tail. Equal ones share a graph.

    device: of its buffers.
    rows, room, vocab: sizes of its buffers.
    ends: tokens that end a row; 0: none does.
    sampled: draw the token, where a greedy choice takes the likeliest.
    processors: for each the type, its fields, sorted by name, and its code; `Number` in the place
        of a number that tensors hold.
    flags: of torch.
    drafts: how rounds draft, see `round_kinds.Form`; None: a token at a time.
    """

    device: torch.device
    rows: int
    room: int
    vocab: int
    ends: int
    sampled: bool
    processors: tuple[Any, ...]
    flags: tuple[Any, ...] = ()
    drafts: Any = None


class Held:
    """Forbids tokens until a text has some length, as transformers' processors do by a Python
    number.

    ids: int64 `[E]`, the tokens. least: int64 `[]`. length: int64 `[1]`, of the text.
    """

    def __init__(self, count: int, length: Tensor) -> None:
        self.ids, self.least, self.length = length.new_zeros(count), length.new_zeros(()), length

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        every = torch.arange(scores.shape[-1], device=scores.device)
        forbidden = (every[:, None] == self.ids).any(-1) & (self.length < self.least)
        return torch.where(forbidden, -math.inf, scores)


def _copied(processor: Any, device: torch.device) -> Any:
    """A copy of a processor whose tensors keep their addresses, with a `Number` where one may
    be."""
    ours = copy.copy(processor)
    vars(ours).update(
        {
            name: x.to(device, copy=True)
            for name, x in vars(processor).items()
            if isinstance(x, Tensor)
        }
    )
    if (name := field_of(processor, device)) is not None:
        setattr(ours, name, Number(device))
    return ours


def ours_of(
    processors: Sequence[Callable[..., Any]], device: torch.device, length: Tensor
) -> list[Any]:
    """Copies of processors whose tensors keep their addresses. length: of the text, see `Held`."""
    return [
        _copied(each, device) if (found := held(each)) is None else Held(found[0].numel(), length)
        for each in processors
    ]


def follow(ours: Any, theirs: Any) -> None:
    """Take the tensors and the number of a processor into a copy of one like it, or the tokens and
    the length into a `Held`."""
    if (found := held(theirs)) is not None:
        ours.ids.copy_(found[0])
        ours.least.fill_(found[1])
        return
    for name, value in vars(theirs).items():
        own = getattr(ours, name)
        if isinstance(own, Number):
            own.set(value)
        elif isinstance(value, Tensor):
            own.copy_(value)


class Tail:
    """The tensors of one `generate()` at a time, and the graph that chooses and appends a token for
    each row.

    The operations are those of transformers' `_sample` in the same order, on exactly B rows, so
    that the same numbers are drawn.

    tokens: int64 `[B, room]`, the text. The columns behind it repeat a token of the text, so that a
    penalty on `tokens` counts no other.
    token, position: int64 `[B, 1]`, the input of the next step.
    """

    def __init__(self, choice: Choice, processors: Sequence[Callable[..., Any]]) -> None:
        self.choice, rows, device = choice, choice.rows, choice.device
        far = device.type == "cuda"

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        with ordinary():
            self._scores = torch.zeros(rows, choice.vocab, dtype=torch.float32, device=device)
            # As torch.multinomial draws it, before a replay: the capture of a graph that draws
            # would keep other threads from the generator.
            self._noise = torch.ones_like(self._scores) if choice.sampled else None
            self.tokens = ints(rows, choice.room)
            self.token = ints(rows, 1)
            self.position = ints(rows, 1)
            self._length = ints(1)
            self._unfinished = ints(rows)
            self._eos = ints(choice.ends)
            self._pad = ints()
            self._processors = ours_of(processors, device, self._length)
            # The tokens of a step, and whether a row is unfinished: one copy to the host.
            self._news = ints(rows + 1)
            self._host = torch.zeros(rows + 1, dtype=torch.int64, device="cpu", pin_memory=far)
        self._stream = LastStream(device, self._tensors())
        self._arrived = torch.cuda.Event() if far else None
        self._heard = False
        self.graphs = ChoiceGraphs()

    def _tensors(self) -> tuple[Tensor, ...]:
        """Its buffers, without those of its processors, which are small or the caller's."""
        noise = () if self._noise is None else (self._noise,)
        text = self.tokens, self.token, self.position, self._length
        return self._scores, *noise, *text, self._unfinished, self._eos, self._pad, self._news

    def capture(self, device: Device) -> None:
        """Capture the graph, before `begin`."""
        self._stream.use()
        self.graphs.capture(device, (1,), self._clear, self._choose)

    def _clear(self) -> None:
        self._length.zero_()
        self._scores.zero_()
        if self._noise is not None:
            self._noise.fill_(1)

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers and of its graph."""
        return self.graphs.nbytes + sum(each.nbytes for each in self._tensors())

    def begin(self, asked: Asked, heard: bool) -> None:
        """Take a prompt. heard: will `news` be called after each choice?"""
        self._stream.use()
        input_ids, eos = asked.input_ids, asked.eos
        length = input_ids.shape[1]
        self.tokens.copy_(input_ids[:, -1:].expand_as(self.tokens))
        self.tokens[:, :length].copy_(input_ids)
        self.position.copy_(asked.given["position_ids"][:, -1:])
        self._length.fill_(length)
        self._unfinished.fill_(1)
        if eos:
            self._eos.copy_(torch.cat([ids.reshape(-1).to(self._eos.device) for ids in eos]))
            self._pad.copy_(asked.config._pad_token_tensor)
        for ours, theirs in zip(self._processors, asked.processors, strict=True):
            follow(ours, theirs)
        self._heard = heard

    def choose(self, logits: Tensor) -> None:
        """Append a token to each row. logits: `[B, S, V]`, of which the last position counts."""
        # Not in the graph: each step returns its logits at another address.
        self._scores.copy_(logits[:, -1])
        if self._noise is not None:
            self._noise.exponential_()
        self.graphs.run(1, self._choose)
        if self._heard:
            self._host.copy_(self._news, non_blocking=True)
            if self._arrived is not None:
                # Of the tail's device, which need not be the current one.
                self._arrived.record(torch.cuda.current_stream(self._news.device))

    def news(self) -> tuple[Tensor, bool]:
        """(the last chosen tokens, int64 `[B]` on the CPU; is every row finished?) Waits for the
        choice, but not for work after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found = self._host.clone()
        return found[:-1], not found[-1]

    def _choose(self, _: int) -> None:
        choice, scores, unfinished = self.choice, self._scores, self._unfinished
        for processor in self._processors:
            scores = processor(self.tokens, scores)
        if self._noise is not None:
            chosen = drawn(torch.softmax(scores, dim=-1), self._noise)
        else:
            chosen = torch.argmax(scores, dim=-1)
        if choice.ends:
            chosen = chosen * unfinished + self._pad * (1 - unfinished)
            unfinished.mul_((chosen[:, None] != self._eos).all(-1))
        self.tokens.index_copy_(1, self._length, chosen[:, None])
        self.token.copy_(chosen[:, None])
        self.position.add_(1)
        self._length.add_(1)
        torch.cat((chosen, unfinished.amax(0, keepdim=True)), out=self._news)


def drawn(probabilities: Tensor, noise: Tensor) -> Tensor:
    """int64 `[B]`, what `torch.multinomial(probabilities, 1)` draws by the random numbers `noise`.

    probabilities: `[B, V]`. noise: of its shape, exponentially distributed.
    Raises RuntimeError as torch.multinomial does, on a GPU as an assertion of the device.
    """
    valid = (probabilities.max() < math.inf) & (probabilities.min() >= 0)
    assert_async(valid, _INVALID)
    return torch.argmax(probabilities / noise, dim=-1)
