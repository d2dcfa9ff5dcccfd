"""`Rounds`: the loop of `generate()` with drafts, in place of `_sample`.

A round costs two replays: of a step that verifies the drafts of all rows, and of the choice that
follows it, which accepts, appends and drafts anew. The host enqueues the next step before it reads
what the last choice was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from attnops.cache.paged import ordinary
from attnops.core.kernel import deterministic
from attnops.core.problem import Target, altered
from attnops.core.select import active_policy, select
from attnops.hf.cache.model_pages import EMPTY, ModelPages
from attnops.hf.cache.names import cache_in, named
from attnops.hf.generation import running_generation
from attnops.hf.models import take_back
from attnops.hf.models.rotations import follow_length
from attnops.hf.steps import apart
from attnops.hf.steps.calls import plain_verify
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.eligibility import Asked
from attnops.hf.steps.heads import Head
from attnops.hf.steps.hidden import Outputs, Read
from attnops.hf.steps.round_graph import Round
from attnops.hf.steps.round_kinds import PROBE, PROBE_MOST, TOKEN, News
from attnops.hf.steps.speculate import Plan
from attnops.nn import Draft

_FIRST, _KEPT = 0.7, 0.8
"""How often a draft is right, before any was tried, and the most weight of the rounds before in
that. The first ones weigh more, also those after a time without drafts."""

_TREE, _NODE = 0.12, 0.006
"""What a tree adds, and in it each draft of any row: steps of 2 to 256 tokens of Llama-3-8B's shape
on an H200 took so long."""


def why_no_rounds(
    asked: Asked, decoder: Decoder, plan: Plan, kept: bool, read: Sequence[Read]
) -> Iterator[str]:
    """Each reason why a plain call of `generate()` drafts nothing.

    kept: does the caller have the cache after the call? read: the hidden states of the prompt, for
    a head.
    """
    yield from _why_steps(asked, decoder)
    yield from _why_rows(asked, kept)
    cache, before = cache_in(asked.given), asked.columns - asked.input_ids.shape[1]
    if deterministic(active_policy()):
        yield from apart.why_not(asked.owner, decoder, cache, plan.form.levels > 0)
    if before + asked.max_length - 1 + plan.form.depths[-1] > cache.max_length:
        yield "the cache has no room for drafts behind the text"
    if any(cache.state.pages.windows) and plan.form.depths[-1] > cache.state.pages.sizes.drafts:
        yield "the sliding windows of the cache have no room for so many drafts"
    if plan.form.head is not None:
        if not read:
            yield "the head has not read the states of the prompt"
        if plan.form.levels:
            yield from why_no_trees(plan.form.head, cache.state.pages)
    if before and plan.assistant is not None:
        yield "the assistant reads the text, which leaves tokens of the cache out"
    running = running_generation()
    if running is None or running.checked is not cache.state.pages.pad or not cache.state.whole:
        yield "the mask of its prompt was not checked"


def why_no_trees(head: Head, pages: ModelPages) -> Iterator[str]:
    """Each reason why a head cannot attend to trees over pages like these."""
    if pages.sizes.states:
        yield "the head drafts trees, and layers with states follow one chain"
    target, policy = Target.of(pages.sizes.device), active_policy()
    for layer in head.layers:
        tree = altered(layer, target=target, page_size=pages.page_size, mask="bool")
        if select(tree, policy).kernel is None:
            yield "no kernel that the policy allows attends to a tree of the head"


def _why_steps(asked: Asked, decoder: Decoder) -> Iterator[str]:
    """Each reason of the model, of its cache and of how its steps run."""
    cache = cache_in(asked.given)
    if decoder.how.mode != "auto":
        yield f"decode={decoder.how.mode!r}, and drafts are for 'auto'"
    if cache.state.pages.plans() is not None:
        yield "the kernel needs a plan of the host, which steps with drafts do not have"
    if cache.states:
        yield from take_back.why_not(asked.owner, cache)
    if follow_length(asked.owner):
        yield "rotations follow from the longest position of a step, and drafts are further on"


def _why_rows(asked: Asked, kept: bool) -> Iterator[str]:
    """Each reason of what the call does with the tokens of its rows. kept: see `why_no_rounds`."""
    rows = asked.input_ids.shape[0]
    if kept and rows > 1:
        yield "rows get different numbers of tokens, and the caller keeps their cache"
    if asked.streamer is not None and rows > 1:
        yield "rows get different numbers of tokens, and the streamer hears one of each at a time"


class Depth:
    """How many tokens the next round verifies for each row, by what the last ones were worth.

    depths: those that there are graphs for, from 1 on. accepted: of 0 to 1, how often a draft was
    right. tokens: that a row got in rounds with a tree, on average.
    cost: of the drafts of a round, as a part of a step of one token.
    """

    def __init__(self, depths: tuple[int, ...], rows: int, cost: float = 0.0) -> None:
        self.depths, self._rows, self._cost = depths, rows, cost
        self.accepted, self.tokens = _FIRST, inf
        self._noted = 0  # rounds with drafts, since the start or since others had none
        self._idle, self._most_idle = 0, PROBE

    def note(self, queries: int, news: News, tree: bool = False) -> None:
        """Take a round of so many tokens a row into account. tree: were they one?"""
        live = [n for n in news.counts if n]
        if queries == 1 or not live:
            return
        kept = min(_KEPT, (1 + self._noted) / (2 + self._noted))
        self._noted += 1
        if tree:
            got = sum(live) / len(live)
            self.tokens = got if self.tokens == inf else kept * self.tokens + (1 - kept) * got
            return
        right = sum(live) - len(live)
        tried = sum(min(n, queries - 1) for n in live)
        self.accepted = kept * self.accepted + (1 - kept) * right / tried

    def next(self, offered: int, tree: bool = False) -> int:
        """Of the next round, where so many tokens are drafted at most. A tree is verified whole or
        not at all."""
        if not offered:
            return 1
        depths = (1, self.depths[-1]) if tree else self.depths
        best = max(depths, key=partial(self._worth, tree))
        if best > 1:
            self._idle, self._most_idle = 0, PROBE
            return best
        self._idle += 1
        if self._idle < self._most_idle:
            return 1
        self._idle, self._most_idle = 0, min(2 * self._most_idle, PROBE_MOST)
        self._noted = 0
        return self.depths[-1]

    def _worth(self, tree: bool, queries: int) -> float:
        """Tokens of a row in the time of a step of one token."""
        drafts = self._cost if queries > 1 else 0.0
        if tree and queries > 1:
            return self.tokens / (1 + drafts + _TREE + _NODE * (queries - 1) * self._rows)
        tokens = sum(self.accepted**n for n in range(queries))
        return tokens / (1 + drafts + TOKEN * (queries - 1) * max(1, self._rows / 8))


class Rounds:
    """The rounds of one call after its prompt. kept, read: of `why_no_rounds`. cost: of `Depth`."""

    def __init__(
        self,
        asked: Asked,
        decoder: Decoder,
        made: Round,
        kept: bool,
        read: list[Read],
        cost: float,
    ) -> None:
        self._asked, self._decoder, self._round = asked, decoder, made
        self._kept, self._read, self._cost = kept, read, cost
        self._cache = cache_in(asked.given)
        self._rows, length = asked.input_ids.shape
        self._lengths = [length] * self._rows
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
        self._begin(padding, pages.seen - padding)
        try:
            self._decode(Outputs(logits), draft)
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

    def _begin(self, padding: Tensor, stored: Tensor) -> None:
        """padding, stored: int64 `[B]`, of each row in the pages."""
        asked, cache = self._asked, self._cache
        with self._decoder.turn:
            self._round.over(cache.state.pages)
        self._round.begin(asked, padding, stored, self._read)
        if cache.states:
            with ordinary():
                anew = take_back.begin(asked.owner, cache, self._round.form.depths[-1], stored)
            if anew:
                self._decoder.forget(cache.state.pages)

    def _decode(self, out: Outputs, draft: Draft | None) -> None:
        made, decoder, most = self._round, self._decoder, self._asked.max_length
        depth, offered = Depth(made.form.depths, self._rows, self._cost), made.form.drafts
        looks_up = draft is None and made.form.head is None
        counts = False  # the first tokens are the prompt's
        while True:
            queries, tree = out.logits.shape[1], made.tree
            # Behind this choice each unfinished row has one token more than the host knows of.
            more = min(self._lengths) + 1 < most
            # A draft that found nothing is asked again, as long as its tokens were right.
            drafted = offered if looks_up else made.form.drafts
            following = depth.next(drafted, made.tree) if more else 1
            asked = draft if following > 1 else None
            with decoder.turn:
                made.choose(out, drafts=following > 1)
            # Not in the turn, for an assistant has one too, which another thread may have.
            made.send(asked)
            if made.tree and asked is not None:  # it may be the first
                following = made.form.depths[-1]
            if more:
                out = self._step(following if offered else 1)
            news = self._told()
            if counts:
                self.rounds += sum(n > 0 for n in news.counts)
                self.tokens += sum(news.counts)
            if news.done:
                return
            depth.note(queries, news, tree)
            if looks_up or asked is not None:
                offered = news.offered
            counts = True

    def _step(self, queries: int) -> Outputs:
        """After the last tokens and the drafts. N is 1 where graphs cannot run it."""
        made, decoder, running = self._round, self._decoder, running_generation()
        for count in dict.fromkeys((queries, 1)):
            asks = made.step(count)
            out = decoder.try_step(asks, self._cache)
            if out is not None:
                if running is not None:
                    running.graphs = decoder.last_mode
                return out
            self._lost = self._lost or decoder.why
        if running is not None:
            running.stepped = True
        decoder.plain_steps += 1
        decoder.look = True
        return plain_verify(self._asked.owner, decoder.forward, asks, self._cache)

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
