"""`Round`: what follows the model in a step that verifies drafts, from logits to the next drafts,
as one captured graph for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from attnops.cache.paged import ordinary
from attnops.core.precompile import ahead
from attnops.core.record import need
from attnops.graphs.cuda_graphs import Device
from attnops.graphs.streams import LastStream
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.calls import StepInputs
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.hf.steps.eligibility import Asked
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.heads import Drafts
from attnops.hf.steps.hidden import Outputs, Read
from attnops.hf.steps.paths import Paths
from attnops.hf.steps.round_kinds import PROBE, Form, Kind, News, Way
from attnops.hf.steps.sampler_graph import Choice, Held, drawn, follow, ours_of
from attnops.hf.steps.waiting import Room
from attnops.nn import Draft, DraftState, Proposal
from attnops.ops import advance_rows, lookup_drafts, next_inputs


class Round:
    """The texts of one `generate()` at a time, and the graphs that accept, append and draft.

    A row gets the tokens that the model chose as far as the drafts agree, and the one behind
    them. That is what plain decoding would choose, and of samples one of equal probability: a draft
    without probabilities is right with the probability that the model gives it.

    tokens: int64 `[B, room]`, the texts. What is behind `seq_lens` int32 `[B]` has no meaning.
    input, positions: int64 `[B, N]`, of the next step: the last token, and drafts.
    stored: int64 `[B]`, the tokens of each row that the pages keep.
    tree: is the next input a tree?

    For the host, one after the other: how many tokens are drafted for each row, whether it is
    unfinished, and of each row how many tokens it got, and these.
    """

    def __init__(
        self,
        choice: Choice,
        processors: Sequence[Callable[..., Any]],
        owner: Any,
        passes: Passes = (),
    ) -> None:
        """owner: the model. passes: over the recorded layers of a head."""
        self.choice, self.form = choice, choice.drafts or Form()
        rows, most, device = choice.rows, self.form.depths[-1], choice.device
        self._far = device.type == "cuda"

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        with ordinary():
            self._scores = torch.zeros(rows * most, choice.vocab, device=device)
            # Drawn before a replay, as `Tail` does.
            self._noise = torch.ones_like(self._scores) if choice.sampled else None
            self.tokens = ints(rows, choice.room)
            self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.stored, self._position = ints(rows), ints(rows)
            self._drafts, self.input, self.positions = (ints(rows, most) for _ in range(3))
            self._eos, self._pad, self._most = ints(choice.ends), ints(), ints(1)
            self._last = ints(rows)  # the last position that plain decoding computes
            self._columns = torch.arange(most, device=device)
            self._lengths = ints(rows * most, 1)
            self._processors = ours_of(processors, device, self._lengths)
            self._accepted = torch.zeros(rows * most, dtype=torch.int32, device=device)
            self._news = ints(rows * (3 + most))
            self._offered, self._unfinished = self._news[: 2 * rows].view(2, rows)
            self._head: Drafts | None = None
            if (head := self.form.head) is not None:
                room = Room(rows, choice.room, most, PROBE)
                self._head = head.drafts(owner, passes, room)
            self._host = torch.zeros(len(self._news), dtype=torch.int64, pin_memory=self._far)
        self.paths = Paths(rows, most, device) if self.form.levels else None
        self._stream = LastStream(device, self._tensors())
        self._arrived = torch.cuda.Event() if self._far else None
        self.graphs = ChoiceGraphs()
        self.tree = False
        self._device: Device | None = None
        self._queries, self._waited = 1, 0
        self._chained = False  # do states of the model follow one chain?
        self._missed = 0

    def _tensors(self) -> tuple[Tensor, ...]:
        """Its buffers, without those of its processors."""
        noise = () if self._noise is None else (self._noise,)
        rows = self.stored, self._position, self._last, self.seq_lens, self._accepted
        steps = self._drafts, self.input, self.positions, self._lengths
        numbers = self._eos, self._pad, self._most, self._news
        trees = () if self.paths is None else self.paths.tensors
        head = () if self._head is None else self._head.waiting.tensors
        return self._scores, *noise, self.tokens, *rows, *steps, *numbers, *trees, *head

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers and of its graphs."""
        head = 0 if self._head is None else self._head.waiting.pages.nbytes
        paths = 0 if self.paths is None else self.paths.nbytes
        return head + paths + self.graphs.nbytes + sum(each.nbytes for each in self._tensors())

    def capture(self, device: Device) -> None:
        """Capture the graphs, before `begin`."""
        self._stream.use()
        self._device = device
        self.graphs.capture(device, self._kinds(), self._clear, self._choose)

    def begin_kernels(self) -> None:
        """Have the kernels of its graphs begin to be compiled."""
        with suppress(Exception), ahead():  # the capture raises it
            for kind in self._kinds():
                self._choose(kind)

    def _kinds(self) -> list[Kind]:
        depths = self.form.depths[::-1]
        ways: tuple[Way, ...] = ("",) if self._head is None else ("drafts", "waits")
        kinds = [Kind(n, way) for n in depths for way in ways]
        return kinds if self._head is None else [*kinds, Kind(1, "late"), Kind(1, "reads")]

    def _clear(self) -> None:
        for each in self._tensors():
            each.fill_(int(each is self._noise))

    def over(self, pages: ModelPages) -> None:
        """Take the pages of the next prompt, before `begin`."""
        self._stream.use()
        self._chained = bool(pages.states.tensors)
        if self.paths is not None:
            assert self._device is not None
            self.paths.use(pages, self._device, self._clear, self._move)

    def begin(self, asked: Asked, padding: Tensor, stored: Tensor, read: list[Read]) -> None:
        """Take a prompt. padding, stored: int64 `[B]`, of each row in the pages. read: the hidden
        states of the prompt, which a head takes out."""
        self._stream.use()
        ids, eos = asked.input_ids, asked.eos
        length = ids.shape[1]
        self.tokens[:, :length].copy_(ids)
        self.seq_lens.fill_(length)
        # The prompt has verified its last token, as a round does its first.
        self.stored.copy_(stored - 1)
        self._position.copy_(asked.given["position_ids"][:, -1])
        self._last.copy_(self._position + (asked.max_length - 1 - length))
        self._unfinished.fill_(1)
        self._missed = 0
        self._most.fill_(asked.max_length)
        if eos:
            self._eos.copy_(torch.cat([each.reshape(-1).to(self._eos.device) for each in eos]))
            self._pad.copy_(asked.config._pad_token_tensor)
        for ours, theirs in zip(self._processors, asked.processors, strict=True):
            follow(ours, theirs)
        self._waited, self.tree = 0, self._head is not None and self.form.levels > 0
        if self.paths is not None:
            self.paths.take(None)
        if self._head is not None:
            shift = padding - (asked.columns - length)
            self._head.waiting.begin(read, ids, shift, stored, self._head.read)

    def step(self, queries: int) -> StepInputs:
        """What a step over the first so many tokens of the next input is called with."""
        ids, positions = self.input[:, :queries], self.positions[:, :queries]
        parents = self._parents(queries) if self.tree and queries > 1 else None
        return StepInputs(ids, positions, self.stored, parents)

    def choose(self, out: Outputs, drafts: bool = True) -> None:
        """Append to each row what the model chose, and draft. `send` follows.

        out: of a step with the tokens of the last `input`, or after the last of a prompt.
        drafts: will the drafts of a head be verified? It drafts none that are not.
        """
        logits = out.logits
        rows, queries = self.choice.rows, logits.shape[1]
        if self._head is not None and out.hidden is not None:
            self._head.waiting.take(out.hidden)
        self._queries = queries
        self._scores[: rows * queries].copy_(logits.reshape(rows * queries, -1))
        if self._noise is not None:
            self._noise[: rows * queries].exponential_()
        way = self._way(drafts)
        self._waited = self._waited + 1 if way == "waits" else 0
        self.graphs.run(Kind(queries, way), self._choose)
        if self.paths is not None and self.tree and queries > 1:
            self.paths.run(queries, self._move)

    def _way(self, drafts: bool) -> Way:
        """Of the next choice. drafts: will its drafts be verified?"""
        if self._head is None:
            return ""
        if not drafts:
            return "waits" if self._waited < PROBE - 1 else "reads"
        return "late" if self._waited else "drafts"

    def send(self, draft: Draft | None) -> None:
        """Send the news of the choice to the host. draft: proposes tokens that are not looked up;
        None: none does, or it is not asked in this round."""
        if draft is None:
            self._missed += 1
        else:
            self._propose(draft)
        self._host.copy_(self._news, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._news.device))

    def news(self) -> News:
        """Of the last choice. Waits for it, but not for work after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows, queries = self.choice.rows, self._queries
        offered, unfinished = self._host[: 2 * rows].view(2, rows).tolist()
        each = self._got(self._host, queries).tolist()
        counts = [count for count, *_ in each]
        tokens = [found[:count] for count, *found in each]
        return News(counts, tokens, max(offered), not any(unfinished))

    def _got(self, news: Tensor, queries: int) -> Tensor:
        """`[B, 1 + N]`: how many tokens each row got, and these."""
        rows = self.choice.rows
        return news[2 * rows : rows * (3 + queries)].view(rows, 1 + queries)

    def texts(self) -> Tensor:
        """int64 `[B, S]`: the texts, padded on the right to the longest. The host waits for its
        length."""
        with ordinary():
            texts = self.tokens[:, : int(self.seq_lens.max())]
            columns = torch.arange(texts.shape[1], device=texts.device)
            return torch.where(columns < self.seq_lens[:, None], texts, self._pad)

    def _parents(self, queries: int) -> Tensor | None:
        return None if self.paths is None else self.paths.parents[:, :queries]

    def _path(self, queries: int) -> Tensor:
        """int32 `[B, N]`: the tokens of the input that each row keeps, in order, and -1 beyond."""
        return self._accepted[: self.choice.rows * queries].view(-1, queries)

    def _move(self, queries: int) -> None:
        assert self.paths is not None
        counts = self._got(self._news, queries)[:, 0]
        self.paths.move(self._path(queries), self.stored - counts)

    def _choose(self, kind: Kind) -> None:
        queries = kind.queries
        target, news = self._chosen(queries), self._got(self._news, queries)
        advance_rows(
            self._drafts[:, :queries],
            target,
            self._eos,
            self._most,
            self._parents(queries),
            tokens=self.tokens,
            seq_lens=self.seq_lens,
            stored=self.stored,
            position=self._position,
            unfinished=self._unfinished,
            accepted=self._path(queries),
            news=news,
        )
        found = self._drafted(kind, news[:, 0])
        self._draft(found.tokens)
        if found.parents is not None:
            self._branch(found.parents)

    def _drafted(self, kind: Kind, counts: Tensor) -> Proposal:
        """What may follow the last token of each row. It has no token where an object drafts later,
        or nothing does. counts: int64 `[B]`, the tokens that each row has got."""
        drafts, max_ngram = self.form[:2]
        if self._head is not None:
            return self._of_head(self._head, kind, counts)
        if max_ngram:
            drafted, _ = lookup_drafts(
                self.tokens, self.seq_lens, max_ngram=max_ngram, num_drafts=drafts
            )
            return Proposal(drafted)
        return Proposal(self.tokens[:, :0])

    def _read(self, head: Drafts, queries: int) -> int:
        """The states of each row that the head may have to read of a step of so many tokens."""
        if queries == 1 or not self.form.levels:
            return queries
        path = self._path(queries)[:, : self.form.levels + 1]
        head.waiting.follow(path)
        return path.shape[1]

    def _of_head(self, head: Drafts, kind: Kind, counts: Tensor) -> Proposal:
        """As `_drafted`."""
        queries, late = self._read(head, kind.queries), kind.way == "late"
        if kind.way in ("drafts", "late"):
            return head.propose(self.tokens, counts, self.stored, queries, late)
        if kind.way == "waits":
            head.waiting.wait(queries, counts, self.stored)
        else:
            pairs = head.waiting.pairs(self.tokens, counts, self.stored, queries, late=True)
            head.read(pairs.tokens, pairs.states, pairs.batch)
        return Proposal(self.tokens[:, :0])

    def _chosen(self, queries: int) -> Tensor:
        """int64 `[B, N]`: the token that the model chooses after each token of the input."""
        rows = self.choice.rows
        scores = self._scores[: rows * queries]
        lengths = self._lengths[: rows * queries]
        if any(isinstance(each, Held) for each in self._processors):
            depths = self._columns if self.paths is None else self.paths.depths
            at = self.seq_lens[:, None] + depths[..., :queries]
            lengths.copy_(at.reshape(-1, 1))
        penalised = any(type(each) is RepetitionPenaltyLogitsProcessor for each in self._processors)
        # The others do not look at tokens.
        before = self._before(queries) if penalised else self.tokens
        for processor in self._processors:
            if isinstance(processor, Held):
                processor.length = lengths
            scores = processor(before, scores)
        if self._noise is None:
            chosen = torch.argmax(scores, dim=-1)
        else:
            chosen = drawn(torch.softmax(scores, dim=-1), self._noise[: rows * queries])
        return chosen.view(rows, queries)

    def _before(self, queries: int) -> Tensor:
        """int64 `[B * N, L]`: the text of each row, and the nodes on the way to each of its nodes.
        The root, which is one of them, stands where there is nothing."""
        nodes, columns = self.input[:, :queries], self._columns[:queries]
        written = torch.arange(self.tokens.shape[1], device=nodes.device) < self.seq_lens[:, None]
        text = torch.where(written, self.tokens, nodes[:, :1])
        on_way = columns[:, None] >= columns
        if self.paths is not None:
            on_way = self.paths.seen[:, :queries, :queries]
        ways = torch.where(on_way, nodes[:, None], nodes[:, :1, None])
        return torch.cat((text[:, None].expand(-1, queries, -1), ways), 2).flatten(0, 1)

    def _draft(self, drafted: Tensor) -> None:
        """Make the next input: the last token of each row, and what was drafted, int64 `[B, K]`."""
        next_inputs(
            drafted,
            self.tokens,
            self.seq_lens,
            self._position,
            # The model may have no more positions. What is drafted behind the text is not accepted.
            self._last,
            words=self.choice.vocab,
            drafts=self._drafts,
            next_ids=self.input,
            positions=self.positions,
            offered=self._offered,
        )

    def _propose(self, draft: Draft) -> None:
        missed, self._missed = self._missed, 0
        proposal = draft.propose(DraftState(self.tokens, self.seq_lens, missed=missed))
        given, parents = proposal.probabilities, proposal.parents
        want = "None: generate() verifies drafts without probabilities"
        need(given is None, "proposal.probabilities", type(given).__name__, want)
        want = "None for a model with states of linear attention, which follow one chain"
        need(parents is None or not self._chained, "proposal.parents", "a tree", want)
        self._draft(proposal.checked(self.choice.rows, self.choice.vocab).tokens)
        if self.paths is None or not (self.tree or parents is not None):
            return
        self.tree = parents is not None
        self._branch(parents)

    def _branch(self, parents: Tensor | None) -> None:
        """Make the drafts of the next input a tree. parents: as of a `Proposal`."""
        assert self.paths is not None
        self.paths.take(parents)
        at = self._position[:, None] + self.paths.depths
        self.positions.copy_(torch.minimum(at, self._last[:, None]))
