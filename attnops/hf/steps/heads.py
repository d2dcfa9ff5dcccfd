"""Draft heads as the rounds of `generate()` use them: modules that read hidden states of a target
and propose tokens, over pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.problem import Problem
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.waiting import Room, Waiting

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, by place and by name."""


class Drafts(Protocol):
    """What a head drafts in the calls of one model, a call at a time.

    waiting: the states that it has not read, and its pages.
    """

    waiting: Waiting

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """Read pairs of a prompt, packed: int64 `[T]`, and `[T, W]` of the tokens before them."""
        ...

    def propose(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool
    ) -> Tensor:
        """int64 `[B, num_drafts]`: what may follow the last token of each row.

        texts: int64 `[B, L]`. counts, stored, queries: as in `Waiting.wait`. late: have states
        waited?
        """
        ...


class Head(Protocol):
    """A kind of head, with one of its modules. Equal ones share graphs.

    module: the weights.
    num_drafts: tokens that it drafts for a row in a round.
    width: numbers of the target's states of one token that it reads.
    layers: the attention of its layers.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> tuple[Problem, ...]: ...

    def sources(self, owner: Any) -> tuple[nn.Module, ...]:
        """The modules of a model that return the states which the head reads, in order."""
        ...

    def against(self, owner: Any) -> str:
        """Why the head cannot draft for a model; "" where it can."""
        ...

    def weights(self, owner: Any) -> int:
        """Numbers of the weights that the drafts of a round read, see `weights_of`."""
        ...

    def drafts(self, owner: Any, passes: Passes, room: Room) -> Drafts:
        """owner: the target. passes: over the head's recorded layers."""
        ...


class Stepped(Head, Protocol):
    """A head whose drafts are steps of its module, see `Steps`."""

    def arguments(
        self, tokens: Tensor, states: Tensor, batch: PagedBatch, rows: Tensor | None, around: Around
    ) -> Call:
        """What `module` is called with.

        tokens: int64 `[T]`. states: `[T, W]` of the target, or `[T, E]` of the head's own last
        step, for each token that of the token before it. rows: int64 `[R]`, those whose logits are
        wanted; None: all.
        """
        ...

    def to_target(self, words: Tensor) -> Tensor:
        """The target's ids of the head's words, int64 `[...]`."""
        ...


class Around(NamedTuple):
    """What is around a step of a head.

    embed: the embeddings of the target. pages: of the head.
    """

    embed: nn.Module
    pages: ModelPages


def addresses(head: Head | None, owner: Any) -> tuple[int, ...]:
    """Where the tensors are that the graphs of a head read; () without one."""
    if head is None:
        return ()
    read = head.module, owner.get_input_embeddings(), owner.get_output_embeddings()
    modules = [module for module in read if module is not None]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return tuple(t.data_ptr() for t in tensors)


def layers_of(owner: Any, states: Sequence[int]) -> tuple[nn.Module, ...]:
    """The modules of a model that return the `hidden_states` of these numbers."""
    layers = owner.get_decoder().layers
    return tuple(layers[n - 1] if n else owner.get_input_embeddings() for n in states)


def why_not(module: nn.Module, owner: Any, words: int, width: int, states: Sequence[int]) -> str:
    """Why a head is not one of a model; "" where it is.

    words: of its vocabulary. width: numbers of a token in each of the states that it reads. states:
    their numbers in `hidden_states`.
    """
    embed = owner.get_input_embeddings().weight
    layers = owner.config.get_text_config().num_hidden_layers
    weight, model = next(module.parameters()), type(owner).__name__
    if words != embed.shape[0]:
        return f"it has {words} words and {model} has {embed.shape[0]}; want as many"
    if width != embed.shape[1]:
        return f"it reads states of {width} numbers, and those of {model} have {embed.shape[1]}"
    if not isinstance(getattr(owner.get_decoder(), "layers", None), nn.ModuleList):
        got = "it reads states of decoder layers"
        return f"{got}, and {model} has no list of them named layers"
    if (weight.device, weight.dtype) != (embed.device, embed.dtype):
        ours, theirs = (f"{t.dtype} on {t.device}" for t in (weight, embed))
        return f"it is {ours}, and {model} {theirs}; want the same"
    if not all(0 <= number < layers for number in states):
        return f"it reads the states {tuple(states)}, and {model} has {layers} layers"
    return ""


def weights_of(module: nn.Module) -> int:
    """Numbers of the weights of a module's linears, as far as they are modules: a step reads few
    rows of embeddings, and of experts."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


class Calls:
    """Calls of a head's module, whose linears are fused where it can be recorded. It computes in
    its own dtype, which its pages have, whatever autocast is on around the model."""

    def __init__(self, module: nn.Module, passes: Passes) -> None:
        self._module, self._device = module, next(module.parameters()).device
        self._kinds: Kinds | None = Kinds(passes)

    def __call__(self, args: tuple[Any, ...], where: dict[str, Any]) -> Any:
        with self.uncast():
            if self._kinds is not None:
                self._kinds.begin()
                try:
                    return self._kinds(self._module, 1, args, where)
                except NotRegional:
                    self._kinds = None
            return self._module(*args, **where)

    def uncast(self) -> AbstractContextManager[Any]:
        """Without autocast. Prompts are of all lengths and are not recorded."""
        return torch.autocast(self._device.type, enabled=False)


class Steps:
    """Steps of a head.

    Attributes:
        waiting: the states that it has not read, and its pages.
    """

    def __init__(self, head: Stepped, embed: nn.Module, passes: Passes, room: Room) -> None:
        """embed: the embeddings of the target."""
        weight = next(head.module.parameters())
        self.head, self._calls = head, Calls(head.module, passes)
        self.waiting = Waiting(room, head.width, head.layers, weight.device, weight.dtype)
        self._around = Around(embed, self.waiting.pages)

    def __call__(
        self, tokens: Tensor, states: Tensor, batch: PagedBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits `[R, words]` and the head's states `[R, E]` at `rows`. See `Stepped.arguments`."""
        found: tuple[Tensor, Tensor] = self._calls(
            *self.head.arguments(tokens, states, batch, rows, self._around)
        )
        return found

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`."""
        one = tokens.new_zeros(1)  # logits of one token, which nothing reads
        args, where = self.head.arguments(tokens, states, batch, one, self._around)
        with self._calls.uncast():
            self.head.module(*args, **where)
