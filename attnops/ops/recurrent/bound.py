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

and the state by E and its rounding to float32. Gradients of states go the other way by the same
factors, each with its own E and N. Those of tokens are products of the two, in which either is off;
each may have the largest error of its kind.

The convolution sums W products, of size S in all: its result y is off by 2 (u R + s) + a (sqrt(W) +
8) S, and that of silu, whose slope is below 1.1, by 1.1 times that, and by (3 u + 8 a) |y| more.
Its gradient g is off by 2 (u |g| + s), and sums of n products, of size S in all, by a
(sqrt(n) + 8) S, and by what the slopes of silu are off: 0.5 times what y is off, and 16 a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.record import changed, values
from attnops.core.rounding import Allowed, Results, in_float64, roundoff, step
from attnops.ops.recurrent import scan_bound
from attnops.ops.recurrent.kept_reference import RULE_KEEPS, over_accepted
from attnops.ops.recurrent.reference import (
    causal_conv1d,
    causal_conv1d_backward,
    convolved,
    inputs_of,
    laid_out,
    packed,
    padded,
    read,
    rows_of,
    state_before,
    state_of,
    to_one,
)


def _near(call: Any) -> Tensor:
    """4 u + a (sqrt(Dk) + 16 + 128 m), `[1, Hv, 1]`."""
    u, dk = roundoff(call.query.dtype), call.query.shape[2]
    decay = call.decay
    if getattr(call, "kept_decay", None) is not None:
        decay = torch.cat([decay, call.kept_decay.flatten(0, 1)])
    most: Tensor = decay.double().abs().amax(0)[None, :, None]
    return 4 * u + min(u, roundoff(torch.float32)) * (sqrt(dk) + 16 + 128 * most)


