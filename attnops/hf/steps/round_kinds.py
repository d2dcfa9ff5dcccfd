"""What rounds of drafts are: what their graphs are made for, and what they tell the host."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attnops.hf.steps.calls import Nodes
from attnops.hf.steps.heads import Head


class Form(NamedTuple):
    """What graphs of rounds are made for.

    drafts: tokens that are drafted at most. max_ngram: of the longest text that is looked up in the
    row's own; 0: others draft. head: a draft head that does. levels: tokens behind each other in
    the trees that may be drafted; 0: chains alone are. A head with levels drafts trees alone.
    """

    drafts: int = 7
    max_ngram: int = 3
    head: Head | None = None
    levels: int = 0

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens of a row that a round may verify. The first is known. The others are no drafts,
        half of them, or all. A tree of a head is verified whole or not at all."""
        half = 1 + self.drafts if self.head and self.levels else 1 + (self.drafts + 1) // 2
        return tuple(sorted({1, half, 1 + self.drafts}))

    @property
    def verified(self) -> tuple[int, ...]:
        """The steps that every call may need. None for an object, which drafts chains or trees."""
        if not self.levels:
            return self.depths[1:]
        return tuple(map(Nodes, self.depths[1:])) if self.head else ()


TOKEN = 0.02
"""What one more token of a row adds to the time of a step, as a part of it."""

PROBE, PROBE_MOST = 32, 128
"""Rounds without drafts before another one tries them: at first, and at most, for they are twice as
many after each try in vain. One that tries takes 1.1 to 2 steps, or 4 for the largest trees of 8
rows, so that trying costs 1 to 3% at last. States of a head wait for the first number of rounds."""

Way = Literal["", "drafts", "waits", "late", "reads"]
"""What a head does in a choice: it drafts, lets states wait, drafts after states have waited, or
reads those without a draft."""


class Kind(NamedTuple):
    """A choice that has a graph of its own. queries: tokens of a row. way: of a head; "" without
    one."""

    queries: int
    way: Way


class News(NamedTuple):
    """Of a round, on the host.

    counts: the tokens that each row got. tokens: those tokens, by row.
    offered: the most tokens that were drafted for a row next. done: is every row finished?
    """

    counts: list[int]
    tokens: list[list[int]]
    offered: int
    done: bool
