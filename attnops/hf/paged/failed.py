"""The kinds of decode steps whose graphs cannot be made."""

from __future__ import annotations

from typing import NamedTuple


class Failed(NamedTuple):
    """A kind of step whose graphs cannot be made.

    state: of the model, as a hash; None where the model itself cannot be looked at. kind: by its rows. mode: of the graphs.
    """

    state: int | None
    kind: str
    mode: str

    def __str__(self) -> str:
        return f"decode steps of {self.kind} have no {self.mode} graphs until release()"
