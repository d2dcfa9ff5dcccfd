"""States of linear attention in a cache of pages: what a module with a state is given in place of
transformers' own cache of it.

Every row of the batch has a state at an address that stays, as it has pages. One more row belongs
to the padding tokens of a step. What a free row holds is never read by a request: the first tokens
of a request meet states of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from attnops.core.errors import InvalidInput, fail


class StateSizes(NamedTuple):
    """What a layer keeps of a request beside pages: the last inputs of its convolution, `[C, W]`,
    and its state."""

    conv: torch.Size
    conv_dtype: torch.dtype
    state: torch.Size
    state_dtype: torch.dtype


Tensors = tuple[Tensor, ...]
Memory = tuple[tuple[torch.Size, torch.dtype], ...]
"""The tensors of one layer, by shape and dtype."""


class Kept(NamedTuple):
    """What a layer keeps of the tokens that may be taken back, as its ops take it.

    conv: `[rows + 1, R, C]`, the inputs of the convolution. inputs: those of the other op, by
    argument. accepted: int32 `[rows + 1, 2]`.
    """

    conv: Tensor
    inputs: dict[str, Tensor]
    accepted: Tensor

    def of_conv(self) -> dict[str, Any]:
        """Arguments of the convolution."""
        return {"kept_x": self.conv, "accepted": self.accepted}

    def of_op(self) -> dict[str, Any]:
        """Arguments of the other op."""
        return {**self.inputs, "accepted": self.accepted}


class States(NamedTuple):
    """Those of one layer, of all rows and of padding: `[rows + 1, C, W]` and `[rows + 1, ...]`.

    kept: in a step that verifies drafts. The states are then those before the tokens that may be
    taken back.
    """

    conv: Tensor
    state: Tensor
    kept: Kept | None = None


class AllStates:
    """The states of all layers, whose addresses stay.

    layers: in their order. tensors: those of equal layers are one, `[layers, rows + 1, ...]`.
    kept: of each layer the inputs of the last tokens, which calls that draft may take back.
    behind: int64 `[rows + 1]`, the tokens of each row that its states have read. written: what a
    step writes, with what is kept.
    """

    def __init__(self, sizes: Sequence[StateSizes], rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        layers, self.tensors = self._stacked(
            [((e.conv, e.conv_dtype), (e.state, e.state_dtype)) for e in sizes]
        )
        self.layers = tuple(States(conv, state) for conv, state in layers)
        self.kept: tuple[Kept, ...] = ()
        self.written = self.tensors
        self.slots = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of what is kept."""
        return sum(t.nbytes for t in self.written)

    def keep(self, names: Sequence[Sequence[str]], sizes: Sequence[Memory], slots: int) -> None:
        """Keep the inputs of tokens from now on.

        names: of each layer, the arguments that keep the inputs of its other op. sizes: of each
        layer, of one token: the input of the convolution, and these in turn. slots: R, at least
        twice the tokens of a step.
        """
        by_slot = [tuple((torch.Size((slots, *n)), dtype) for n, dtype in each) for each in sizes]
        layers, tensors = self._stacked(by_slot)
        accepted = torch.zeros(self._rows + 1, 2, dtype=torch.int32, device=self._device)
        self.behind = torch.zeros(self._rows + 1, dtype=torch.int64, device=self._device)
        self.kept = tuple(
            Kept(conv, dict(zip(of, inputs, strict=True)), accepted)
            for of, (conv, *inputs) in zip(names, layers, strict=True)
        )
        self.written = *self.tensors, *tensors, accepted, self.behind
        self.slots = slots

    def _stacked(self, sizes: Sequence[Memory]) -> tuple[list[tuple[Tensor, ...]], Tensors]:
        """(the tensors `[rows + 1, ...]` of each layer, all tensors with equal layers in one)."""
        rows, device = self._rows + 1, self._device
        whole = {
            each: [torch.zeros(count, rows, *n, dtype=dtype, device=device) for n, dtype in each]
            for each, count in Counter(sizes).items()
        }
        parts = {each: zip(*map(torch.unbind, alike), strict=True) for each, alike in whole.items()}
        layers = [next(parts[each]) for each in sizes]
        return layers, tuple(t for alike in whole.values() for t in alike)

    def of(self, place: int, rows: int, keeps: bool) -> States:
        """Those of a layer, of the first rows. keeps: with what is kept."""
        conv, state, _ = self.layers[place]
        kept = None
        if keeps:
            own = self.kept[place]
            inputs = {name: x[:rows].detach() for name, x in own.inputs.items()}
            kept = Kept(own.conv[:rows].detach(), inputs, own.accepted[:rows].detach())
        return States(conv[:rows].detach(), state[:rows].detach(), kept)

    def begin(self, lengths: Tensor) -> None:
        """Note that the states have read `lengths` tokens of each row, int64 `[B]`, and that no
        token is kept."""
        self.behind[: len(lengths)].copy_(lengths)

    def accept(self, lengths: Tensor, real: Tensor) -> None:
        """Begin a step behind `lengths` tokens of each row, int64 `[B]`: those of them that the
        states have not read are accepted. real: bool `[B]`, is the row stored?"""
        if not self.kept:
            return
        rows = lengths.shape[0]
        behind = self.behind.narrow(0, 0, rows)
        count = torch.where(real, lengths - behind, 0)
        first = behind % self.slots
        # All layers share this tensor.
        self.kept[0].accepted.narrow(0, 0, rows).copy_(torch.stack([first, count], 1))
        behind.copy_(torch.where(real, lengths, behind))


