"""How far from the exact result a kernel of Mamba-2's scan may be.

Written as `attnops.ops.recurrent.bound`. For a row of a head's state, E and N are the lengths as
there, Z the largest |dt + dt_bias| of the head and m its largest |step a|: an exponential, or a
softplus, is off by the absolute error of its argument. With
e = a (sqrt(Dk) + 16 + 128 m + 2 Z (1 + m)) and, of a token, v = step |x| |b| and f = exp(step a),
E = sqrt((f E)^2 + delta^2) with

    delta = (4 u + e) v + e f N + s |b|
    delta(output) = |c| (E + (4 u + e) N) + s (1 + sqrt(Dk) |c| + 64 X) + 2 a |d x| + u |output|

and X the largest |step x|: the weights of 64 tokens of a chunk are rounded. The state is off as
above.

Gradients of states go the other way by the same factors, each with its own E and N. Those of tokens
are products of the two, in which either is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.rounding import Allowed, Results, in_float64, roundoff, step
from attnops.ops.recurrent.kept_reference import SCAN_KEEPS, over_accepted
from attnops.ops.recurrent.reference import (
    packed,
    padded,
    raw_steps,
    rows_of,
    scan_inputs,
    state_before,
    state_of,
)


def _scan(call: Any, expected: Results) -> Allowed:
    dtype, dk = call.x.dtype, call.b.shape[2]
    if not (call.output.numel() and call.max_seqlen_q) and call.accepted is None:
        return {}
    u, half = roundoff(dtype), step(dtype)
    a = min(u, roundoff(torch.float32))
    call = in_float64(call)
    rows, there = rows_of(call)
    inputs: tuple[Tensor, ...] = scan_inputs(call, rows, there)
    near, kept = _near_scan(call, rows, there, a), 0
    if call.accepted is not None:
        kept = call.kept_x.shape[1]
        before, *at = over_accepted(call, c="kept_b", **SCAN_KEEPS)
        near = torch.maximum(near, _near_scan(before, at[0], at[1], a))
        both = zip(scan_inputs(before, *at), inputs, strict=True)
        inputs = tuple(torch.cat(pair, 1) for pair in both)
    x, dt, _, c = inputs
    stepped, reads, allowed = dt[..., None] * x, c.norm(dim=-1, keepdim=True), list[Tensor]()
    states = _scan_states(call, inputs, state_before(call), u, near, half)
    errors, sizes = zip(*states, strict=True)
    for read_by, error, size in zip(reads.unbind(1), errors[1:], sizes[1:], strict=True):
        allowed.append(read_by * (error + (4 * u + near) * size))
    error = errors[-1 if call.accepted is None else kept]
    rest = half * (1 + sqrt(dk) * reads + 64 * stepped.abs().amax(1, keepdim=True))
    if call.d is not None:
        rest = rest + 2 * a * (call.d[:, None] * x).abs()
    off = (torch.stack(allowed, 1) + rest)[:, kept:]
    off = packed(off, rows, there, len(call.output))
    exact = expected["output"].double().abs()
    rounded = roundoff(torch.float32) * expected["state"].double().abs()
    return {"output": off + u * exact, "state": error[..., None] + rounded}


def _near_scan(call: Any, rows: Tensor, there: Tensor, a: float) -> Tensor:
    """e, `[Hv, 1]`."""
    raw = raw_steps(call, rows, there).abs()
    if not raw.shape[1]:
        return torch.zeros_like(call.a)[:, None]
    raw = raw.amax((0, 1))
    most = (scan_inputs(call, rows, there)[1] * call.a).abs().amax((0, 1))
    softplus = 2 * raw * (1 + most)
    near: Tensor = a * (sqrt(call.b.shape[2]) + 16 + 128 * most + softplus)
    return near[:, None]


def _scan_states(
    call: Any, inputs: tuple[Tensor, ...], state: Tensor, u: float, near: Tensor, half: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """(E, N) before the first token and after each. inputs: as `scan_inputs`. near: e."""
    x, dt, b, _ = (y.unbind(1) for y in inputs)
    size = state.norm(dim=-1)
    error = torch.zeros_like(size)
    yield error, size
    for t in range(len(b)):
        left = (dt[t] * call.a).exp()[..., None]
        stepped, written = dt[t][..., None] * x[t], b[t].norm(dim=-1, keepdim=True)
        before, added = left * size, stepped.abs() * written
        off = (4 * u + near) * added + near * before + half * written
        error = torch.hypot(left * error, off)
        state = left[..., None] * state + stepped[..., None] * b[t][..., None, :]
        size = torch.maximum(torch.hypot(before, added), state.norm(dim=-1))
        yield error, size


def _scan_gradient(call: Any, expected: Results) -> Allowed:
    if not (call.x.numel() and call.max_seqlen_q):
        return {}
    u, given = roundoff(call.x.dtype), call
    a = min(u, roundoff(torch.float32))
    call = in_float64(call)
    rows, there = rows_of(call)
    x, dt, b, c = inputs = scan_inputs(call, rows, there)
    near = 4 * u + _near_scan(call, rows, there, a)
    states = [*_scan_states(call, inputs, state_of(call), u, near, 0.0)]
    of_output = padded(call.grad_output, rows, there, torch.float64).abs()
    size, worst = call.grad_after.norm(dim=-1), list[tuple[Tensor, ...]]()
    error = torch.zeros_like(size)
    for t in reversed(range(call.max_seqlen_q)):
        left, g = (dt[:, t] * call.a).exp()[..., None], of_output[:, t]
        values = dt[:, t, :, None] * x[:, t].abs()
        (off_before, before), (off_after, after) = states[t], states[t + 1]
        asked = g * c[:, t].norm(dim=-1, keepdim=True)
        error = error + near * (size + asked)
        size = torch.hypot(size, asked)
        off_values = b[:, t].norm(dim=-1, keepdim=True) * error
        off_held = left * (error * before + size * (off_before + near * before))
        off_c = (g * (off_after + near * after)).sum(-1)
        worst.append((off_values, (values * error).sum(-1), off_c, off_held.sum(-1)))
        error, size = left * error, left * size
    off_values, off_b, off_c, off_held = (torch.stack(y[::-1], 1) for y in zip(*worst, strict=True))
    # Gradients of decay are sums of those of the tokens after them in a chunk.
    off_decay = off_held.amax((0, 1)) * min(len(worst), 64)
    of_x = padded(expected["grad_x"], rows, there, torch.float64).abs()
    off_dt = (off_values * x.abs()).sum(-1) + call.a.abs() * off_decay
    off_dt = off_dt + near[:, 0] * padded(expected["grad_dt"], rows, there, torch.float64).abs()
    group = call.x.shape[1] // call.b.shape[1]
    allowed: dict[str, float | Tensor] = {
        "x": float((off_values * dt[..., None] + near * of_x).amax()),
        "dt": float(off_dt.amax()),
        "a": off_decay * dt.sum((0, 1)),
        "b": float(off_b.amax()) * group,
        "c": float(off_c.amax()) * group,
        "d": near[:, 0] * (of_output * x.abs()).sum((0, 1, 3)),
        "dt_bias": off_dt.sum((0, 1)),
        "state": error[..., None],
    }
    found = dict[str, float | Tensor]()
    for name, off in allowed.items():
        like = given.grad_after if name == "state" else getattr(given, name)
        if like is not None:
            exact = expected[f"grad_{name}"].double().abs()
            found[f"grad_{name}"] = off + 2 * (roundoff(like.dtype) * exact + step(like.dtype))
    return found


BOUNDS = {"mamba2_scan": _scan, "mamba2_scan_backward": _scan_gradient}
