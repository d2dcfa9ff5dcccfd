"""The kinds of decode steps whose graphs cannot be made."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeVar

MOST = 64
"""Reasons that are kept: a model whose weights are replaced before every call has a new state each time."""

Key = TypeVar("Key", bound=Hashable)


class Failed(NamedTuple):
    """A kind of step whose graphs cannot be made.

    state: of the model, as a hash; None where the model itself cannot be looked at. kind: by its rows. mode: of the graphs.
    """

    state: int | None
    kind: str
    mode: str

    def __str__(self) -> str:
        return f"decode steps of {self.kind} have no {self.mode} graphs until release()"


def remember(reasons: dict[Key, str], key: Key, why: str) -> str:
    """Add a reason, and drop the oldest ones above MOST. attnops tries again what it dropped.

    Returns the reason.
    """
    reasons.pop(key, None)
    reasons[key] = why
    while len(reasons) > MOST:
        del reasons[next(iter(reasons))]
    return why
