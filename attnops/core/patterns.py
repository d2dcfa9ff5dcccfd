"""`Pattern`: how calls of an op are told apart by the types of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attnops.core.record import Spec


@dataclass(frozen=True)
class Pattern:
    """How calls whose arguments have these types are told apart.

    number: tells patterns apart in a key. tensors, scalars: pick the tensors that are given, and all else, from a call.
    grows: for each of these tensors the dim whose size grows from call to call (`Spec.grows`), -1 if there is none.
    """

    number: int
    tensors: Callable[[Any], tuple[Any, ...]]
    scalars: Callable[[Any], tuple[Any, ...]]
    grows: tuple[int, ...]


_PLAIN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "Tensor | None": (Tensor, torch.nn.Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


def pattern(spec: Spec, types: tuple[type, ...], number: int) -> Pattern | None:
    """The Pattern of calls with arguments of these types; None where one is of a type that is not compared (a subclass, an int for a
    float), so that such a call takes the dispatcher's way."""
    if any(t not in _PLAIN[a.kind] for a, t in zip(spec.args, types, strict=True)):
        return None
    tensors = [i for i, (a, t) in enumerate(zip(spec.args, types, strict=True)) if a.tensor and t is not type(None)]
    others = [i for i, a in enumerate(spec.args) if not a.tensor]
    layouts = [[size.text for size in spec.args[i].layout] for i in tensors]
    grows = tuple(layout.index(spec.grows) if spec.grows in layout else -1 for layout in layouts)
    return Pattern(number, picker(tensors), picker(others), grows)


def picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that picks these places of a call."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda call: (call[places[0]],)) if places else (lambda call: ())
