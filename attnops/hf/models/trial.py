"""How a module of a stranger is proven: its own code is run on inputs of ours, and what it answers
is compared with what our code gives.

A `Trial` is one such run. Routers and experts search for the arguments of an op that give the same
numbers; models are run again with our masks (attnops.hf.mask_trials). What is found, or the reason
against it, is in a `Site`. Modules whose class or source says enough are read and not tried:
attention_modules, rows and attnops.adapters.callers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from attnops.core.private_torch import without_modes

Found = TypeVar("Found")


@dataclass(frozen=True)
class Trial:
    """A run of a stranger's code. inputs: what it was given. want: its answers, by name."""

    inputs: Any
    want: Mapping[str, Tensor]

    def is_met(
        self, name: str, got: Tensor, rtol: float, atol: float, equal_nan: bool = False
    ) -> bool:
        """Is this its answer, within the tolerances, relative and absolute?"""
        want = self.want[name].float()
        return torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=equal_nan)


@dataclass(frozen=True)
class Site(Generic[Found]):
    """A module of a model, and what trials have found of it, or the reason why it is left as it
    is."""

    module: nn.Module
    found: Found | str


def left_alone(kind: str, found: Sequence[object]) -> Iterator[str]:
    """The lines of a report on modules that are left as they are.

    kind: their name. found: of each module, the reason, or what is no text.
    """
    for why, n in Counter(each for each in found if isinstance(each, str)).items():
        yield f"{kind} of {n} of {len(found)} layers are left as they are: {why}"


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


def answers(names: Sequence[str], call: Callable[..., Any], *args: Any) -> dict[str, Tensor] | None:
    """The tensors of the tuple that it gives, by these names; None where it raises, or gives
    something else."""
    given = answer(call, *args)
    if not isinstance(given, tuple) or len(given) != len(names):
        return None
    if not all(isinstance(t, Tensor) for t in given):
        return None
    return dict(zip(names, given, strict=True))
