"""Numbers of a request, such as its temperature, in tensors.

Requests that differ in these numbers alone share a graph. transformers' own code computes with a
`Number` in the place of the Python number, and gets the same bits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

FIELDS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
    RepetitionPenaltyLogitsProcessor: "penalty",
}
"""The number of each processor. Others, such as `top_k`, are sizes, and constants of a graph."""

# A number that all of these processors take. To divide by it, to multiply by the float32
# reciprocal of its float32, and by that of its float64 gives three results.
_TRIAL = 0.5291543869290884


class Number:
    """A Python number n in `scores * n`, `n * scores`, `scores / n` and `1 - n`, of float32 scores.

    torch rounds a Python number to float32 before it computes. Where scores on a GPU are divided
    by a Python number, they are multiplied by its reciprocal; by a tensor they are divided.
    Any other use raises TypeError.

    device: of the tensors. The number is 1 until `set` gives another.
    """

    def __init__(self, device: torch.device) -> None:
        def one() -> Tensor:
            return torch.ones((), dtype=torch.float32, device=device)

        self._one, self._value, self._reciprocal, self._rest = one(), one(), one(), one().zero_()

    def set(self, number: float) -> None:
        """Stand for this number from now on. The tensors keep their addresses."""
        self._value.fill_(_float32(number).item())
        # On a GPU the very reciprocal that torch multiplies by, however a version rounds it.
        torch.div(self._one, number, out=self._reciprocal)
        self._rest.fill_(_float32(1 - number).item())

    def __mul__(self, scores: Any) -> Any:
        return scores * self._value if isinstance(scores, Tensor) else NotImplemented

    __rmul__ = __mul__

    def __rtruediv__(self, scores: Any) -> Any:
        if not isinstance(scores, Tensor):
            return NotImplemented
        return scores / self._value if scores.device.type == "cpu" else scores * self._reciprocal

    def __rsub__(self, one: Any) -> Any:
        return self._rest if type(one) is int and one == 1 else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("a number that a graph reads from a tensor has no value in Python")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __hash__ = None  # type: ignore[assignment]


def field_of(processor: Any, device: torch.device) -> str | None:
    """The field of a processor for which a `Number` may stand. None: its numbers are constants."""
    kind: Any = type(processor)
    field = FIELDS.get(kind)
    if field is None or type(vars(processor).get(field)) not in (int, float):
        return None
    return field if is_theirs(kind) and _holds(kind, kind.__call__, device) else None


def is_theirs(kind: type) -> bool:
    """Was `__call__` of a processor defined in the file of its class? False where somebody has
    replaced it."""
    code: Any = kind.__call__
    return getattr(code, "__globals__", None) is vars(sys.modules[kind.__module__])


@functools.cache
def _holds(kind: type, code: Callable[..., Any], device: torch.device) -> bool:
    """Does this code give the same bits with a `Number`?

    It is tried once: another transformers may have other code.
    """
    try:
        theirs, ours = kind(_TRIAL), kind(_TRIAL)
        number = Number(device)
        number.set(_TRIAL)
        setattr(ours, FIELDS[kind], number)
        tokens = torch.arange(0, 1024, 3, device=device).view(2, -1)
        scores = torch.arange(2048, dtype=torch.float32, device=device).sin().mul(9).view(2, -1)
        return torch.equal(theirs(tokens, scores), ours(tokens, scores))
    except (AttributeError, TypeError):
        return False


def _float32(number: float) -> Tensor:
    """`[]`, as torch rounds a Python number: one too large becomes infinity."""
    return torch.tensor(number, dtype=torch.float64, device="cpu").float()
