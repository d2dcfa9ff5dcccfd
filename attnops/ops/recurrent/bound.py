"""How far from the exact result a kernel of a layer that carries a state may be.

Written with u, a and s as in `attnops.ops.linear.bound`.

The gated delta rule. For a column of a head's state, E is the length of its error vector, and N
that of the vector or, where that is more, of the root of the sum of squares of what was added to it
(its parts may cancel). A token with key k, its value v, f = exp(decay) and b = beta first gives
both a factor f max(1, |1 - b k @ k|), the most by which the rule lengthens a vector. Its new value
is off by

    delta = b ((4 u + a (sqrt(Dk) + 16 + 128 m)) (|v| + |k| f N) + s (1 + sqrt(Dk) f N))

with m the largest |decay| of the head: chunks of 64 tokens take differences of sums of as many.
Then E = sqrt(E^2 + (|k| delta)^2), for roundings of different tokens are independent, and

    delta(output) = |q| (E + (4 u + a (sqrt(Dk) + 16 + 128 m)) N) + s (1 + sqrt(Dk) N) + u |output|

and the state by E and its rounding to float32.

The scan of Mamba-2. For a row of a head's state, E and N are the lengths as above, Z the largest
|dt + dt_bias| of the head and m its largest |step a|: an exponential, or a softplus, is off by the
absolute error of its argument. With e = a (sqrt(Dk) + 16 + 128 m + 2 Z (1 + m)) and, of a token, v
= step |x| |b| and f = exp(step a), E = sqrt((f E)^2 + delta^2) with

    delta = (4 u + e) v + e f N + s |b|
    delta(output) = |c| (E + (4 u + e) N) + s (1 + sqrt(Dk) |c| + 64 X) + 2 a |d x| + u |output|

and X the largest |step x|: the weights of 64 tokens of a chunk are rounded. The state is off as
above.

The convolution sums W products, of size S in all: its result y is off by 2 (u R + s) + a (sqrt(W) +
8) S, and that of silu, whose slope is below 1.1, by 1.1 times that, and by (3 u + 8 a) |y| more.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.record import changed
from attnops.core.rounding import Allowed, Results, roundoff, step
from attnops.ops.recurrent.reference import (
    causal_conv1d,
    inputs_of,
    padded,
    put,
    read,
    rows_of,
    scan_inputs,
    state_before,
)


def _wide(call: Any) -> Any:
    tensors = {a.name: getattr(call, a.name) for a in call.spec.args if a.tensor}
    floats = {n: x for n, x in tensors.items() if x is not None and x.is_floating_point()}
    return changed(call, **{n: x.double() for n, x in floats.items()})


def _rule(call: Any, expected: Results) -> Allowed:
    dtype, dk = call.query.dtype, call.query.shape[2]
    if not (call.output.numel() and call.max_seqlen_q):
        return {}
    u, half = roundoff(dtype), step(dtype)
    most = call.decay.double().abs().amax(0)[None, :, None]
    near = 4 * u + min(u, roundoff(torch.float32)) * (sqrt(dk) + 16 + 128 * most)
    call = _wide(call)
    rows, there = rows_of(call)
    q, k, v, decay, beta = (x.unbind(1) for x in inputs_of(call, rows, there))
    state = state_before(call)
    size = state.norm(dim=2)
    error, allowed = torch.zeros_like(size), list[Tensor]()
    for t in range(call.max_seqlen_q):
        left, b = decay[t].exp()[..., None], beta[t][..., None]
        length = k[t].norm(dim=-1, keepdim=True)
        state = state * left[..., None]
        delta = (v[t] - read(state, k[t])) * b
        state = state + k[t][..., None] * delta[..., None, :]
        before = left * size
        off = near * (v[t].abs() + length * before) + half * (1 + sqrt(dk) * before)
        grows = left * (1 - b * length.square()).abs().clamp(min=1.0)
        error = torch.hypot(grows * error, length * b.abs() * off)
        size = torch.hypot(grows * size, length * b.abs() * v[t].abs())
        size = torch.maximum(size, state.norm(dim=2))
        reads = q[t].norm(dim=-1, keepdim=True)
        allowed.append(reads * (error + near * size) + half * (1 + sqrt(dk) * size))
    off = torch.zeros_like(call.output)
    put(changed(call, output=off), torch.stack(allowed, 1), rows, there)
    exact = expected["output"].double().abs()
    rounded = roundoff(torch.float32) * expected["state"].double().abs()
    return {"output": off + u * exact, "state": error[:, :, None] + rounded}


def _scan(call: Any, expected: Results) -> Allowed:
    dtype, dk = call.x.dtype, call.b.shape[2]
    if not (call.output.numel() and call.max_seqlen_q):
        return {}
    u, half = roundoff(dtype), step(dtype)
    a = min(u, roundoff(torch.float32))
    call = _wide(call)
    rows, there = rows_of(call)
    x, dt, b, c = scan_inputs(call, rows, there)
    raw = padded(call.dt, rows, there, dt.dtype)
    raw = raw if call.dt_bias is None else raw + call.dt_bias
    most = (dt * call.a).abs().amax((0, 1))
    softplus = 2 * raw.abs().amax((0, 1)) * (1 + most)
    near = a * (sqrt(dk) + 16 + 128 * most + softplus)[:, None]
    left = (dt * call.a).exp()[..., None]
    values = dt[..., None] * x
    reads, written = c.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    added = values.abs() * written
    state = state_before(call)
    size = state.norm(dim=-1)
    error, allowed = torch.zeros_like(size), list[Tensor]()
    for t in range(call.max_seqlen_q):
        before = left[:, t] * size
        off = (4 * u + near) * added[:, t] + near * before + half * written[:, t]
        error = torch.hypot(left[:, t] * error, off)
        outer = values[:, t, ..., None] * b[:, t, :, None]
        state = left[:, t, ..., None] * state + outer
        size = torch.maximum(torch.hypot(before, added[:, t]), state.norm(dim=-1))
        allowed.append(reads[:, t] * (error + (4 * u + near) * size))
    rest = half * (1 + sqrt(dk) * reads + 64 * values.abs().amax(1, keepdim=True))
    if call.d is not None:
        rest = rest + 2 * a * (call.d[:, None] * x).abs()
    off = torch.zeros_like(call.output)
    put(changed(call, output=off), torch.stack(allowed, 1) + rest, rows, there)
    exact = expected["output"].double().abs()
    rounded = roundoff(torch.float32) * expected["state"].double().abs()
    return {"output": off + u * exact, "state": error[..., None] + rounded}


def _conv(call: Any, expected: Results) -> Allowed:
    u, half, width = roundoff(call.x.dtype), step(call.x.dtype), call.weight.shape[1]
    a = min(u, roundoff(torch.float32))
    call = _wide(call)

    def summed(**parts: Tensor | None) -> Tensor:
        """What the convolution gives of these in place of its own tensors."""
        output = torch.empty_like(call.output)
        own = {"state": call.state.clone(), "output": output}
        causal_conv1d(changed(call, activation="", **own | parts))
        return output

    positive = {n: getattr(call, n).abs() for n in ("x", "weight", "state")}
    squares = {n: x.square() for n, x in positive.items()}
    bias = None if call.bias is None else call.bias.abs()
    y, sizes = summed().abs(), summed(**positive, bias=bias)
    partial = y + summed(**squares, bias=None if bias is None else bias.square()).sqrt()
    off = 2 * (u * partial + half) + a * (sqrt(width) + 8) * sizes
    if call.activation:
        off = 1.1 * off + (3 * u + 8 * a) * y + half
    return {"output": off}


BOUNDS = {"gated_delta_rule": _rule, "mamba2_scan": _scan, "causal_conv1d": _conv}
