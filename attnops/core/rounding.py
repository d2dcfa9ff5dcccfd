"""How far rounding takes a number from the exact one: what the families' error bounds are put
together from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.core.record import changed

Allowed = dict[str, "float | Tensor"]
"""The absolute error that each result may have."""

Results = Mapping[str, Tensor]
"""The results of a call by name."""

Compared = Mapping[str, "tuple[Tensor, Tensor, float | Tensor]"]
"""What is compared in place of the whole results: (got, want, the allowed error) of each."""


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def step(dtype: torch.dtype) -> float:
    """Half the least subnormal step."""
    return roundoff(dtype) * torch.finfo(dtype).smallest_normal


def in_float64(call: Any) -> Any:
    """The call with its tensors of floats in float64."""
    tensors = {a.name: getattr(call, a.name) for a in call.spec.args if a.tensor}
    floats = {n: x for n, x in tensors.items() if x is not None and x.is_floating_point()}
    return changed(call, **{n: x.double() for n, x in floats.items()})


def largest(x: Tensor | None) -> float:
    """Largest finite absolute entry; 0 for none."""
    if x is None or x.numel() == 0 or x.dtype == torch.bool:
        return 0.0
    return float(torch.nan_to_num(x.double().abs(), nan=0.0, posinf=0.0).amax())


def product(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, R, S) of y = x @ weight + bias: its partial sums have the size R = |y| + sqrt(sum (x
    w)^2) + |bias|, its terms S in all."""
    y, sizes = x @ weight + bias, x.abs() @ weight.abs() + bias.abs()
    return y, y.abs() + (x.square() @ weight.square()).sqrt() + bias.abs(), sizes


def stored(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(`exact` as `dtype` stores it, the allowed error). A quantised dtype saturates and may be off
    by half a step, others by nothing."""
    if dtype not in QUANTISED:
        return exact, torch.zeros_like(exact)
    if dtype == torch.int8:
        return exact.clamp(-127.0, 127.0), torch.full_like(exact, 0.5 + 2**-10)
    info = torch.finfo(dtype)
    want = exact.clamp(-info.max, info.max)
    # Below the smallest normal number the steps no longer shrink. 1 + 2^-10: the division may have
    # been made in float32.
    return want, torch.clamp(want.abs(), min=info.smallest_normal) * (info.eps / 2) * (1 + 2**-10)
