"""What a step changes beside pages: saved, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import InvalidInput


def tensors(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`state`, each tensor once. Raises InvalidInput: something in it is no tensor."""
    if isinstance(state, Tensor) or not all(isinstance(t, Tensor) for t in state):
        raise InvalidInput("state", type(state).__name__, "a sequence of tensors, those that a step changes")
    return tuple({id(t): t for t in state}.values())


def saved(state: Sequence[Tensor]) -> list[Tensor]:
    """Copies."""
    return [t.detach().clone() for t in state]


def put(state: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """What `saved` gave, where it was."""
    with torch.no_grad():
        for t, was in zip(state, copies, strict=True):
            t.copy_(was)


@contextmanager
def unchanged(state: Sequence[Tensor]) -> Iterator[None]:
    """Whatever runs within, and fails there, the tensors hold afterwards what they held before."""
    before = saved(state)
    try:
        yield
    finally:
        put(state, before)
