"""`DFlash`: what DFlash's block drafts read of a model, and the block that one drafts in a
round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.problem import Problem
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.head_calls import Calls
from attnops.hf.steps.heads import Drafts, layers_of, weights_of, why_not
from attnops.hf.steps.waiting import Room, Waiting
from attnops.nn import DFlashHead, Proposal
from attnops.ops.pages.plan import paged_layers


@dataclass(frozen=True)
class DFlash:
    """See `heads.Head`."""

    module: DFlashHead
    levels: int = 0

    @property
    def num_drafts(self) -> int:
        return self.module.num_drafts

    @property
    def width(self) -> int:
        return self.module.fc.in_features

    @property
    def layers(self) -> tuple[Problem, ...]:
        """Their pages keep the whole text, as those of layers without windows do: a block is
        written behind it and forgotten."""
        core, dtype = self.module.attention, self.module.fc.weight.dtype
        one = paged_layers(core.num_heads, core.num_kv_heads, core.head_dim, 0, dtype)
        return (one,) * len(self.module.layers)

    def sources(self, owner: Any) -> tuple[nn.Module, ...]:
        return layers_of(owner, self.module.states)

    def against(self, owner: Any) -> str:
        head = self.module
        if owner.get_output_embeddings() is None:
            return f"its logits are by the model's last linear, and {type(owner).__name__} has none"
        return why_not(head.fc.weight, owner, head.vocab_size, head.hidden_size, head.states)

    def weights(self, owner: Any) -> float:
        """It runs once a round, and so does the last linear of the target."""
        return weights_of(self.module) + weights_of(owner.get_output_embeddings())

    def drafts(self, owner: Any, passes: Passes, room: Room) -> Drafts:
        return Blocks(self, owner, passes, room)


class Blocks:
    """See `heads.Drafts`. A round reads the states that wait and drafts a block in one call."""

    def __init__(self, head: DFlash, owner: Any, passes: Passes, room: Room) -> None:
        module = head.module
        weight = module.fc.weight
        self._module, self._calls = module, Calls(module, passes)
        self._embed = owner.get_input_embeddings()
        self._last_linear = owner.get_output_embeddings()
        self.waiting = Waiting(room, head.width, head.layers, weight.device, weight.dtype)
        keys, values = zip(*self.waiting.pages.layers, strict=True)
        self._pages = {"k_pages": keys, "v_pages": values}

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`. A pair's state is that of its own position, so that keys and values
        need no token."""
        with self._calls.uncast():
            self._module.read(states, batch=batch, **self._pages)

    def propose(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool
    ) -> Proposal:
        """As `Drafts.propose`."""
        waiting, length = self.waiting, stored - self.waiting.base
        tokens, states, context, last = waiting.pairs(texts, counts, stored, queries, late)
        # What is behind the text would lie where the block does.
        is_text = context.positions.view(len(length), -1) < length[:, None]
        slots = torch.where(is_text.flatten(), context.slots, -1)
        where = {
            "embeddings": self._embed.weight,
            "context": replace(context, slots=slots),
            "batch": waiting.behind(length, self._module.block_size),
            **self._pages,
        }
        hidden = self._calls((tokens[last], states), where)
        with self._calls.uncast():
            logits: Tensor = self._last_linear(hidden)
        return Proposal(logits.argmax(-1))