class Requests(NamedTuple):
    """Requests of equally many tokens, as a batch names them."""

    cu_seqlens_q: Tensor
    max_seqlen_q: int


class OfStates:
    """A layer's part of a step in a graph, as far as its states go. transformers' code asks it what
    it asks a cache, and our functions take the states from it (`hf.models.recurrent`).

    states: those of the step's requests, in the order of `cu_seqlens_q`; None for a layer without.
    """

    states: States | None

    @property
    def layers(self) -> Any:
        """The caches of all layers, by number: this one is asked for its own alone."""
        return _Alone(self)

    record_past = False

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """As transformers' layer has them."""
        assert self.states is not None
        return {0: self.states.conv}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """As transformers' layer has them."""
        assert self.states is not None
        return {0: self.states.state}

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Ours serve the first tokens, too."""
        return True

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor:
        """As a cache of transformers 5.24 gives it."""
        return self.conv_states[0]

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor:
        """As a cache of transformers 5.24 gives it."""
        return self.recurrent_states[0]

    def is_recording_past(self, *_: Any) -> bool:
        """A step keeps no earlier inputs."""
        return False

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The new inputs as they came. The op writes the state."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The state, which the op has written."""
        return recurrent_states


class PartOfRows(OfStates):
    """A layer's part of a step of rows of equally many tokens, outside of graphs.

    batch: its tokens. fresh: have the rows no tokens before these?
    """

    def __init__(self, states: States, batch: Requests, fresh: bool) -> None:
        self.states, self.batch, self.fresh = states, batch, fresh


class _Alone:
    """A list of one layer, for any number."""

    def __init__(self, layer: OfStates) -> None:
        self._layer = layer

    def __getitem__(self, number: Any) -> OfStates:
        return self._layer


PAGES = -1
"""In place of the number of the last layer with pages, which may keep a state, too."""


