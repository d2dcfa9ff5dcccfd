"""Reference linear layers: the RMS norm, the product, the gated activation and the residual, one
after the other. And that of the norm and the residual alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.tensors import wide

if TYPE_CHECKING:
    from attnops.ops.linear.norm import RmsNorm
    from attnops.ops.linear.record import Linear

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By the op's `activation`, the function of a gate."""


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` within the range of `dtype` where that is float16, whose products overflow. NaN stays."""
    if dtype != torch.float16:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most)


def linear(call: Linear) -> None:
    """The reference of `attnops.ops.linear`."""
    x = wide(call.x)
    if call.norm_weight is not None:
        x = _normed(x, call.norm_weight, call.norm_eps, call.norm_offset)
    y = F.linear(x, call.weight.to(x.dtype), None if call.bias is None else call.bias.to(x.dtype))
    if call.activation:
        gate, up = y.chunk(2, -1)
        y = GATES[call.activation](gate) * up
    call.output.copy_(y if call.residual is None else y + call.residual)


def rms_norm(call: RmsNorm) -> None:
    """The reference of `attnops.ops.rms_norm`."""
    y = _normed(wide(call.x), call.weight, call.eps, call.offset)
    if call.gate is not None:
        y = y * F.silu(call.gate.to(y.dtype))
    call.output.copy_(y if call.residual is None else y + call.residual)


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * root * (offset + weight.to(x.dtype))
