"""`Eagle`: what EAGLE-3 heads read of a model, and how one of their steps is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.problem import Problem
from attnops.hf.steps.chain import ChainDrafts
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.heads import Around, Call, Drafts, Steps
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
        layers = owner.get_decoder().layers
        numbers = self.states_of(len(layers))
        return tuple(layers[n - 1] if n else owner.get_input_embeddings() for n in numbers)

    def against(self, owner: Any) -> str:
        embed = owner.get_input_embeddings().weight
        layers = owner.config.get_text_config().num_hidden_layers
        head, width = self.module, embed.shape[1]
        weight, model = head.fc.weight, type(owner).__name__
        if head.vocab_size != embed.shape[0]:
            return f"it has {head.vocab_size} words and {model} has {embed.shape[0]}; want as many"
        if head.target_hidden_size != width:
            got = f"it reads states of {head.target_hidden_size} numbers"
            return f"{got}, and those of {model} have {width}"
        if head.embed_tokens is None and head.hidden_size != width:
            want = f"{head.hidden_size} numbers"
            return f"it has no embeddings, and wants {want} of a token where {model} has {width}"
        if not isinstance(getattr(owner.get_decoder(), "layers", None), nn.ModuleList):
            got = "it reads states of decoder layers"
            return f"{got}, and {model} has no list of them named layers"
        if (weight.device, weight.dtype) != (embed.device, embed.dtype):
            ours, theirs = (f"{t.dtype} on {t.device}" for t in (weight, embed))
            return f"it is {ours}, and {model} {theirs}; want the same"
        numbers = self.states_of(layers)
        if not all(0 <= number < layers for number in numbers):
            return f"it reads the states {numbers}, and {model} has {layers} layers"
        words = head.draft_vocab_size
        if self.tree is not None and self.tree.top_k > words:
            return f"its trees take the {self.tree.top_k} likeliest of {words} words; want no more"
        return ""

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

    def drafts(self, embed: nn.Module, passes: Passes, room: Room) -> Drafts:
        if self.tree is None:
            return ChainDrafts(Steps(self, embed, passes, room))
        # What it follows is in its pages behind the text.
        length = room.length + (self.tree.depth - 1) * self.tree.top_k
        steps = Steps(self, embed, passes, room._replace(length=length))
        return TreeDrafts(steps, self.tree, room.rows)
