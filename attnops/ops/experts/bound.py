"""How far from the exact result a kernel of the experts of a mixture, or of their routing, may be.

Written with u, a, and with R, S and s of a product, as in `attnops.ops.linear.bound`.

Experts of a mixture: nothing is rounded before the first product. Of the first product,

    delta(y) = 2 (u R + s) + a (sqrt(In) + 8) S

delta(h) follows as above with 5 u, and 3 s more. The second product, of row w and weight g of the
choice, gives with R and S of h and w,

    delta(output) = sqrt(sum g^2 (sum delta(h)^2 w^2 + (4 (u R + s))^2)) + sum |g| a (sqrt(Inner) +
    sqrt(K) + 8) S + u |output| + (K + 1) s

The routing of a mixture chooses the exact experts. With L the largest finite logit,

    delta(weight) = (2 u + a (2 sqrt(E) + 16 + 4 L)) |weight| + s

for the exponent of a logit less another is rounded to a L; exponentials, sums and quotients have
some roundings each. 2 u: a conversion to the dtype may cut off.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from attnops.core.rounding import Allowed, Results, largest, product, roundoff, step
from attnops.ops.experts.mxfp4_reference import decoded_call
from attnops.ops.experts.reference import gated


def _experts(t: Any, results: Results) -> Allowed:
    expected, index, x = results["output"], t.top_k_index, t.x.double()
    (count, _, inner), k, u = t.down.shape, index.shape[1], roundoff(t.x.dtype)
    a, half = min(u, roundoff(torch.float32)), step(t.x.dtype)
    total = u * expected.double().abs() + (k + 1) * half
    squares = torch.zeros_like(expected, dtype=torch.float64)

    for e in index.unique().tolist():
        if not 0 <= e < count:
            continue
        # A wide copy of one expert at a time.
        weight = torch.where(index == e, t.top_k_weights.double().abs(), 0.0).sum(1)[:, None]
        first, second = t.gate_up[e].double().T, t.down[e].double().T
        bias, last = (
            x.new_zeros(()) if b is None else b[e].double() for b in (t.gate_up_bias, t.down_bias)
        )
        y, partial, sizes = product(x, first, bias)
        off = 2 * (u * partial + half) + a * (sqrt(x.shape[1]) + 8) * sizes
        (gate, up), (off, off_up) = (
            (z[..., ::2], z[..., 1::2]) if t.interleaved else z.chunk(2, -1) for z in (y, off)
        )
        h = gated(t, y, t.x.dtype)
        if t.limit:
            gate, up = gate.clamp(max=t.limit), up.clamp(-t.limit, t.limit)
        gate, up = gate.abs(), up.abs() + abs(t.offset)
        off = 1.13 * off * (up + off_up) + gate * off_up + (5 * u + 8 * a) * gate * up + 3 * half
        _, partial, sizes = product(h, second, last)
        squares += weight.square() * (
            off.square() @ second.square() + (4 * (u * partial + half)).square()
        )
        total += weight * a * (sqrt(inner) + sqrt(k) + 8) * sizes
    return {"output": total + squares.sqrt()}


def _route(call: Any, expected: Results) -> Allowed:
    logits, dtype = call.logits, call.weights.dtype
    a = min(roundoff(logits.dtype), roundoff(torch.float32))
    share = 2 * roundoff(dtype) + a * (2 * sqrt(logits.shape[1]) + 16 + 4 * largest(logits))
    least = abs(call.scale) * torch.finfo(torch.float32).tiny
    return {"weights": share * expected["weights"].double().abs() + step(dtype) + least}


def _four_bits(call: Any, expected: Results) -> Allowed:
    return _experts(decoded_call(call), expected)


BOUNDS = {"experts": _experts, "mxfp4_experts": _four_bits, "route": _route}
