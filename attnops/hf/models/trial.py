"""How a module of a stranger is tried: alone, and without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnops.core.private_torch import without_modes


@contextmanager
def alone() -> Iterator[None]:
    """Within the block tensors are made on the CPU, without gradients, and no mode from around is
    in force, as of fake tensors."""
    with torch.no_grad(), without_modes(), torch.device("cpu"):
        yield


def answer(call: Callable[..., Any], *args: Any) -> Any:
    """What it gives, or None where it raises: a class may raise anything at inputs or at a config
    that it does not like."""
    try:
        return call(*args)
    except Exception:
        return None
