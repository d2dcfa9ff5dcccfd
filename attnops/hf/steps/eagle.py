"""`Eagle`: what EAGLE-3 heads read of a model, and how one of their steps is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.problem import Problem
from attnops.hf.steps.chain import ChainDrafts
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.head_calls import Call
from attnops.hf.steps.heads import Around, Drafts, Steps, layers_of, weights_of, why_not
from attnops.hf.steps.round_kinds import TOKEN
from attnops.hf.steps.tree import TreeDrafts
from attnops.hf.steps.waiting import Room
from attnops.nn import DraftTree, Eagle3Head
from attnops.ops.pages.plan import paged_layers


@dataclass(frozen=True)
class Eagle:
    """See `heads.Head`. It drafts few tokens, because each one costs a step of the head.

    tree: how it drafts trees; None: it drafts chains.
    """

    module: Eagle3Head
    tree: DraftTree | None = None

    @property
    def num_drafts(self) -> int:
        return 5 if self.tree is None else self.tree.nodes - 1

    @property
    def levels(self) -> int:
        return 0 if self.tree is None else self.tree.depth

    @property
    def width(self) -> int:
        return self.module.fc.in_features

    @property
    def layers(self) -> tuple[Problem, ...]:
        core, weight = self.module.midlayer.self_attn.attention, self.module.fc.weight
        return (paged_layers(core.num_heads, core.num_kv_heads, core.head_dim, 0, weight.dtype),)

    def states_of(self, layers: int) -> tuple[int, ...]:
        """The numbers of the `hidden_states` of a target of so many layers that the head reads."""
        return self.module.states or (2, layers // 2, layers - 3)

    def sources(self, owner: Any) -> tuple[nn.Module, ...]:
        return layers_of(owner, self._states(owner))

    def against(self, owner: Any) -> str:
        head, width = self.module, owner.get_input_embeddings().weight.shape[1]
        words, states = head.draft_vocab_size, self._states(owner)
        sizes = head.vocab_size, head.target_hidden_size
        if why := why_not(head.fc.weight, owner, *sizes, states):
            return why
        if head.embed_tokens is None and head.hidden_size != width:
            want, model = f"{head.hidden_size} numbers", type(owner).__name__
            return f"it has no embeddings, and wants {want} of a token where {model} has {width}"
        if self.tree is not None and self.tree.top_k > words:
            return f"its trees take the {self.tree.top_k} likeliest of {words} words; want no more"
        return ""

    def _states(self, owner: Any) -> tuple[int, ...]:
        return self.states_of(owner.config.get_text_config().num_hidden_layers)

    def arguments(
        self, tokens: Tensor, states: Tensor, batch: PagedBatch, rows: Tensor | None, around: Around
    ) -> Call:
        head = self.module
        given = tokens if head.embed_tokens is not None else around.embed(tokens)
        keys, values = around.pages.layers[0]
        where = {"rows": rows, "batch": batch, "k_pages": keys, "v_pages": values}
        return (given, states), where

    def to_target(self, words: Tensor) -> Tensor:
        return self.module.to_target(words)

    def weights(self, owner: Any) -> float:
        if self.tree is None:
            return self.num_drafts * weights_of(self.module)
        level = 1 + TOKEN * (self.tree.top_k - 1)
        return self.tree.depth * level * weights_of(self.module)

    def drafts(self, owner: Any, passes: Passes, room: Room) -> Drafts:
        embed = owner.get_input_embeddings()
        if self.tree is None:
            return ChainDrafts(Steps(self, embed, passes, room))
        # What it follows is in its pages behind the text.
        length = room.length + (self.tree.depth - 1) * self.tree.top_k
        steps = Steps(self, embed, passes, room._replace(length=length))
        return TreeDrafts(steps, self.tree, room.rows)
