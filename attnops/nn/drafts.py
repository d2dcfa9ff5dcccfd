"""What drafts of speculative decoding share: the state that they are shown, and what they propose
(https://arxiv.org/abs/2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from attnops.core.record import name, need
from attnops.nn import arguments as check
from attnops.nn.eagle3 import Eagle3Head


@dataclass(frozen=True)
class DraftState:
    """What a draft is shown at the start of a round, for B rows.

    Attributes:
        tokens: int64 `[B, L]`; the text of row b, prompt included, is `tokens[b, :seq_lens[b]]`.
            What is behind it has no meaning.
        seq_lens: int32 `[B]`.
        hidden: `[B, N, H]`, hidden states of the target that no proposal has seen yet, for drafts
            that read them; else None. `hidden[b, i]` belongs to the token at position
            `seq_lens[b] - 1 - fresh[b] + i`. The last token has none: the target has not read it
            yet. `generate()` gives None: of its drafts only heads read hidden states.
        fresh: int32 `[B]`, how many of the N are row b's; what is behind them has no meaning. None
            where hidden is.
        missed: how many rounds there were since the last proposal that no draft was asked for. In
            each of them a row got one token at most.
    """

    tokens: Tensor
    seq_lens: Tensor
    hidden: Tensor | None = None
    fresh: Tensor | None = None
    missed: int = 0

    @property
    def position(self) -> Tensor:
        """int32 `[B]`: the position of each row's last token, from 0."""
        return self.seq_lens - 1


register_dataclass(DraftState)


class Proposal(NamedTuple):
    """K tokens for each of B rows: a chain, or a tree.

    Args:
        tokens: int64 `[B, K]`. An id of -1 is no proposal and is never accepted.
        parents: int32 `[B, K]`, the token that each one follows: an index below its own, or -1, the
            row's last token. None: a chain, in which each token follows the one before it.
        probabilities: float32 `[B, K, V]`, the distribution that each token was drawn from, V the
            target's vocabulary. None: the tokens were not drawn, as with greedy drafts.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probabilities: Tensor | None = None

    def checked(self, rows: int, vocab_size: int) -> Proposal:
        """This proposal, whose shapes and dtypes are those above. Values are on the device and are
        not read.

        Raises InvalidInput.
        """
        tokens = check.tensor("tokens", self.tokens, f"[{rows}, K]", 2)
        sizes = (rows, tokens.shape[1])
        wanted = {
            "tokens": (tokens, sizes, torch.int64),
            "parents": (self.parents, sizes, torch.int32),
            "probabilities": (self.probabilities, (*sizes, vocab_size), torch.float32),
        }
        for field, (value, shape, dtype) in wanted.items():
            if value is None:
                continue
            check.tensor(field, value, str(list(shape)), len(shape))
            need(tuple(value.shape) == shape, f"{field}.shape", tuple(value.shape), str(shape))
            need(value.dtype == dtype, f"{field}.dtype", name(value.dtype), name(dtype))
        return self


MOST_NODES, MOST_DEEP, MOST_BRANCHES = 64, 16, 16
"""Of a `DraftTree`."""


@dataclass(frozen=True)
class DraftTree:
    """That a head drafts trees, as EAGLE-2 does (https://arxiv.org/abs/2406.16858), for
    `attnops.patch(model, speculate=...)`.

    A candidate is worth the product of the probabilities that the head gives to the words on its
    way. The head drafts `depth` words behind each other: after the last word of a text the `top_k`
    likeliest ones, and then the `top_k` likeliest ones after each of the `top_k` best candidates of
    the level before. One step verifies the last word and the best `nodes - 1` of all candidates.

    Args:
        head: an EAGLE-3 head, or the folder of its checkpoint.
        nodes: 2 to 64, the last word of the text included.
        depth: 1 to 16.
        top_k: 1 to 16.

    Raises:
        InvalidInput: a number is outside of its range, or there are more nodes than candidates.
    """

    head: Eagle3Head | str | PathLike[str]
    nodes: int = 32
    depth: int = 6
    top_k: int = 8

    def __post_init__(self) -> None:
        known = isinstance(self.head, (Eagle3Head, str, PathLike))
        got = type(self.head).__name__
        need(known, "head", got, "an attnops.nn.Eagle3Head, or the folder of its checkpoint")
        limits = ("nodes", 2, MOST_NODES), ("depth", 1, MOST_DEEP), ("top_k", 1, MOST_BRANCHES)
        for field, least, most in limits:
            given = getattr(self, field)
            whole = isinstance(given, int) and not isinstance(given, bool)
            need(whole and least <= given <= most, field, repr(given), f"{least} to {most}")
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        want = f"at most {most}: depth {self.depth} and top_k {self.top_k} give no more"
        need(self.nodes <= most, "nodes", self.nodes, want)


class Draft(Protocol):
    """Anything that proposes tokens. The target verifies them, so that a wrong proposal costs time
    and no token.

    `generate()` reads an attribute `num_drafts` where there is one: the most tokens that a proposal
    has for a row, 1 to 63; else 7.
    """

    def propose(self, state: DraftState) -> Proposal:
        """The tokens that may follow each row's text. K may not depend on values of tensors: a
        round in a CUDA graph has fixed shapes, and its draft does not wait for the device."""
        ...
