"""How far from the exact result a kernel of a linear layer may be.

Written with u, the unit roundoff of the dtype, and a, that of float32, or of float64 for float64.
Of row x, weight row w and gain g, with n = x g rsqrt(mean(x^2) + eps), or n = x, S = sum |n w| +
|bias| of a result y before the activation, R = |y| + sqrt(sum (n w)^2) +
|bias|, the size of its partial sums, and s half the least subnormal step,

    delta(y) = 4 (u R + s) + a (sqrt(In) + 8) S

norm, gain, their product and y itself are each rounded at most once, and roundings of different
numbers are independent. With an activation, whose slope is below 1.13, of gate y and up z,

    delta(output) = 1.13 delta(y) (|z| + delta(z)) + |y| delta(z) + (3 u + 8 a) |y z|

and with a residual r, delta(output) + u (|output| + |r|).

A norm alone is rounded before its gain and after it, and once more with a residual. With v = 2 u,
because a conversion to the dtype may cut off,

    delta(n) = (2 v + v^2 + a (sqrt(In) + 8)) |n| + 2 s (|g| + 1)
    delta(output) = delta(n) + v (|output| + delta(n)) + 2 s

and with a gate, whose SiLU is h, delta(n) is before

    delta(n h) = |h| (delta(n) + (v + 8 a) (|n| + delta(n))) + 2 s
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.rounding import Allowed, Results, product, roundoff, step


def _linear(call: Any, expected: Results) -> Allowed:
    x, dtype, width = call.x.double(), call.x.dtype, call.x.shape[1]
    u = roundoff(dtype)
    a = min(u, roundoff(torch.float32))
    if call.norm_weight is not None:
        x = x * _factor(x, call.norm_weight.double() + call.norm_offset, call.norm_eps)
    y, partial, sizes = product(
        x, call.weight.double().T, x.new_zeros(()) if call.bias is None else call.bias.double()
    )
    off = 4 * (u * partial + step(dtype)) + a * (sqrt(width) + 8) * sizes
    if call.activation:
        (gate, up), (off, off_up) = y.abs().chunk(2, -1), off.chunk(2, -1)
        off = 1.13 * off * (up + off_up) + gate * off_up + (3 * u + 8 * a) * gate * up
    if call.residual is not None:
        off = off + u * (expected["output"].abs() + call.residual.double().abs())
    return {"output": off}


def _rms_norm(call: Any, expected: Results) -> Allowed:
    x, dtype, width = call.x.double(), call.x.dtype, call.x.shape[1]
    v, s = 2 * roundoff(dtype), 2 * step(dtype)
    a = min(roundoff(dtype), roundoff(torch.float32))
    gain = call.weight.double() + call.offset
    n = (x * _factor(x, gain, call.eps)).abs()
    off = (2 * v + v * v + a * (sqrt(width) + 8)) * n + s * (gain.abs() + 1)
    if call.gate is not None:
        size = torch.nn.functional.silu(call.gate.double()).abs()
        off = size * (off + (v + 8 * a) * (n + off)) + s
    if call.residual is not None:
        off = off + v * (expected["output"].abs() + off) + s
    return {"output": off}


def _factor(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """What the norm multiplies a row by."""
    return gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


BOUNDS = {"linear": _linear, "rms_norm": _rms_norm}
