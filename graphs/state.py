"""Saves and restores the tensors that a step changes in place, the cache's pages apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import InvalidInput, fail


def tensors(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`state` without duplicates. Raises InvalidInput for anything but tensors."""
    if isinstance(state, Tensor) or not all(isinstance(t, Tensor) for t in state):
        fail(InvalidInput, "state", type(state).__name__, "a sequence of tensors, those that a step changes")
    return tuple({id(t): t for t in state}.values())


def saved(state: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors."""
    return [t.detach().clone() for t in state]


def restore(state: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Write the copies back."""
    with torch.no_grad():
        for t, copy in zip(state, copies, strict=True):
            t.copy_(copy)


@contextmanager
def unchanged(state: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors after the block, also where it raises."""
    copies = saved(state)
    try:
        yield
    finally:
        restore(state, copies)
