"""`ChainDrafts`: chains of greedy tokens, each of a step of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.hf.steps.heads import Steps
from attnops.nn import Proposal


class ChainDrafts:
    """See `heads.Drafts`."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self.waiting = steps, steps.waiting

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`."""
        self._steps.read(tokens, states, batch)

    def propose(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool
    ) -> Proposal:
        """As `Drafts.propose`."""
        drafts, waiting = self._steps.head.num_drafts, self.waiting
        pairs = waiting.pairs(texts, counts, stored, queries, late)
        token, state = self._next(*pairs)
        found = [token]
        for batch in waiting.steps(stored, drafts - 1) if drafts > 1 else ():
            token, state = self._next(token, state, batch)
            found.append(token)
        return Proposal(torch.stack(found, 1))

    def _next(
        self, tokens: Tensor, states: Tensor, batch: PagedBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the likeliest words of the target, int64 `[R]`; the head's states `[R, E]`)."""
        logits, state = self._steps(tokens, states, batch, rows)
        return self._steps.head.to_target(logits.argmax(-1)), state
