"""`Round`: what follows the model in a step that verifies drafts, from logits to the next drafts,
as one captured graph for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnops.cache.paged import ordinary
from attnops.core.record import need
from attnops.graphs.cuda_graphs import Device
from attnops.graphs.streams import LastStream
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.calls import StepInputs
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.hf.steps.eligibility import Asked
from attnops.hf.steps.heads import HeadDrafts
from attnops.hf.steps.hidden import Outputs, Read
from attnops.hf.steps.paths import Paths
from attnops.hf.steps.sampler_graph import Choice, Held, drawn, follow, ours_of
from attnops.nn import Draft, DraftState, Eagle3Head
from attnops.ops import accept, lookup_drafts


class Form(NamedTuple):
    """What graphs of rounds are made for.

    drafts: tokens that are drafted at most. max_ngram: of the longest text that is looked up in the
    row's own; 0: others draft. head: a draft head that does. trees: may they draft trees?
    """

    drafts: int = 7
    max_ngram: int = 3
    head: Eagle3Head | None = None
    trees: bool = False

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens of a row that a round may verify. The first is known. The others are no drafts,
        half of them, or all."""
        return tuple(sorted({1, 1 + (self.drafts + 1) // 2, 1 + self.drafts}))


class News(NamedTuple):
    """Of a round, on the host.

    counts: the tokens that each row got. tokens: those tokens, by row.
    offered: the most tokens that were drafted for a row next. done: is every row finished?
    """

    counts: list[int]
    tokens: list[list[int]]
    offered: int
    done: bool


class Round:
    """The texts of one `generate()` at a time, and the graphs that accept, append and draft.

    A row gets the tokens that the model chose as far as the drafts agree, and the one behind
    them. That is what plain decoding would choose, and of samples one of equal probability: a draft
    without probabilities is right with the probability that the model gives it.

    tokens: int64 `[B, room]`, the texts. What is behind `seq_lens` int32 `[B]` has no meaning.
    input, positions: int64 `[B, N]`, of the next step: the last token, and drafts.
    stored: int64 `[B]`, the tokens of each row that the pages keep.
    tree: is the next input a tree?
    """

    def __init__(
        self, choice: Choice, processors: Sequence[Callable[..., Any]], embed: nn.Module
    ) -> None:
        """embed: the embeddings of the model."""
        self.choice, self.form = choice, choice.drafts or Form()
        rows, most, device = choice.rows, self.form.depths[-1], choice.device
        self._far = device.type == "cuda"

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        with ordinary():
            self._scores = torch.zeros(rows * most, choice.vocab, device=device)
            # Drawn before a replay, as `Tail` does.
            self._noise = torch.ones_like(self._scores) if choice.sampled else None
            self.tokens = ints(rows, choice.room + most)
            self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.stored, self._position, self._unfinished = ints(rows), ints(rows), ints(rows)
            self._drafts, self.input, self.positions = (ints(rows, most) for _ in range(3))
            self._eos, self._pad, self._most = ints(choice.ends), ints(), ints()
            self._last = ints(rows)  # the last position that plain decoding computes
            self._columns = torch.arange(most, device=device)
            self._lengths = ints(rows * most, 1)
            self._processors = ours_of(processors, device, self._lengths)
            self._news = ints(rows + rows * most + 2)
            self._head: HeadDrafts | None = None
            if (head := self.form.head) is not None:
                self._head = HeadDrafts(head, embed, rows, choice.room + most, most)
            self._host = torch.zeros(len(self._news), dtype=torch.int64, pin_memory=self._far)
        self.paths = Paths(rows, most, device) if self.form.trees else None
        self._stream = LastStream(device, self._tensors())
        self._arrived = torch.cuda.Event() if self._far else None
        self.graphs = ChoiceGraphs()
        self.tree = False
        self._device: Device | None = None
        self._queries = 1

    def _tensors(self) -> tuple[Tensor, ...]:
        """Its buffers, without those of its processors."""
        noise = () if self._noise is None else (self._noise,)
        rows = self.stored, self._position, self._last, self._unfinished, self.seq_lens
        steps = self._drafts, self.input, self.positions, self._lengths
        numbers = self._eos, self._pad, self._most, self._news
        trees = () if self.paths is None else self.paths.tensors
        return self._scores, *noise, self.tokens, *rows, *steps, *numbers, *trees

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers and of its graphs."""
        head = 0 if self._head is None else self._head.nbytes
        paths = 0 if self.paths is None else self.paths.nbytes
        return head + paths + self.graphs.nbytes + sum(each.nbytes for each in self._tensors())

    def capture(self, device: Device) -> None:
        """Capture the graphs, before `begin`."""
        self._stream.use()
        self._device = device
        self.graphs.capture(device, self.form.depths[::-1], self._clear, self._choose)

    def _clear(self) -> None:
        for each in self._tensors():
            each.fill_(int(each is self._noise))

    def over(self, pages: ModelPages) -> None:
        """Take the pages of the next prompt."""
        self._stream.use()
        if self.paths is not None:
            assert self._device is not None
            self.paths.use(pages, self._device)

    def begin(self, asked: Asked, padding: Tensor, stored: Tensor, read: Sequence[Read]) -> None:
        """Take a prompt. padding, stored: int64 `[B]`, of each row in the pages. read: the hidden
        states of the prompt, for a head."""
        self._stream.use()
        self.tree = False
        ids, eos = asked.input_ids, asked.eos
        length = ids.shape[1]
        self.tokens[:, :length].copy_(ids)
        self.seq_lens.fill_(length)
        # The prompt has verified its last token, as a round does its first.
        self.stored.copy_(stored - 1)
        self._position.copy_(asked.given["position_ids"][:, -1])
        self._last.copy_(self._position + (asked.max_length - 1 - length))
        self._unfinished.fill_(1)
        self._most.fill_(asked.max_length)
        if eos:
            self._eos.copy_(torch.cat([each.reshape(-1).to(self._eos.device) for each in eos]))
            self._pad.copy_(asked.config._pad_token_tensor)
        for ours, theirs in zip(self._processors, asked.processors, strict=True):
            follow(ours, theirs)
        if self._head is not None:
            self._head.begin(read, ids, padding - (asked.columns - length), stored)

    def step(self, queries: int) -> StepInputs:
        """What a step over the first so many tokens of the next input is called with."""
        parents = None
        if self.tree and queries > 1:
            assert self.paths is not None
            parents = self.paths.parents[:, :queries]
        return StepInputs(
            self.input[:, :queries], self.positions[:, :queries], self.stored, parents
        )

    def choose(self, out: Outputs) -> None:
        """Append to each row what the model chose, and draft. out: of a step with the tokens of the
        last `input`, or after the last of a prompt. `send` follows."""
        logits = out.logits
        rows, queries = self.choice.rows, logits.shape[1]
        if self._head is not None and out.hidden is not None:
            self._head.take(out.hidden)
        self._queries = queries
        self._scores[: rows * queries].copy_(logits.reshape(rows * queries, -1))
        if self._noise is not None:
            self._noise[: rows * queries].exponential_()
        self.graphs.run(queries, self._choose)
        if self.tree and queries > 1:
            assert self.paths is not None
            self.paths.move(queries)

    def send(self, draft: Draft | None) -> None:
        """Send the news of the choice to the host. draft: proposes tokens that are not looked
        up."""
        if draft is not None:
            self._propose(draft)
        self._host.copy_(self._news, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._news.device))

    def news(self) -> News:
        """Of the last choice. Waits for it, but not for work after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows, queries = self.choice.rows, self._queries
        unfinished, offered, *rest = self._host[: 2 + rows + rows * queries].tolist()
        counts, tokens = rest[:rows], rest[rows:]
        each = [tokens[b * queries : b * queries + n] for b, n in enumerate(counts)]
        return News(counts, each, offered, not unfinished)

    def texts(self) -> Tensor:
        """int64 `[B, S]`: the texts, padded on the right to the longest. The host waits for its
        length."""
        with ordinary():
            texts = self.tokens[:, : int(self.seq_lens.max())]
            columns = torch.arange(texts.shape[1], device=texts.device)
            return torch.where(columns < self.seq_lens[:, None], texts, self._pad)

    def _choose(self, queries: int) -> None:
        target, accepted = self._accepted(self._chosen(queries))
        counts = self._counted(target, accepted)
        columns = self._columns[:queries]
        at = self.seq_lens[:, None] + columns
        # Those behind the counts are written again by the next round.
        self.tokens.scatter_(1, at, target)
        last = target.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        last = torch.where(counts > 0, last, self.input[:, 0])
        for each in (self.seq_lens, self.stored, self._position):
            each.add_(counts)
        self._draft(last, target, counts)
        offered = (self._drafts[:, 1:] >= 0).sum(1).amax()
        torch.cat(
            (self._unfinished.amax()[None], offered[None], counts, target.reshape(-1)),
            out=self._news[: 2 + counts.numel() + target.numel()],
        )

    def _chosen(self, queries: int) -> Tensor:
        """int64 `[B, N]`: the token that the model chooses after each token of the input."""
        rows = self.choice.rows
        scores = self._scores[: rows * queries]
        lengths = self._lengths[: rows * queries]
        depths = self._columns if self.paths is None else self.paths.depths
        at = self.seq_lens[:, None] + depths[..., :queries]
        lengths.copy_(at.reshape(-1, 1))
        seen = self.input[:, :queries].reshape(-1, 1)
        for processor in self._processors:
            if isinstance(processor, Held):
                processor.length = lengths
            scores = processor(seen, scores)
        if self._noise is None:
            chosen = torch.argmax(scores, dim=-1)
        else:
            chosen = drawn(torch.softmax(scores, dim=-1), self._noise[: rows * queries])
        return chosen.view(rows, queries)

    def _accepted(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """(the chosen tokens `[B, N]` along the way of those that are accepted, how many drafts of
        each row are accepted `[B]`)."""
        drafts = self._drafts[:, : target.shape[1]].contiguous()
        if self.paths is None:
            return target, accept(drafts, target)[1]
        path, accepted, _ = accept(drafts, target, self.paths.of(drafts.shape[1]))
        self.paths.note(path, self.stored)
        return target.gather(1, path.clamp(min=0).long()), accepted

    def _counted(self, target: Tensor, accepted: Tensor) -> Tensor:
        """int64 `[B]`: how many of the chosen tokens `[B, N]` each row gets. Rows that end are
        finished. accepted: drafts of each row."""
        queries, columns = target.shape[1], self._columns[: target.shape[1]]
        counts = torch.minimum(accepted + 1, self._most - self.seq_lens)
        if self.choice.ends:
            ends = (target[..., None] == self._eos).any(-1)
            first = torch.where(ends, columns + 1, queries + 1).amin(1)
            counts = torch.minimum(counts, first)
        counts = counts * self._unfinished
        full = self.seq_lens + counts >= self._most
        ended = full | (first <= counts) if self.choice.ends else full
        self._unfinished.mul_(~ended)
        return counts

    def _draft(self, last: Tensor, target: Tensor, counts: Tensor) -> None:
        """Make the next input: the last token int64 `[B]` of each row, and its drafts. counts: so
        many of `target` `[B, N]` each row has got."""
        self._drafts[:, 0].copy_(last)
        drafts, max_ngram = self.form[:2]
        if self._head is not None:
            self._drafts[:, 1:].copy_(self._head.propose(target, counts, self.stored, drafts))
        if max_ngram:
            found = lookup_drafts(
                self.tokens, self.seq_lens, max_ngram=max_ngram, num_drafts=drafts
            )
            self._drafts[:, 1:].copy_(found[0])
        self.input.copy_(self._drafts.clamp(min=0))
        # The model may have no more positions. What is drafted behind the text is not accepted.
        at = self._position[:, None] + self._columns
        self.positions.copy_(torch.minimum(at, self._last[:, None]))

    def _propose(self, draft: Draft) -> None:
        proposal = draft.propose(DraftState(self.tokens, self.seq_lens))
        given = proposal.probabilities
        want = "None: generate() verifies drafts without probabilities"
        need(given is None, "proposal.probabilities", type(given).__name__, want)
        proposal = proposal.checked(self.choice.rows, self.choice.vocab)
        tokens = proposal.tokens[:, : self.form.drafts]
        self._drafts[:, 1:].fill_(-1)
        self._drafts[:, 1 : 1 + tokens.shape[1]].copy_(tokens)
        self.input.copy_(self._drafts.clamp(0, self.choice.vocab - 1))
        self._news[1].copy_((tokens >= 0).sum(1).amax())
        self.tree = proposal.parents is not None
        if self.paths is not None:
            self.paths.take(proposal.parents)
            at = self._position[:, None] + self.paths.depths
            self.positions.copy_(torch.minimum(at, self._last[:, None]))
