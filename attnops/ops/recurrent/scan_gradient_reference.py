"""The reference of the gradient of Mamba-2's scan: token after token, from the last."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import compact
from attnops.ops.recurrent.reference import (
    is_blank_gradient,
    packed,
    padded,
    raw_steps,
    read,
    rows_of,
    scan_inputs,
    state_of,
    zero_where_tokens,
)

if TYPE_CHECKING:
    from attnops.ops.recurrent.scan import Mamba2ScanBackward


def mamba2_scan_backward(call: Mamba2ScanBackward) -> tuple[Tensor, ...]:
    """The reference of the gradient of `attnops.ops.mamba2_scan`."""
    rows, there = rows_of(call)
    if is_blank_gradient(call):
        return scan_gradients(call, [], call.grad_after, rows, there)
    x, dt, *others = scan_inputs(call, rows, there)
    of_output = padded(call.grad_output, rows, there, dt.dtype).unbind(1)
    values, b, c = (y.unbind(1) for y in (x * dt[..., None], *others))
    left = (dt * call.a.to(dt.dtype)).exp().unbind(1)
    states = [state_of(call).to(dt.dtype)]
    for t in range(call.max_seqlen_q):
        added = values[t][..., None] * b[t][..., None, :]
        states.append(states[t] * left[t][..., None, None] + added)
    grad, found = call.grad_after.to(dt.dtype), list[tuple[Tensor, ...]]()
    for t in reversed(range(call.max_seqlen_q)):
        grad = grad + of_output[t][..., None] * c[t][..., None, :]
        of_b, of_c = read(grad, values[t]), read(states[t + 1], of_output[t])
        of_decay = (grad * states[t]).sum((-2, -1)) * left[t]
        found.append((read(grad.mT, b[t]), of_b, of_c, of_decay))
        grad = grad * left[t][..., None, None]
    by_token = [torch.stack(y[::-1], 1) for y in zip(*found, strict=True)]
    return scan_gradients(call, by_token, grad, rows, there)


def scan_gradients(
    call: Mamba2ScanBackward, found: list[Tensor], of_state: Tensor, rows: Tensor, there: Tensor
) -> tuple[Tensor, ...]:
    """The results of the gradient.

    found: the gradients `[B, max_seqlen_q, Hv, ...]` of step * x, of b and c, and of the logarithm
    of what a step leaves of a state; nothing where there are no tokens. of_state: of the states
    before the tokens.
    """
    none = call.x.new_empty
    if not found:
        given = call.x, call.dt, call.a, call.b, call.c, call.d, call.dt_bias
        zeros = (none(0) if y is None else torch.zeros_like(compact(y)) for y in given)
        return (*zeros, compact(call.grad_after.clone()))
    of_values, of_b, of_c, of_decay = found
    x, dt, *_ = scan_inputs(call, rows, there)
    of_output = padded(call.grad_output, rows, there, dt.dtype)
    of_step = (of_values * x).sum(-1) + of_decay * call.a.to(dt.dtype)
    of_dt = of_step * step_slopes(call, rows, there)
    of_x = of_values * dt[..., None]
    of_d, of_bias = none(0), none(0)
    if call.d is not None:
        of_x = of_x + of_output * call.d.to(dt.dtype)[:, None]
        of_d = (of_output * x).sum((0, 1, 3)).to(call.d.dtype)
    if call.dt_bias is not None:
        of_bias = of_dt.sum((0, 1)).to(call.dt_bias.dtype)
    if call.state is None:
        of_state = zero_where_tokens(call, of_state)
    groups = call.b.shape[1], -1
    of_b, of_c = (y.unflatten(2, groups).sum(3) for y in (of_b, of_c))
    tokens = call.x.shape[0]
    of_x, of_dt, of_b, of_c = (
        packed(y, rows, there, tokens).to(like.dtype)
        for y, like in ((of_x, call.x), (of_dt, call.dt), (of_b, call.b), (of_c, call.c))
    )
    of_a = (of_decay * dt).sum((0, 1)).to(call.a.dtype)
    of_state = compact(of_state.to(call.grad_after.dtype))
    return of_x, of_dt, of_a, of_b, of_c, of_d, of_bias, of_state


def step_slopes(call: Mamba2ScanBackward, rows: Tensor, there: Tensor) -> Tensor:
    """How much a step grows with its dt, `[B, max_seqlen_q, Hv]`; 0 past a limit and past a
    request's last token."""
    raw = step = raw_steps(call, rows, there)
    slope = torch.ones_like(raw)
    if call.dt_softplus:
        step, slope = torch.logaddexp(raw, torch.zeros_like(raw)), raw.sigmoid()
    within = (step >= call.dt_min) & (step <= (call.dt_max or inf))
    return torch.where(within & there[..., None], slope, 0.0)
