"""`States`: the graphs of a model by the state that it was captured in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch

from attnops.hf.cache.idle_pages import gpu_bytes
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.calls import Kind
from attnops.hf.steps.prompt import Over

MOST_STATES = 64
"""States whose graphs are kept, however small these are."""

ModelState = tuple[Any, ...]
"""What `Glance` sees of a model, the policy and autocast."""


class Kept(NamedTuple):
    """Of one state of a model.

    over: the graphs by their pages and mode.
    taken: the steps so far, by kind, and the tokens of prompts.
    """

    over: dict[tuple[ModelPages, str], Over]
    taken: Counter[Kind]


def most_graph_bytes(device: torch.device) -> float:
    """A twentieth of a GPU's memory."""
    return gpu_bytes(device) / 20


class States:
    """The graphs of one model, of adapters and policies that are switched to and fro.

    Those of the state in use stay, and with them, within the budget, those that were used last.

    budget_bytes: of the graphs of all states, their buffers included. None: `most_graph_bytes`.
    drop: frees graphs; a method, which is not kept alive.
    freed: states whose graphs were freed for the budget.
    """

    def __init__(self, budget_bytes: int | None, drop: Callable[[Over], None]) -> None:
        self._budget, self.freed = budget_bytes, 0
        # The method of what holds these, which a model is to be freed with by its last reference.
        self._dropping = WeakMethod(drop)
        self._kept: dict[ModelState, Kept] = {}  # the state in use is the last

    def __contains__(self, state: ModelState) -> bool:
        return state in self._kept

    def __iter__(self) -> Iterator[Over]:
        """All graphs."""
        return (over for kept in tuple(self._kept.values()) for over in tuple(kept.over.values()))

    @property
    def nbytes(self) -> int:
        """Bytes that all graphs and their buffers hold."""
        return sum(over.graphed.nbytes for over in self)

    @property
    def budget(self) -> float:
        """Bytes."""
        if self._budget is not None:
            return self._budget
        devices = {over.cache.state.pages.sizes.device for over in self}
        return min(map(most_graph_bytes, devices), default=0)

    def notes(self) -> tuple[str, ...]:
        """What was freed, for the report."""
        if not self.freed:
            return ()
        freed = f"graphs of {self.freed} states of the model were freed"
        budget = f"the budget of {self.budget / 2**20:.1f} MiB (Decode.budget_bytes) or "
        return (f"{freed}, over {budget if isfinite(self.budget) else ''}{MOST_STATES} states",)

    def use(self, state: ModelState, taken: Counter[Kind]) -> Kept:
        """The graphs of a state, which is in use from now on.

        taken: its steps so far, where it has no graphs.
        """
        kept = self._kept[state] = self._kept.pop(state, Kept({}, taken))
        self.fit()
        return kept

    def _drop(self, over: Over) -> None:
        if (drop := self._dropping()) is not None:
            drop(over)

    def fit(self) -> None:
        """Free the graphs of the states that were not used for longest, down to the budget."""
        held, budget = self.nbytes, self.budget
        for state in list(self._kept)[:-1]:
            kept = self._kept[state]
            if kept.over and len(self._kept) <= MOST_STATES and held <= budget:
                continue
            held -= sum(over.graphed.nbytes for over in kept.over.values())
            self.freed += bool(kept.over)  # without any, its pages are gone
            del self._kept[state]
            for over in kept.over.values():
                self._drop(over)

    def forget(self, pages: ModelPages) -> None:
        """Free the graphs over these pages."""
        for kept in self._kept.values():
            for key in [key for key in kept.over if key[0] is pages]:
                self._drop(kept.over.pop(key))

    def free(self) -> None:
        """Free all graphs."""
        for pages in {pages for kept in self._kept.values() for pages, _ in kept.over}:
            self.forget(pages)
        self.freed = 0
