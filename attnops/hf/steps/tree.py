"""`TreeDrafts`: trees of the likeliest words, each of whose levels takes a step of a head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.cache.step import Tokens
from attnops.hf.steps.heads import Steps
from attnops.nn import DraftTree, Proposal
from attnops.ops import build_tree


class TreeDrafts:
    """See `heads.Drafts`. The trees of EAGLE-2, https://arxiv.org/abs/2406.16858: candidates of a
    level are the k likeliest words after each of the k best candidates of the level before, and the
    best candidates of all levels are the tree. Their values are the products of the probabilities
    on their ways.

    The keys of candidates that are followed lie behind the pairs in the head's pages, level after
    level. Later pairs replace them.
    """

    def __init__(self, steps: Steps, tree: DraftTree, rows: int) -> None:
        self._steps, self.waiting = steps, steps.waiting
        self._rows, self._top, self._drafts = rows, tree.top_k, tree.nodes - 1
        self._followed = tree.depth - 1  # levels
        self._keep(tree, self.waiting.base.device)

    def _keep(self, tree: DraftTree, device: torch.device) -> None:
        """Make the numbers that no round changes, so that none computes them."""
        pages, rows, top, levels = self.waiting.pages, self._rows, self._top, self._followed
        first_of = [0, *(top + level * top**2 for level in range(levels))][:levels]

        def numbers(most: int) -> Tensor:
            return torch.arange(most, device=device)

        with ordinary():
            self._keys = numbers(pages.tables[0].shape[1] * pages.page_size)
            self._first = numbers(rows)[:, None] * top
            self._all = numbers(top).repeat(rows, 1)
            # Of the steps over followed candidates, [levels, 1 | B, k].
            self._places = numbers(levels * top).view(levels, 1, top)
            self._depths = self._places // top
            self._owner = self._first.expand(levels, rows, top).flatten() // top
            self._starts = (numbers(rows + 1) * top).to(torch.int32)
            # Of the root and the followed candidates: the number of the first one of its level.
            self._root = self._all[:, :1] - 1
            self._levels = torch.tensor([0, *(n for n in first_of for _ in range(top))]).to(device)
            # Of a candidate: which of those it comes after.
            after = numbers(levels * top**2) // top + 1
            self._after = torch.cat([torch.zeros_like(self._all[0]), after])

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`."""
        self._steps.read(tokens, states, batch)

    def propose(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool
    ) -> Proposal:
        """As `Drafts.propose`."""
        pairs = self.waiting.pairs(texts, counts, stored, queries, late)
        logits, states = self._steps(*pairs)
        rows, top, length = self._rows, self._top, stored - self.waiting.base
        scores, words = self._likeliest(logits)
        candidates = [(words, scores)]
        states = states[:, None].expand(-1, top, -1).flatten(0, 1)
        seen = self._keys < length[:, None, None].expand(-1, top, 1)
        followed, best = [self._root], self._all
        for batch, places in self._batches(length):
            followed.append(best)
            seen = seen.scatter(2, places, True)
            tokens = self._steps.head.to_target(words).flatten()
            logits, states = self._steps(tokens, states, batch, None, seen.flatten(0, 1))
            further, words = self._likeliest(logits)
            further = (further.view(rows, top, top) + scores[..., None]).flatten(1)
            candidates.append((words.view(rows, -1), further))
            if len(followed) <= self._followed:
                scores, best = further.topk(top, sorted=False)
                before = best // top
                words = candidates[-1][0].gather(1, best)
                states = states[(self._first + before).flatten()]
                seen = seen.gather(1, before[..., None].expand_as(seen))
        return self._best(candidates, followed, pairs.tokens[pairs.last])

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(the logarithms of their probabilities float32, the words int64, both `[R, k]`)."""
        words = logits.topk(self._top, sorted=False).indices
        return torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, words), words

    def _batches(self, length: Tensor) -> Iterator[tuple[PagedBatch, Tensor]]:
        """Of each step over followed candidates (its batch; the keys that it writes, int64
        `[B, k, 1]`), all of them at the price of one. length: int64 `[B]`, of the pairs."""
        if not self._followed:
            return
        keys, positions = (length[:, None] + each for each in (self._places, self._depths))
        lengths = (keys[..., -1] + 1).to(torch.int32)
        tokens = Tokens(keys.flatten(), self._owner, self._starts, self._top)
        batch = self.waiting.pages.describe(tokens, self._rows, lengths[0])
        slots = batch.slots.view_as(keys)
        for level in range(self._followed):
            # Candidates of a level have one position, wherever their keys are.
            own = replace(
                batch,
                seq_lens=lengths[level],
                slots=slots[level].flatten(),
                positions=positions[level].flatten(),
            )
            yield own, keys[level, ..., None]

    def _best(
        self, candidates: list[tuple[Tensor, Tensor]], followed: list[Tensor], root: Tensor
    ) -> Proposal:
        """candidates: of each level (words int64, values float32, both `[B, C]`). followed: int64
        `[B, F]`, those of its levels, by their number in a level."""
        words, scores = (torch.cat(each, 1) for each in zip(*candidates, strict=True))
        numbers = torch.cat(followed, 1) + self._levels
        parents = numbers.index_select(1, self._after).to(torch.int32)
        tokens, parents, *_ = build_tree(
            self._steps.head.to_target(words), scores, parents, root, num_nodes=self._drafts + 1
        )
        return Proposal(tokens[:, 1:], parents[:, 1:] - 1)
