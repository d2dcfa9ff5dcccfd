"""Draft heads as the rounds of `generate()` use them: modules that read hidden states of a target
and propose tokens, over pages of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.private_torch import FakeTensor, unset_fake_temporarily
from attnops.core.problem import Problem
from attnops.graphs.forms import mapped
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.waiting import Room, Waiting
from attnops.nn import Proposal

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
    ) -> Proposal:
        """`num_drafts` tokens that may follow the last one of each row.

        texts: int64 `[B, L]`. counts, stored, queries: as in `Waiting.wait`. late: have states
        waited?
        """
        ...


class Head(Protocol):
    """A kind of head, with one of its modules. Equal ones share graphs.

    module: the weights, and one step of the head: see `Steps`.
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

    def drafts(self, embed: nn.Module, passes: Passes, room: Room) -> Drafts:
        """embed: the embeddings of the target. passes: over the head's recorded layers."""
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
    module = head.module
    read = *module.parameters(), *module.buffers(), owner.get_input_embeddings().weight
    return tuple(t.data_ptr() for t in read)


class Steps:
    """Steps of a head, whose linears are fused where it can be recorded.

    Attributes:
        waiting: the states that it has not read, and its pages.
    """

    def __init__(self, head: Head, embed: nn.Module, passes: Passes, room: Room) -> None:
        weight = next(head.module.parameters())
        self.head, self._device = head, weight.device
        self.waiting = Waiting(room, head.width, head.layers, weight.device, weight.dtype)
        self._around = Around(embed, self.waiting.pages)
        self._kinds: Kinds | None = Kinds(passes)

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        batch: PagedBatch,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[R, words]` and the head's states `[R, E]` at `rows`. See `Head.arguments`.

        mask: bool `[T, M * page_size]`, the keys that each token sees; None: those up to its own.
        """
        args, where = self.head.arguments(tokens, states, batch, rows, self._around)
        if mask is not None:
            where["mask"] = mask
        with self._uncast():
            out = self._recorded(args, where)
            return out or self.head.module(*args, **where)

    def _recorded(
        self, args: tuple[Any, ...], where: dict[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """None: the head cannot be recorded."""
        if self._kinds is None:
            return None
        self._kinds.begin()
        try:
            out: tuple[Tensor, Tensor] = self._called(self._kinds, args, where)
            return out
        except NotRegional:
            self._kinds = None
            return None

    def read(self, tokens: Tensor, states: Tensor, batch: PagedBatch) -> None:
        """As `Drafts.read`. It is not recorded, as steps are: prompts are of all lengths."""
        one = tokens.new_zeros(1)  # logits of one token, which nothing reads
        args, where = self.head.arguments(tokens, states, batch, one, self._around)
        with self._uncast():
            self.head.module(*args, **where)

    def _called(self, kinds: Kinds, args: tuple[Any, ...], where: dict[str, Any]) -> Any:
        if not any(isinstance(x, FakeTensor) for x in args):
            return kinds(self.head.module, 1, args, where)
        # Kernels begin to be compiled (`Round.begin_kernels`). Layers are recorded of real tensors,
        # whose numbers do not matter.
        with unset_fake_temporarily(), kinds.way("ahead"):
            args, where = _real((args, where))
            return kinds(self.head.module, 1, args, where)

    def _uncast(self) -> AbstractContextManager[Any]:
        """The head computes in its own dtype, which its pages have, whatever autocast is on around
        the model."""
        return torch.autocast(self._device.type, enabled=False)


def _real(call: Call) -> Call:
    """The arguments with tensors of the forms of fake ones, which share memory as these do."""
    memory = dict[int, Tensor]()

    def real(x: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return x
        held = x.untyped_storage()
        if held._cdata not in memory:
            numbers = held.nbytes() // x.itemsize
            memory[held._cdata] = torch.zeros(numbers, dtype=x.dtype, device=x.device)
        return memory[held._cdata].as_strided(x.shape, x.stride(), x.storage_offset())

    found: Call = mapped(call, real)
    return found
