"""References of layers that carry a state: token after token, in float32 or float64. And how packed
requests become rows of equal length."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.tensors import wide

if TYPE_CHECKING:
    from attnops.ops.recurrent.conv import CausalConv1d
    from attnops.ops.recurrent.record import GatedDeltaRule
    from attnops.ops.recurrent.scan import Mamba2Scan

EPS = 1e-6
"""What is added to the square of a vector's length, by which it is divided."""


def gated_delta_rule(call: GatedDeltaRule) -> None:
    """The reference of `attnops.ops.gated_delta_rule`."""
    if is_blank(call):
        return
    rows, there = rows_of(call)
    q, k, v, decay, beta = (x.unbind(1) for x in inputs_of(call, rows, there))
    state = state_before(call).to(q[0].dtype)
    outputs = []
    for t in range(call.max_seqlen_q):
        state = state * decay[t].exp()[..., None, None]
        delta = (v[t] - read(state, k[t])) * beta[t][..., None]
        state = state + k[t][..., None] * delta[..., None, :]
        outputs.append(read(state, q[t]))
    put(call, torch.stack(outputs, 1), rows, there)
    call.state.copy_(state)


def state_before(call: Any) -> Tensor:
    """The states that the first tokens meet: 0 of fresh requests that have tokens."""
    state: Tensor = call.state
    if not call.fresh:
        return state
    begins = call.cu_seqlens_q.diff() > 0
    return state.masked_fill(begins.view(-1, *[1] * (state.dim() - 1)), 0.0)


def read(state: Tensor, x: Tensor) -> Tensor:
    """`x` `[..., Dk]` times the state `[..., Dk, Dv]`."""
    return (x[..., None, :] @ state)[..., 0, :]


def is_blank(call: Any) -> bool:
    """Has no request a token? The output is 0 then."""
    if call.output.numel() and call.max_seqlen_q:
        return False
    call.output.zero_()
    return True


def rows_of(call: Any) -> tuple[Tensor, Tensor]:
    """(the number of a request's token among all, bool: is there one?), `[B, max_seqlen_q]`."""
    starts = call.cu_seqlens_q[:-1, None].long()
    at = starts + torch.arange(call.max_seqlen_q, device=starts.device)
    there = at < call.cu_seqlens_q[1:, None]
    return torch.where(there, at, 0), there


def inputs_of(
    call: GatedDeltaRule, rows: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, decay and beta `[B, max_seqlen_q, Hv, ...]`, normalised and scaled. They
    are 0 where there is no token: the state stays as it is there."""
    given = (call.query, call.key, call.value, call.decay, call.beta)
    q, k, v, decay, beta = (padded(x, rows, there, wide(call.query).dtype) for x in given)
    group = call.value.shape[1] // call.key.shape[1]
    if call.normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    q, k = ((x.repeat_interleave(group, 2)) for x in (q * call.scale, k))
    return q, k, v, decay, beta


def padded(x: Tensor, rows: Tensor, there: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of `x` as `[B, max_seqlen_q, ...]`, 0 where there is none."""
    at = there.reshape(*there.shape, *[1] * (x.dim() - 1))
    return torch.where(at, x[rows].to(dtype), 0.0)


def put(call: Any, found: Tensor, rows: Tensor, there: Tensor) -> None:
    """Write the results `[B, max_seqlen_q, ...]` to the tokens' rows of the output, and 0 to the
    others."""
    tokens = call.output.shape[0]
    # Results of no token go to a row past the last, so that no size follows from the data.
    whole = found.new_zeros((tokens + 1, *found.shape[2:]))
    whole[torch.where(there, rows, tokens).flatten()] = found.flatten(0, 1)
    call.output.copy_(whole[:tokens])


def causal_conv1d(call: CausalConv1d) -> None:
    """The reference of `attnops.ops.causal_conv1d`."""
    x, weight = wide(call.x), wide(call.weight)
    (tokens, _), (requests, _, kept) = x.shape, call.state.shape
    ends = call.cu_seqlens_q[1:].long()
    t = torch.arange(tokens, device=x.device)
    owner = torch.searchsorted(ends, t, right=True)
    real = owner < requests
    # In front of the tokens of each request stand the inputs before them.
    place = torch.where(real, t + (owner + 1) * kept, tokens + requests * kept)
    before = torch.arange(requests * kept, device=x.device).view(requests, kept)
    whole = x.new_zeros(tokens + requests * kept + 1, x.shape[1])
    whole[place] = x
    whole[before + call.cu_seqlens_q[:-1, None]] = wide(state_before(call)).transpose(1, 2)
    width = weight.shape[1]
    y = x.new_zeros(x.shape) if call.bias is None else wide(call.bias).expand(x.shape)
    for w in range(width):
        y = y + whole[(place + w - (width - 1)).clamp(min=0)] * weight[:, w]
    y = F.silu(y) if call.activation else y
    call.output.copy_(torch.where(real[:, None], y, 0.0))
    call.state.copy_(whole[before + ends[:, None]].transpose(1, 2))


def mamba2_scan(call: Mamba2Scan) -> None:
    """The reference of `attnops.ops.mamba2_scan`."""
    if is_blank(call):
        return
    rows, there = rows_of(call)
    inputs = x, dt, *_ = scan_inputs(call, rows, there)
    decay = (dt * call.a.to(dt.dtype)).exp()[..., None, None]
    state = state_before(call).to(dt.dtype)
    outputs = []
    for x_t, dt_t, b_t, c_t, left in zip(*(y.unbind(1) for y in (*inputs, decay)), strict=True):
        state = state * left + (x_t * dt_t[..., None])[..., None] * b_t[..., None, :]
        outputs.append(read(state.mT, c_t))
    found = torch.stack(outputs, 1)
    if call.d is not None:
        found = found + x * call.d.to(x.dtype)[:, None]
    put(call, found, rows, there)
    call.state.copy_(state)


def scan_inputs(
    call: Mamba2Scan, rows: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the lengths of the steps, b and c: `[B, max_seqlen_q, Hv, ...]`. They are 0 where there is
    no token: the state stays as it is there."""
    x, dt, b, c = (
        padded(y, rows, there, wide(call.x).dtype) for y in (call.x, call.dt, call.b, call.c)
    )
    if call.dt_bias is not None:
        dt = dt + call.dt_bias.to(dt.dtype)
    if call.dt_softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    dt = torch.where(there[..., None], dt.clamp(call.dt_min, call.dt_max or inf), 0.0)
    group = call.x.shape[1] // call.b.shape[1]
    return x, dt, b.repeat_interleave(group, 2), c.repeat_interleave(group, 2)
