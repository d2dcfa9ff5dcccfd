"""Draft heads as the rounds of `generate()` use them: modules that read hidden states of a target
and propose tokens, over pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.problem import Problem
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.head_calls import Call, Calls
from attnops.hf.steps.waiting import Room, Waiting
from attnops.nn import Proposal

_TAKEN = "num_experts_per_tok", "moe_topk", "num_experts_per_token"
"""Names in configs of the experts that a token takes."""


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
    ) -> Proposal:
        """`num_drafts` tokens that may follow the last one of each row.

        texts: int64 `[B, L]`. counts, stored, queries: as in `Waiting.wait`. late: have states
        waited?
        """
        ...


class Head(Protocol):
    """A kind of head, with one of its modules. Equal ones share graphs.

    module: the weights.
    num_drafts: tokens that it drafts for a row in a round.
    levels: tokens behind each other in its trees; 0: it drafts chains.
    width: numbers of the target's states of one token that it reads.
    layers: the attention of its layers.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def levels(self) -> int: ...
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

    def weights(self, owner: Any) -> float:
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


def why_not(
    weight: Tensor, owner: Any, words: int, width: int, states: Sequence[int] | None = None
) -> str:
    """Why a head is not one of a model; "" where it is.

    weight: of one of its linears. words: of its vocabulary. width: numbers of a token in each of
    the states that it reads. states: their numbers in `hidden_states`; None: they are behind the
    last norm.
    """
    embed = owner.get_input_embeddings().weight
    layers = owner.config.get_text_config().num_hidden_layers
    model = type(owner).__name__
    if words != embed.shape[0]:
        return f"it has {words} words and {model} has {embed.shape[0]}; want as many"
    if width != embed.shape[1]:
        return f"it reads states of {width} numbers, and those of {model} have {embed.shape[1]}"
    if (weight.device, weight.dtype) != (embed.device, embed.dtype):
        ours, theirs = (f"{t.dtype} on {t.device}" for t in (weight, embed))
        return f"it is {ours}, and {model} {theirs}; want the same"
    if states is None:
        return ""
    if not isinstance(getattr(owner.get_decoder(), "layers", None), nn.ModuleList):
        got = "it reads states of decoder layers"
        return f"{got}, and {model} has no list of them named layers"
    if not all(0 <= number < layers for number in states):
        return f"it reads the states {tuple(states)}, and {model} has {layers} layers"
    return ""


def weights_of(module: nn.Module) -> float:
    """Numbers of the weights that a step of one token reads: of linears, and of as many experts as
    a token takes. It reads few rows of embeddings."""
    modules = [*module.modules()]
    linears = sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear))
    return linears + sum(map(_of_experts, modules))


def _of_experts(module: nn.Module) -> float:
    """The numbers of one token's experts, where a module holds experts."""
    config = getattr(module, "config", None)
    taken = next((getattr(config, name) for name in _TAKEN if hasattr(config, name)), 0)
    stacks = (p for p in module.parameters(recurse=False) if p.dim() == 3)
    return sum(p.numel() * taken / p.shape[0] for p in stacks)


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
        self,
        tokens: Tensor,
        states: Tensor,
        batch: PagedBatch,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[R, words]` and the head's states `[R, E]` at `rows`. See `Stepped.arguments`.

        mask: bool `[T, M * page_size]`, the keys that each token sees; None: those up to its own.
        """
        args, where = self.head.arguments(tokens, states, batch, rows, self._around)
        if mask is not None:
            where["mask"] = mask
        logits, found = self._calls(args, where)
        return logits.flatten(0, -2), found.flatten(0, -2)

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`."""
        one = tokens.new_zeros(1)  # logits of one token, which nothing reads
        args, where = self.head.arguments(tokens, states, batch, one, self._around)
        with self._calls.uncast():
            self.head.module(*args, **where)
