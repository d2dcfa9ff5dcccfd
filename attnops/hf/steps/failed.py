"""The kinds of decode steps whose graphs cannot be made, and failures that say nothing of the model."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeVar

import torch

from attnops.core.errors import NotCapturable, one_line
from attnops.graphs.capturing import chain_of

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


TRIES = 3
"""How often a capture is tried again after failures that say nothing of the model."""

# Texts of errors of CUDA and of torch, in lower case.
_PASSING = (
    "out of memory",
    "operation failed due to a previous error during capture",  # which another thread may have made
    "offset increment outside graph capture",
    "generator not in capture mode",
)
_REFUSED = "operation not permitted when stream is capturing"


def passing(error: BaseException) -> bool:
    """Does this failure of a capture say nothing of the model, so that a later capture may succeed?

    So it is where memory was short, where CUDA had ended the capture before the error (a wait for the whole device in another thread does
    that), and where a generator of random numbers was in another capture, or was left in one. A call that CUDA refuses because a
    stream captures is the model's own where our capture was open (`NotCapturable`), and another's where none was.
    """
    for each in chain_of(error):
        text = str(each).lower()
        if isinstance(each, torch.OutOfMemoryError) or any(words in text for words in _PASSING):
            return True
    return not isinstance(error, NotCapturable) and _REFUSED in str(error)


class Tries:
    """Counts the failures that pass, by what failed, until a success of the same. MOST kinds at most are kept."""

    def __init__(self) -> None:
        self._failed: dict[Hashable, tuple[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._failed)

    def why(self, key: Hashable) -> str:
        """Why this failed last; "" after a success."""
        return self._failed.get(key, (0, ""))[1]

    def again(self, key: Hashable, error: BaseException) -> bool:
        """Note a failure. Returns whether the next `generate()` tries again."""
        count, _ = self._failed.pop(key, (0, ""))
        again = passing(error) and count < TRIES
        if again:
            self._failed[key] = count + 1, f"{one_line(error)}; the next generate() tries again"
            while len(self._failed) > MOST:
                del self._failed[next(iter(self._failed))]
        return again

    def done(self, key: Hashable) -> None:
        """Note a success."""
        self._failed.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._failed.clear()
