"""Rotations whose frequencies follow from the longest position of a call (longrope), chosen by the
device.

transformers compares that position with a number on the host, at every call: the host waits for the
device, and no graph can hold the answer. Here the frequencies of short and of long texts are both
at hand, and the device takes one. The model's own code makes angles of them.

A rotation becomes an object of a subclass of its class, as routers do (attnops.hf.models.routers).
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attnops.hf.models.methods import is_replaced
from attnops.hf.models.trial import alone, answer
from attnops.nn.class_swap import Swap, subclass

_LONG = "_attnops_long"  # the buffer of these frequencies

# Kinds of rotations that look at the longest position.
_OF_LENGTH = ("dynamic", "longrope")


class Rotations:
    """The rotations of a model by longrope, taken over until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self._swaps = [
            Swap(module, served, attributes={}) for module in model.modules() if _take(module)
        ]

    def undo(self) -> None:
        """Give the modules back as they were, see `Swap.undo`. One that keeps a class of its own
        runs its own code."""
        for swap in self._swaps:
            swap.undo()
            if _LONG in swap.target._buffers:
                delattr(swap.target, _LONG)

    def notes(self) -> tuple[str, ...]:
        """A line of a report; none for a model without such rotations."""
        taken = "rotations (longrope) for short or long texts are chosen on the device"
        return (taken,) if self._swaps else ()


def follow_length(model: nn.Module) -> bool:
    """Do rotations of a model follow from the longest position of a call?"""
    config: Any = getattr(model, "config", None)
    text = getattr(config.get_text_config(decoder=True), "rope_parameters", "")
    return _is_of_length(text)


def on_device(model: nn.Module) -> bool:
    """Are all such rotations chosen by the device, so that a graph can hold them?"""
    found = [m for m in model.modules() if _is_of_length(getattr(m, "rope_type", ""))]
    return bool(found) and all(_LONG in m._buffers for m in found)


def _is_of_length(kind: object) -> bool:
    return any(name in str(kind) for name in _OF_LENGTH)


@functools.cache
def served(cls: Any) -> type:
    """A subclass of the rotation `cls` with its name. Its objects can be copied and pickled."""
    angles = inspect.unwrap(cls.forward)  # without transformers' comparison

    @torch.no_grad()
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        long = getattr(self, _LONG, None)
        if long is None:
            return cls.forward(self, x, position_ids)
        device = position_ids.device
        chosen = torch.where(
            position_ids.max() >= _boundary(self),
            (long if long.is_floating_point() else long.view(torch.float32)).to(device),
            self.original_inv_freq.to(device),
        )
        return angles(_With(self, chosen), x, position_ids)

    return subclass(cls, {"forward": forward}, (served, cls))


class _With:
    """A rotation with other frequencies. Its own are not written, for other threads read them."""

    def __init__(self, module: Any, inv_freq: Tensor) -> None:
        self.module, self.inv_freq = module, inv_freq

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _boundary(module: Any) -> int:
    """The first position of long texts."""
    first: int = module.config.rope_parameters["original_max_position_embeddings"]
    return first


def _take(module: nn.Module) -> bool:
    """Give a rotation by longrope the frequencies of long texts. Returns whether it has them."""
    known = getattr(module, "rope_type", None) == "longrope"
    if not known or is_replaced(module) or _LONG in module._buffers:
        return False
    with alone():
        long = answer(_tried, module)
    if long is not None:
        module.register_buffer(_LONG, long, persistent=False)
    return long is not None


def _tried(module: Any) -> Tensor | None:
    """`_LONG` of a module; None where its own code gives other angles on a side of the boundary."""
    own: Any = type(module)
    ours: Any = served(own)
    if "inv_freq" not in inspect.unwrap(own.forward).__code__.co_names:
        return None  # it makes frequencies of its own
    twin, with_long = copy.deepcopy(module), copy.deepcopy(module)
    device, first = module.inv_freq.device, _boundary(module)
    long, short = (
        (torch.zeros(1, device=device), torch.tensor([[1, longest]], device=device))
        for longest in (first, first - 1)
    )
    buffer = twin.inv_freq
    own.forward(twin, *long)
    found = twin.inv_freq.clone()
    if twin.inv_freq is not buffer:
        # transformers before 5.24 computes them anew, in float32: as integers they stay as they are
        # where the dtype of the model is changed. Later ones are written to the buffer, in its
        # dtype.
        found = found.view(torch.int32)
    with_long.register_buffer(_LONG, found, persistent=False)
    same = all(
        torch.equal(theirs, got)
        for given in (long, short)
        for theirs, got in zip(
            own.forward(twin, *given), ours.forward(with_long, *given), strict=True
        )
    )
    return found if same else None