def _states(
    inputs: Sequence[Tensor], state: Tensor, near: Tensor, half: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(the states, E, N) before the first token and after each."""
    _, k, v, decay, beta = (x.unbind(1) for x in inputs)
    size = state.norm(dim=2)
    error = torch.zeros_like(size)
    yield state, error, size
    for t in range(len(k)):
        left, b = decay[t].exp()[..., None], beta[t][..., None]
        length = k[t].norm(dim=-1, keepdim=True)
        state = state * left[..., None]
        delta = (v[t] - read(state, k[t])) * b
        state = state + k[t][..., None] * delta[..., None, :]
        before = left * size
        off = near * (v[t].abs() + length * before) + half * (1 + sqrt(k[t].shape[-1]) * before)
        grows = left * (1 - b * length.square()).abs().clamp(min=1.0)
        error = torch.hypot(grows * error, length * b.abs() * off)
        size = torch.hypot(grows * size, length * b.abs() * v[t].abs())
        size = torch.maximum(size, state.norm(dim=2))
        yield state, error, size


def _rule(call: Any, expected: Results) -> Allowed:
    dtype, dk = call.query.dtype, call.query.shape[2]
    if not (call.output.numel() and call.max_seqlen_q) and call.accepted is None:
        return {}
    u, half, near = roundoff(dtype), step(dtype), _near(call)
    call = in_float64(call)
    rows, there = rows_of(call)
    inputs: Sequence[Tensor] = inputs_of(call, rows, there)
    kept = 0
    if call.accepted is not None:
        before, *where = over_accepted(call, query="kept_key", **RULE_KEEPS)
        of_kept, kept = inputs_of(before, *where), call.kept_key.shape[1]
        inputs = [torch.cat(pair, 1) for pair in zip(of_kept, inputs, strict=True)]
    reads, allowed = inputs[0].norm(dim=-1, keepdim=True).unbind(1), list[Tensor]()
    _, errors, sizes = zip(*_states(inputs, state_before(call), near, half), strict=True)
    for q, error, size in zip(reads, errors[1:], sizes[1:], strict=True):
        allowed.append(q * (error + near * size) + half * (1 + sqrt(dk) * size))
    error = errors[-1 if call.accepted is None else kept]
    off = packed(torch.stack(allowed, 1)[:, kept:], rows, there, len(call.output))
    exact = expected["output"].double().abs()
    rounded = roundoff(torch.float32) * expected["state"].double().abs()
    return {"output": off + u * exact, "state": error[:, :, None] + rounded}


def _rule_gradient(call: Any, expected: Results) -> Allowed:
    if not (call.value.numel() and call.max_seqlen_q):
        return {}
    near, given = _near(call), call
    call = in_float64(call)
    rows, there = rows_of(call)
    inputs = inputs_of(call, rows, there)
    before = [*_states(inputs, state_of(call), near, 0.0)]
    q, k, v, decay, beta = (x.unbind(1) for x in inputs)
    of_output = padded(call.grad_output, rows, there, torch.float64).abs().unbind(1)
    size = call.grad_after.norm(dim=2)
    error, worst = torch.zeros_like(size), list[tuple[Tensor, ...]]()
    for t in reversed(range(len(k))):
        left, b = decay[t].exp()[..., None], beta[t][..., None].abs()
        length, g = k[t].norm(dim=-1, keepdim=True), of_output[t]
        _, off_after, after = before[t + 1]
        _, off_state, state = before[t]
        off_after, off_state = off_after + near * after, left * (off_state + near * state)
        state, reads = left * state, q[t].norm(dim=-1, keepdim=True) * g
        size = torch.hypot(size, reads)
        added = near * (size + reads)
        off = error + added
        missed, off_missed = v[t].abs() + length * state, length * off_state
        of_v, off_v = b * length * size, b * length * off
        off_k = b * (off * missed + size * off_missed) + off_state * of_v + state * off_v
        off_beta = length * (off * missed + size * off_missed)
        worst.append((off_after * g, off_k, off_v, off * state + size * off_state, off_beta))
        grows = left * (1 - b * length.square()).abs().clamp(min=1.0)
        error = torch.hypot(grows * error, left * (1 + b * length.square()) * added)
        size = grows * size
    found = _of_inputs(call, worst, rows[there])
    allowed: list[float | Tensor] = [*found, error[:, :, None]]
    kinds = *values(given)[:5], given.grad_after
    return {
        name: off + 2 * (roundoff(x.dtype) * exact.double().abs() + step(x.dtype))
        for (name, exact), off, x in zip(expected.items(), allowed, kinds, strict=True)
    }


def _of_inputs(call: Any, worst: list[Any], tokens: Tensor) -> list[float]:
    """The largest errors of the gradients of query, key, value, decay and beta. worst: by token,
    those of columns of the state. tokens: the rows of all tokens."""
    by_kind = [torch.stack(x) for x in zip(*worst, strict=True)]
    off_q, off_k, off_decay, off_beta = (float(by_kind[i].sum(-1).amax()) for i in (0, 1, 3, 4))
    group = call.value.shape[1] // call.key.shape[1]
    found = [off_q * abs(call.scale) * group, off_k * group]
    if call.normalize:
        for i, x in enumerate((call.query, call.key)):
            found[i] *= 2 * float(to_one(x[tokens]).amax())
    # A gradient of decay is a sum of those of the tokens after it in a chunk.
    return [*found, float(by_kind[2].amax()), off_decay * min(len(worst), 64), off_beta]


def _conv(call: Any, expected: Results) -> Allowed:
    u, half, width = roundoff(call.x.dtype), step(call.x.dtype), call.weight.shape[1]
    a = min(u, roundoff(torch.float32))
    call = in_float64(call)

    def summed(**parts: Tensor | None) -> Tensor:
        """What the convolution gives of these in place of its own tensors."""
        output = torch.empty_like(call.output)
        own = {"state": call.state.clone(), "output": output}
        if call.accepted is not None:
            own["kept_x"] = call.kept_x.clone()
        causal_conv1d(changed(call, activation="", **own | parts))
        return output

    names = [n for n in ("x", "weight", "state", "kept_x") if getattr(call, n) is not None]
    positive = {n: getattr(call, n).abs() for n in names}
    squares = {n: x.square() for n, x in positive.items()}
    bias = None if call.bias is None else call.bias.abs()
    y, sizes = summed().abs(), summed(**positive, bias=bias)
    partial = y + summed(**squares, bias=None if bias is None else bias.square()).sqrt()
    off = 2 * (u * partial + half) + a * (sqrt(width) + 8) * sizes
    if call.activation:
        off = 1.1 * off + (3 * u + 8 * a) * y + half
    return {"output": off}


def _conv_gradient(call: Any, expected: Results) -> Allowed:
    u, half, tokens = roundoff(call.x.dtype), step(call.x.dtype), call.x.shape[0]
    a = min(u, roundoff(torch.float32))
    call = in_float64(call)
    floats = "x", "weight", "bias", "state", "grad_output", "grad_after"
    sizes = {n: None if (x := getattr(call, n)) is None else x.abs() for n in floats}
    positive = changed(call, activation="", **sizes)
    whole, place, *_ = laid_out(positive, state_of(positive))
    y = a * (sqrt(call.weight.shape[1]) + 8) * convolved(positive, whole, place)
    slope = 1.1 if call.activation else 1.0
    near = 0.5 * y + 16 * a if call.activation else torch.zeros_like(y)
    shares = positive.grad_output * (slope * a * (sqrt(tokens) + 8) + near)
    after = positive.grad_after * a * 8
    summed = causal_conv1d_backward(changed(positive, grad_output=shares, grad_after=after))
    return {
        name: off + 2 * (u * exact.abs() + half)
        for off, (name, exact) in zip(summed, expected.items(), strict=True)
    }


BOUNDS = {
    "gated_delta_rule": _rule,
    "gated_delta_rule_backward": _rule_gradient,
    **scan_bound.BOUNDS,
    "causal_conv1d": _conv,
    "causal_conv1d_backward": _conv_gradient,
}
