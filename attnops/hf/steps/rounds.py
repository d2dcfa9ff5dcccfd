"""`Rounds`: the loop of `generate()` with drafts, in place of `_sample`.

A round costs two replays: of a step that verifies the drafts of all rows, and of the choice that
follows it, which accepts, appends and drafts anew. The host enqueues the next step before it reads
what the last choice was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from attnops.cache.paged import ordinary
from attnops.core.kernel import deterministic
from attnops.core.select import active_policy
from attnops.hf.cache.model_pages import EMPTY
from attnops.hf.cache.names import cache_in, named
from attnops.hf.generation import running_generation
from attnops.hf.models import take_back
from attnops.hf.models.rotations import follow_length
from attnops.hf.steps.calls import StepInputs, plain_verify
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.eligibility import Asked
from attnops.hf.steps.round_graph import News, Round
from attnops.hf.steps.speculate import Plan
from attnops.nn import Draft

PROBE = 32
"""Rounds without drafts before another one tries them. A round with drafts that are wrong takes at
most a third longer, so this costs 1%."""

_FIRST, _KEPT = 0.7, 0.8
"""How often a draft is right, before any was tried, and the weight of the rounds before in that."""

_COST = 0.02
"""What one more token of a row adds to the time of a step, as a part of it."""


def why_no_rounds(asked: Asked, decoder: Decoder, plan: Plan, kept: bool) -> Iterator[str]:
    """Each reason why a plain call of `generate()` drafts nothing. kept: does the caller have the
    cache after the call?"""
    yield from _why_steps(asked, decoder)
    yield from _why_rows(asked, kept)
    cache, before = cache_in(asked.given), asked.columns - asked.input_ids.shape[1]
    if before + asked.max_length - 1 + plan.form.depths[-1] > cache.max_length:
        yield "the cache has no room for drafts behind the text"
    if before and plan.assistant is not None:
        yield "the assistant reads the text, which leaves tokens of the cache out"
    running = running_generation()
    if running is None or running.checked is not cache.state.pages.pad or not cache.state.whole:
        yield "the mask of its prompt was not checked"


def _why_steps(asked: Asked, decoder: Decoder) -> Iterator[str]:
    """Each reason of the model, of its cache and of how its steps run."""
    cache = cache_in(asked.given)
    if decoder.how.mode != "auto":
        yield f"decode={decoder.how.mode!r}, and drafts are for 'auto'"
    if deterministic(active_policy()):
        yield "under a deterministic policy steps of other sizes may choose other bits"
    if cache.state.pages.plans() is not None:
        yield "the kernel needs a plan of the host, which steps with drafts do not have"
    if follow_length(asked.owner):
        yield "rotations follow from the longest position of a step, and drafts are further on"


def _why_rows(asked: Asked, kept: bool) -> Iterator[str]:
    """Each reason of what the call does with the tokens of its rows. kept: see `why_no_rounds`."""
    rows = asked.input_ids.shape[0]
    if any(type(each) is RepetitionPenaltyLogitsProcessor for each in asked.processors):
        yield "a repetition penalty follows the drafts of each token"
    if kept and rows > 1:
        yield "rows get different numbers of tokens, and the caller keeps their cache"
    if asked.streamer is not None and rows > 1:
        yield "rows get different numbers of tokens, and the streamer hears one of each at a time"


class Depth:
    """How many tokens the next round verifies for each row, by what the last ones were worth.

    depths: those that there are graphs for, from 1 on. accepted: of 0 to 1, how often a draft was
    right.
    """

    def __init__(self, depths: tuple[int, ...], rows: int) -> None:
        self.depths, self._rows = depths, rows
        self.accepted, self._idle = _FIRST, 0

    def note(self, queries: int, news: News) -> None:
        """Take a round of so many tokens a row into account."""
        live = [n for n in news.counts if n]
        if queries == 1 or not live:
            return
        right = sum(live) - len(live)
        tried = sum(min(n, queries - 1) for n in live)
        self.accepted = _KEPT * self.accepted + (1 - _KEPT) * right / tried

    def next(self, offered: int) -> int:
        """Of the next round, where so many tokens are drafted at most."""
        if not offered:
            return 1
        best = max(self.depths, key=self._worth)
        if best > 1:
            self._idle = 0
            return best
        self._idle += 1
        return self.depths[-1] if self._idle % PROBE == 0 else 1

    def _worth(self, queries: int) -> float:
        """Tokens of a row in the time of a step of one token."""
        tokens = sum(self.accepted**n for n in range(queries))
        return tokens / (1 + _COST * (queries - 1) * max(1, self._rows / 8))


class Rounds:
    """The rounds of one call after its prompt. kept: see `why_no_rounds`."""

    def __init__(self, asked: Asked, decoder: Decoder, made: Round, kept: bool) -> None:
        self._asked, self._decoder, self._round, self._kept = asked, decoder, made, kept
        self._cache = cache_in(asked.given)
        self._rows, self._length = asked.input_ids.shape
        self._lengths = [self._length] * self._rows
        self.rounds = self.tokens = 0
        self._lost = ""  # why a step had no graph that verifies its drafts

    @property
    def tokens_a_round(self) -> float:
        """Tokens that a row got in a round, on average."""
        return self.tokens / max(1, self.rounds)

    def __str__(self) -> str:
        lost = f", some without drafts: {self._lost}" if self._lost else ""
        return f"{self.tokens_a_round:.2f} tokens of a row a round{lost}"

    def run(self, logits: Tensor, draft: Draft | None) -> Any:
        """What transformers' `_sample` does and returns after the prompt.

        logits: `[B, 1, V]`. draft: proposes tokens that are not looked up.
        """
        asked, pages = self._asked, self._cache.state.pages
        padding = pages.pad[: self._rows].clone()
        self._begin(pages.seen - padding)
        try:
            self._decode(logits, draft)
        finally:
            if self._rows == 1:  # a cache that may be kept counts the padding that it had
                with ordinary():
                    pages.seen.copy_((self._round.stored + padding)[0])
                    pages.pad.fill_(EMPTY)
                    pages.pad[:1].copy_(padding)
                    if self._kept and self._cache.states and self._cache.state.whole:
                        take_back.settle(asked.owner, self._cache, self._round.stored)
        if asked.streamer is not None:
            asked.streamer.end()
        sequences: Any = self._round.texts()
        if not asked.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, **named(self._cache))

    def _begin(self, stored: Tensor) -> None:
        """stored: int64 `[B]`, the tokens of each row in the pages."""
        asked, cache = self._asked, self._cache
        self._round.begin(asked, stored)
        if cache.states:
            with ordinary():
                anew = take_back.begin(asked.owner, cache, self._round.form.depths[-1], stored)
            if anew:
                self._decoder.forget(cache.state.pages)

    def _decode(self, logits: Tensor, draft: Draft | None) -> None:
        made, decoder, most = self._round, self._decoder, self._asked.max_length
        depth, offered = Depth(made.form.depths, self._rows), made.form.drafts
        counts = False  # the first tokens are the prompt's
        while True:
            queries = logits.shape[1]
            with decoder.turn:
                made.choose(logits)
            # Not in the turn, for an assistant has one too, which another thread may have.
            made.send(draft)
            # By now each unfinished row has one token more than the host knows of.
            if min(self._lengths) + 1 < most:
                logits = self._step(depth.next(offered))
            news = self._told()
            if counts:
                self.rounds += sum(n > 0 for n in news.counts)
                self.tokens += sum(news.counts)
            if news.done:
                return
            depth.note(queries, news)
            offered = news.offered
            counts = True

    def _step(self, queries: int) -> Tensor:
        """Logits `[B, N, V]` after the last tokens and the drafts. N is 1 where graphs cannot run
        it."""
        made, decoder, running = self._round, self._decoder, running_generation()
        for count in dict.fromkeys((queries, 1)):
            asks = StepInputs(made.input[:, :count], made.positions[:, :count], made.stored)
            logits = decoder.try_step(asks, self._cache)
            if logits is not None:
                if running is not None:
                    running.graphs = decoder.last_mode
                return logits
            self._lost = self._lost or decoder.why
        if running is not None:
            running.stepped = True
        decoder.plain_steps += 1
        decoder.look = True
        return plain_verify(self._asked.owner, asks, self._cache)

    def _told(self) -> News:
        """The news of the last choice, which the streamer has heard."""
        news = self._round.news()
        self._lengths = [
            length + n if n else self._asked.max_length
            for length, n in zip(self._lengths, news.counts, strict=True)
        ]
        if self._asked.streamer is not None:
            [tokens] = news.tokens  # a streamer hears one row
            for token in tokens:
                self._asked.streamer.put(torch.tensor([token]))
        return news
