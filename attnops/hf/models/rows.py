"""Modules of a model whose rows are kept apart under a deterministic policy.

Linears, norms and activations become objects of subclasses of their classes, as routers do
(attnops.hf.models.routers), and run their own code under any other policy. Routers and experts
that attnops has taken over keep their rows apart in `routers` and `experts` of this folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from attnops.hf.models import experts, routers
from attnops.hf.models.experts import plain
from attnops.hf.models.methods import is_replaced
from attnops.nn.steady import class_of, is_steady, steady, unsteady

_ACTIVATIONS = {known[0] if isinstance(known, tuple) else known for known in ACT2CLS.values()}


@dataclass(frozen=True)
class Site:
    """A module that may compute rows.

    kind: "linears", "norms", "activations" or "routers"; "" of a module of another kind.
    against: why its rows cannot be kept apart; "" where they can.
    """

    module: nn.Module
    kind: str
    against: str


class Rows:
    """The modules of a model whose rows are kept apart, until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        free = (site for site in sites(model) if not site.against and not is_steady(site.module))
        self._taken = tuple(free)
        for site in self._taken:
            steady(site.module, pointwise=site.kind == "activations")

    def undo(self) -> None:
        """Give the modules their classes back. One whose class has changed since keeps that."""
        for site in self._taken:
            unsteady(site.module)

    def notes(self) -> tuple[str, ...]:
        """Lines of a report, on the model as it is now."""
        kept = Counter(site.kind for site in sites(self._model) if not _why_left(site))
        counts = ", ".join(f"{n} {kind}" for kind, n in kept.items())
        head = f"under a deterministic policy rows do not follow from each other in {counts}"
        rest = "under a deterministic policy rows may follow from each other in"
        lines = (f"{rest} {n} modules: {why}" for why, n in left_out(self._model).items())
        return (*((head,) if kept else ()), *lines)


def left_out(model: nn.Module) -> Counter[str]:
    """How many modules of a model are not kept apart, by the reason."""
    return Counter(filter(None, map(_why_left, sites(model))))


def _why_left(site: Site) -> str:
    """Why a module is not kept apart; "" where it is."""
    return site.against or ("" if is_steady(site.module) else "they were added after patch()")


def sites(model: nn.Module) -> Iterator[Site]:
    """The modules of a model that compute rows, but for routers and experts that are taken over."""
    for module in model.modules():
        if experts.is_taken(module) or routers.is_taken(module):
            continue
        if kind := _kind(module):
            yield Site(module, kind, _against(module))
        elif _matrices(module) and not isinstance(module, (nn.Embedding, ParametrizationList)):
            name = class_of(module).__name__
            yield Site(module, "", f"{name} has matrices, and code that is not known")


def _kind(module: nn.Module) -> str:
    cls = class_of(module)
    if cls.forward is nn.Linear.forward or cls is Conv1D:
        return "linears"
    if next(module.children(), None) is not None:
        return ""
    if cls in _ACTIVATIONS and not _tensors(module):
        return "activations"
    if _matrices(module):
        return "routers" if routers.is_router(module) else ""
    return "norms" if list(module.parameters()) or "Norm" in cls.__name__ else ""


def _tensors(module: nn.Module) -> list[Tensor]:
    """Its own parameters and buffers."""
    named = (*module._parameters.values(), *module._buffers.values())
    return [t for t in named if t is not None]


def _matrices(module: nn.Module) -> list[Tensor]:
    return [t for t in _tensors(module) if t.dim() > 1]


def _against(module: nn.Module) -> str:
    """Why the rows of a module of a known kind cannot be kept apart; "" where they can."""
    if is_replaced(module):
        return "their forward is replaced on the module itself, or compiled"
    parameters = [p for p in module._parameters.values() if p is not None]
    if is_parametrized(module) or not all(map(plain, parameters)):
        names = sorted({type(p).__name__ for p in parameters} - {"Parameter"})
        return f"their weights are {', '.join(names) or 'parametrised'}"
    return ""
