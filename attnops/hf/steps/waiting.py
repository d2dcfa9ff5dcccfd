"""`Waiting`: the hidden states of a target that a draft head has not read, and the head's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.core.problem import Problem
from attnops.hf.cache.described import described
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.steps.chunks import packed
from attnops.hf.steps.hidden import Read
from attnops.ops import token_rows


class Room(NamedTuple):
    """What the drafts of a head are made for.

    rows, length: rows, and positions of each. queries: tokens of a row that a round verifies at
    most. rounds: those of one token whose states may wait.
    """

    rows: int
    length: int
    queries: int
    rounds: int


class Pairs(NamedTuple):
    """What a head reads behind its pages, as many pairs of each row.

    tokens: int64 `[B * N]`. states: `[B * N, W]`. batch: of them. last: int64 `[B]`, the number of
    each row's last one; what is behind it is read as well, and later pairs replace it.
    """

    tokens: Tensor
    states: Tensor
    batch: PagedBatch
    last: Tensor


class Waiting:
    """The pairs of a head: a token, and the target's states of the token before it. Its pages keep
    them: the pair at position p has the token at p + 1 of the text, counted from `base`.

    The head reads nothing in rounds that draft nothing: their states wait.

    Args:
        width: numbers of the states of a token.
        layers: the attention of the head.
        device, dtype: of the head.

    Attributes:
        pages: of the head.
        base: int64 `[B]`, the target's tokens before those that the head has read, which are those
            of one call.
    """

    def __init__(
        self,
        room: Room,
        width: int,
        layers: Sequence[Problem],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        rows, length, queries, rounds = room
        self._waiting, self._heads = rounds + queries, layers[0].q_heads
        sizes = Sizes(rows, length + self._waiting, tuple(layers), device, None, fixed=True)
        self.pages = ModelPages(sizes)

        def states(count: int) -> Tensor:
            return torch.zeros(rows * count, width, device=device, dtype=dtype)

        with ordinary():
            # Pairs in the pages, and the column of a text that has position 0.
            self.base, self._held, self._shift = (
                torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
            )
            self._first = torch.arange(rows, device=device)[:, None]
            self._new, self._states = states(queries), states(self._waiting)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its buffers, without its pages."""
        return self.base, self._held, self._shift, self._new, self._states

    def take(self, hidden: Tensor) -> None:
        """Take the states `[B, N, W]` of a step that has verified, before `pairs` or `wait`."""
        self._new[: hidden.shape[0] * hidden.shape[1]].copy_(hidden.flatten(0, 1))

    def follow(self, path: Tensor) -> None:
        """Of the states of a step that has verified trees, leave those of the nodes that are kept,
        as if the step had verified a chain of them.

        path: int32 `[B, N]`, the nodes that each row keeps in order, and -1 beyond.
        """
        nodes = self._new.shape[0] // path.shape[0]
        kept = self._new[(self._first * nodes + path.clamp(min=0)).flatten()]
        self._new[: kept.shape[0]].copy_(kept)

    def begin(
        self,
        read: list[Read],
        ids: Tensor,
        shift: Tensor,
        stored: Tensor,
        pairs: Callable[[Tensor, Tensor, PagedBatch], None],
    ) -> None:
        """Read a prompt, and take the states of its last tokens.

        Args:
            read: all of it; nothing is left there, because states of long prompts are large.
            ids: int64 `[B, L]`, the text.
            shift: int64 `[B]`, the column in `ids` of each row's first token in the target's pages.
            stored: int64 `[B]`, tokens of each row there.
            pairs: reads them, as `Drafts.read`.
        """
        self.pages.use()
        self.base.copy_(read[0].before.clamp(min=0))
        self._shift.copy_(shift + self.base)
        # The pair of the last token has a token that is not chosen yet.
        self._held.copy_(stored - self.base - 1)
        states = self._new.new_zeros(len(stored), self._new.shape[1])
        while read:
            counts, before, hidden = read.pop(0)
            total = hidden.shape[0]
            ends = hidden[(counts.cumsum(0) - 1).clamp(min=0)]
            states = torch.where((before + counts == stored)[:, None], ends, states)
            batch = packed(self.pages, counts, before - self.base, total)
            assert batch.positions is not None
            rows = token_rows(batch.cu_seqlens_q, total).clamp(max=ids.shape[0] - 1)
            at = batch.positions + 1 + self._shift[rows]
            tokens = ids[rows, at.clamp(0, ids.shape[1] - 1)]
            pairs(tokens, hidden.to(states.dtype), batch)
        self.take(states[:, None])

    def wait(self, queries: int, counts: Tensor, stored: Tensor) -> None:
        """Keep the states of a step of `queries` tokens a row, behind those that wait.

        counts, stored: int64 `[B]`, the tokens that each row has got, and those that the target's
        pages keep with them.
        """
        waited = stored - counts - self.base - self._held
        columns = torch.arange(queries, device=waited.device)
        place = (waited[:, None] + columns).clamp(max=self._waiting - 1)
        at = (self._first * self._waiting + place).flatten()
        self._states.index_copy_(0, at, self._new[: len(at)])

    def pairs(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool
    ) -> Pairs:
        """Those to read now, see `Drafts.propose`. They wait no longer."""
        self.wait(queries, counts, stored)
        new = self._waiting if late else queries
        rows, columns = len(stored), torch.arange(new, device=texts.device)
        at = (self._held + self._shift)[:, None] + columns + 1
        tokens = texts.gather(1, at.clamp(max=texts.shape[1] - 1))
        states = self._states.view(rows, self._waiting, -1)[:, :new].flatten(0, 1)
        length = stored - self.base
        last = self._first[:, 0] * new + (length - self._held - 1).clamp(0, new - 1)
        batch = self.behind(self._held, new)
        self._held.copy_(length)
        return Pairs(tokens.flatten(), states, batch, last)

    def steps(self, stored: Tensor, count: int) -> tuple[PagedBatch, ...]:
        """The batches of the next steps of one token a row, behind what the head has read. stored:
        as in `wait`."""
        before = stored - self.base
        if self.pages.plan_of is None:
            return self.pages.steps(before, count)
        return tuple(self.behind(before + n, 1) for n in range(count))

    def behind(self, before: Tensor, count: int) -> PagedBatch:
        """The batch of so many tokens of each row. before: int64 `[B]`, the pairs before them."""
        return described(self.pages, before, None, count, self._heads)