class StepsOfStates:
    """What the State of a cache knows of the steps of a model whose layers have states.

    begun: the layers with states that have begun the step under way, and `PAGES` once the last one
        with pages has ended it. They stay when a layer raises.
    rows: of the last step.
    verified: `start` of the last step that verifies drafts.
    """

    pages: Any
    filled: bool
    start: Tensor | None
    begun: set[int]
    rows: int
    verified: Tensor | None = None

    @property
    def verifies(self) -> bool:
        """Does the step under way verify drafts?"""
        return self.start is not None and self.verified is self.start

    def take_rows(self, rows: int) -> None:
        """Begin a step of so many rows. Those that the step before did not have are new requests,
        which meet states of 0. A graph of a step has no such rows."""
        if self.start is not None:
            return
        if self.filled and rows > self.rows:
            for states in self.pages.states.tensors:
                states[:, self.rows : rows].zero_()
        self.rows = rows

    def end_part(self, layer: int) -> None:
        """Note that a layer with states, or `PAGES`, has ended its part of a step."""
        self.begun.add(layer)
        if len(self.begun) > len(self.pages.states.layers):
            self.begun.clear()


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of a layer in a cache of pages, as transformers' own code reads and writes them.

    owner: the State of the cache. rows: of the step under way.
    """

    is_compileable = False
    record_past = False
    number_of_states = 1

    def __init__(self, owner: Any, number: int, place: int) -> None:
        """number: of the layer. place: of its states among those of the pages."""
        self._owner, self._number, self._place = owner, number, place
        self.rows = 0

    def begin(self, rows: int) -> None:
        """Begin this layer's part of a step.

        Raises InvalidInput: an error ended the step before half way, and states cannot go back.
        """
        owner = self._owner
        if self._number in owner.begun:
            if owner.filled:
                got = "a cache whose last step did not reach every layer"
                fail(InvalidInput, owner.name, got, "reset(), before it is used again")
            owner.begun.clear()  # no token is in the pages: a first step begins again
            owner.moved.clear()
        if not owner.begun:
            owner.take_rows(rows)
        owner.begun.add(self._number)
        self.rows = rows

    def end(self) -> None:
        """End this layer's part of a step."""
        self._owner.moved.add(self._number)
        self._owner.end_part(self._number)

    @property
    def verifies(self) -> bool:
        """Does the step under way verify drafts?"""
        return bool(self._owner.verifies)

    def part(self, tokens: int) -> PartOfRows:
        """This layer's part of the step under way, of `tokens` tokens a row."""
        states = self._owner.pages.states.of(self._place, self.rows, keeps=self.verifies)
        ends = (self.rows + 1) * tokens
        starts = torch.arange(0, ends, tokens, dtype=torch.int32, device=states.conv.device)
        fresh = self._number not in self._owner.moved
        return PartOfRows(states, Requests(starts, tokens), fresh)

    @property
    def _states(self) -> States:
        own: States = self._owner.pages.states.of(self._place, self.rows, keeps=False)
        return own

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        """Have tokens reached this layer?"""
        return {0: self._number in self._owner.moved}

    @property
    def conv_states(self) -> dict[int, Tensor]:  # type: ignore[override]
        """`[B, C, W]`, the last inputs of the rows of the call."""
        return {0: self._states.conv}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:  # type: ignore[override]
        """`[B, ...]`, the states of the rows of the call."""
        return {0: self._states.state}

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The last inputs and the new ones `[B, C, S]`; the last of these are kept."""
        kept = self._states.conv
        width = kept.shape[2]
        if self._number in self._owner.moved:
            whole = torch.cat([kept, conv_states], 2)
        else:
            whole = F.pad(conv_states, (max(0, width - conv_states.shape[2]), 0))
        kept.copy_(whole[:, :, whole.shape[2] - width :])
        self._owner.moved.add(self._number)
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Keep these `[B, ...]`."""
        self._owner.moved.add(self._number)
        return self._states.state.copy_(recurrent_states)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """No effect: the states exist."""

    offload = prefetch = reset = lazy_initialization

    def crop(self, *_: Any) -> None:
        """Raises RuntimeError, as transformers' own does."""
        raise RuntimeError("states of linear attention cannot go back to those of earlier tokens")

    def activate_past_recording(self) -> None:
        """Raises InvalidInput: states are those after the last token alone."""
        want = "a cache of transformers' own, for a way to generate that takes tokens back"
        fail(InvalidInput, self._owner.name, "a cache of pages", want)

    def reorder_cache(self, *_: Any) -> None:
        """Raises InvalidInput: rows keep their states."""
        want = (
            "a cache of transformers' own, for a way to generate that reorders the batch "
            "(beam search)"
        )
        fail(InvalidInput, self._owner.name, "a cache of pages", want)
