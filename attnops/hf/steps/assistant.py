"""`Assistant`: a small transformers model that drafts the tokens of a larger one, over pages of its
own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.adapters.handle import MARK
from attnops.hf.cache.idle_pages import give_back
from attnops.hf.cache.names import named
from attnops.hf.steps.calls import StepInputs, plain_verify
from attnops.hf.steps.eligibility import Asked
from attnops.nn import DraftState, Proposal


class Assistant:
    """The draft of one `generate()`: greedy tokens of a model with the same words.

    model: patched, with graphs or without. drafts: tokens that it proposes.
    """

    def __init__(self, model: Any, drafts: int) -> None:
        self.model, self.drafts = model, drafts
        self._paged = vars(model)[MARK]._paged
        self._cache: Any = None
        self._padding = self._length = self._drafted = torch.empty(0)

    def begin(self, asked: Asked, room: int) -> None:
        """Read the prompt. room: tokens of a text, prompt and drafts included."""
        ids, given = asked.input_ids, asked.given
        rows = ids.shape[0]
        self._cache = self._paged.lend_early(rows, room, self.drafts + 1)
        mask = given.get("attention_mask")
        self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=given["position_ids"],
            use_cache=True,
            logits_to_keep=1,
            **named(self._cache),
        )
        self._padding = self._cache.state.pages.pad[:rows].clone()
        # The pages hold a text of this length, and what was drafted behind it.
        self._length = torch.full_like(self._padding, ids.shape[1])
        self._drafted = ids.new_full((rows, self.drafts), -1)

    def propose(self, state: DraftState) -> Proposal:
        """Greedy tokens. One step more than tokens, so that the pages hold all of them."""
        if state.missed:
            self._catch_up(state)
        ids = _tokens_at(state, state.seq_lens[:, None] - 1)
        stored = state.seq_lens - 1 - self._padding
        found = list[Tensor]()
        for _ in range(self.drafts + 1):
            logits = self._step(StepInputs(ids, stored[:, None], stored))
            ids, stored = logits[:, -1:].argmax(-1), stored + 1
            found.append(ids)
        self._length, self._drafted = state.seq_lens.long(), torch.cat(found[:-1], 1)
        return Proposal(self._drafted)

    def _catch_up(self, state: DraftState) -> None:
        """Read the tokens that each row got in the rounds without a proposal. A step has as many
        of each row; what is behind the text is read as drafts are, which others replace."""
        columns = torch.arange(self.drafts + 1, device=state.tokens.device)
        at = self._length[:, None] + columns
        agrees = _tokens_at(state, at)[:, :-1] == self._drafted
        held = self._length + agrees.cumprod(1).sum(1)
        for _ in range(0, state.missed, self.drafts + 1):
            held = torch.minimum(held, state.seq_lens - 1)
            at, stored = held[:, None] + columns, held - self._padding
            self._step(StepInputs(_tokens_at(state, at), at - self._padding[:, None], stored))
            held = held + self.drafts + 1

    def _step(self, asks: StepInputs) -> Tensor:
        decoder = self._paged.decoder()
        out = decoder.try_step(asks, self._cache)
        if out is None:
            out = plain_verify(self.model, decoder.forward, asks, self._cache)
        logits: Tensor = out.logits
        return logits

    def end(self) -> None:
        """Give its pages back."""
        if self._cache is not None:
            give_back(self._cache)
            self._cache = None


def _tokens_at(state: DraftState, at: Tensor) -> Tensor:
    """The tokens of each row at the places `[B, N]`, the last of its buffer for those behind."""
    return state.tokens.gather(1, at.long().clamp(max=state.tokens.shape[1] - 1))
