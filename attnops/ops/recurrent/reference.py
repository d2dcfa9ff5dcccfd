"""References of layers that carry a state: token after token, in float32 or float64. And how packed
requests become rows of equal length."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.tensors import compact, wide
from attnops.ops.recurrent.kept_reference import RULE_KEEPS, SCAN_KEEPS, keep, over_accepted

if TYPE_CHECKING:
    from attnops.ops.recurrent.conv import CausalConv1d, CausalConv1dBackward
    from attnops.ops.recurrent.record import GatedDeltaRule, GatedDeltaRuleBackward
    from attnops.ops.recurrent.scan import Mamba2Scan

EPS = 1e-6
"""What is added to the square of a vector's length, by which it is divided."""


def gated_delta_rule(call: GatedDeltaRule) -> None:
    """The reference of `attnops.ops.gated_delta_rule`."""
    state = state_before(call)
    if call.accepted is not None:
        state = _ruled(state, *over_accepted(call, query="kept_key", **RULE_KEEPS))[1]
        call.state.copy_(state)
    if is_blank(call):
        return
    rows, there = rows_of(call)
    outputs, state = _ruled(state, call, rows, there)
    put(call, torch.stack(outputs, 1), rows, there)
    if call.accepted is None:
        call.state.copy_(state)
    else:
        keep(call, **RULE_KEEPS)


def _ruled(
    state: Tensor, call: GatedDeltaRule, rows: Tensor, there: Tensor
) -> tuple[list[Tensor], Tensor]:
    """(the outputs `[B, Hv, Dv]` of the tokens in turn, the states after them)."""
    inputs = inputs_of(call, rows, there)
    state, outputs = state.to(inputs[0].dtype), list[Tensor]()
    for q, k, v, decay, beta in zip(*(x.unbind(1) for x in inputs), strict=True):
        state = state * decay.exp()[..., None, None]
        delta = (v - read(state, k)) * beta[..., None]
        state = state + k[..., None] * delta[..., None, :]
        outputs.append(read(state, q))
    return outputs, state


def gated_delta_rule_backward(call: GatedDeltaRuleBackward) -> tuple[Tensor, ...]:
    """The reference of the gradient: token after token, from the last."""
    rows, there = rows_of(call)
    if is_blank_gradient(call):
        return rule_gradients(call, [], call.grad_after, rows, there)
    dtype = wide(call.query).dtype
    q, k, v, decay, beta = (x.unbind(1) for x in inputs_of(call, rows, there))
    of_output = padded(call.grad_output, rows, there, dtype).unbind(1)
    states = [state_of(call).to(dtype)]
    for t in range(call.max_seqlen_q):
        faded = states[t] * decay[t].exp()[..., None, None]
        delta = (v[t] - read(faded, k[t])) * beta[t][..., None]
        states.append(faded + k[t][..., None] * delta[..., None, :])
    grad, found = call.grad_after.to(dtype), list[tuple[Tensor, ...]]()
    for t in reversed(range(call.max_seqlen_q)):
        left, b = decay[t].exp()[..., None, None], beta[t][..., None]
        faded = states[t] * left
        error = v[t] - read(faded, k[t])
        of_q = read(states[t + 1].mT, of_output[t])
        grad = grad + q[t][..., None] * of_output[t][..., None, :]
        of_delta = read(grad, k[t])
        of_v = of_delta * b
        of_k = read(grad.mT, error * b) - read(faded.mT, of_v)
        grad = grad - k[t][..., None] * of_v[..., None, :]
        of_decay = (grad * faded).sum((-2, -1))
        grad = grad * left
        found.append((of_q, of_k, of_v, of_decay, (of_delta * error).sum(-1)))
    by_token = [torch.stack(x[::-1], 1) for x in zip(*found, strict=True)]
    return rule_gradients(call, by_token, grad, rows, there)


def state_of(call: Any) -> Tensor:
    """The states before the tokens of a gradient."""
    return torch.zeros_like(call.grad_after) if call.state is None else call.state


def rule_gradients(
    call: GatedDeltaRuleBackward, found: list[Tensor], of_state: Tensor, rows: Tensor, there: Tensor
) -> tuple[Tensor, ...]:
    """The results of the gradient, from those of what `inputs_of` returns, and of the states."""
    given = call.query, call.key, call.value, call.decay, call.beta
    if not found:  # there are no tokens
        return (*map(torch.zeros_like, map(compact, given)), compact(call.grad_after.clone()))
    of_q, of_k, *others = found
    heads = call.key.shape[1], -1
    both = []
    for of_x, x in ((of_q * call.scale, call.query), (of_k, call.key)):
        grad = of_x.unflatten(2, heads).sum(3)
        if call.normalize:
            x = padded(x, rows, there, grad.dtype)
            factor = to_one(x)
            one = x * factor
            grad = factor * (grad - one * (one * grad).sum(-1, keepdim=True))
        both.append(grad)
    if call.state is None:
        of_state = zero_where_tokens(call, of_state)
    tokens = call.value.shape[0]
    return (
        *(
            packed(x, rows, there, tokens).to(like.dtype)
            for x, like in zip((*both, *others), given, strict=True)
        ),
        compact(of_state.to(call.grad_after.dtype)),
    )


def state_before(call: Any) -> Tensor:
    """The states before the first tokens: 0 of fresh requests that have tokens."""
    return zero_where_tokens(call, call.state) if call.fresh else call.state


def zero_where_tokens(call: Any, states: Tensor) -> Tensor:
    """States `[B, ...]`, those of requests that have tokens replaced by 0."""
    has_tokens = call.cu_seqlens_q.diff() > 0
    return states.masked_fill(has_tokens.view(-1, *[1] * (states.dim() - 1)), 0.0)


def read(state: Tensor, x: Tensor) -> Tensor:
    """`x` `[..., Dk]` times the state `[..., Dk, Dv]`."""
    return (x[..., None, :] @ state)[..., 0, :]


def is_blank(call: Any) -> bool:
    """Has no request a token? The output is 0 then."""
    if call.output.numel() and call.max_seqlen_q and call.state.shape[0]:
        return False
    call.output.zero_()
    return True


def is_blank_gradient(call: Any) -> bool:
    """Has no request a token in the call of a gradient?"""
    return not (call.grad_output.numel() and call.max_seqlen_q and call.grad_after.shape[0])


def rows_of(call: Any) -> tuple[Tensor, Tensor]:
    """(the number of a request's token among all, bool: is there one?), `[B, max_seqlen_q]`."""
    starts = call.cu_seqlens_q[:-1, None].long()
    at = starts + torch.arange(call.max_seqlen_q, device=starts.device)
    there = at < call.cu_seqlens_q[1:, None]
    return torch.where(there, at, 0), there


def inputs_of(
    call: Any, rows: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, decay and beta `[B, max_seqlen_q, Hv, ...]`, normalised and scaled.
    They are 0 past a request's last token: such positions do not change the state."""
    given = (call.query, call.key, call.value, call.decay, call.beta)
    q, k, v, decay, beta = (padded(x, rows, there, wide(call.query).dtype) for x in given)
    if call.normalize:
        q, k = q * to_one(q), k * to_one(k)
    group = v.shape[2] // k.shape[2]
    q, k = ((x.repeat_interleave(group, 2)) for x in (q * call.scale, k))
    return q, k, v, decay, beta


def padded(x: Tensor, rows: Tensor, there: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of `x` as `[B, max_seqlen_q, ...]`, 0 where there is none."""
    at = there.reshape(*there.shape, *[1] * (x.dim() - 1))
    return torch.where(at, x[rows].to(dtype), 0.0)


def to_one(x: Tensor) -> Tensor:
    """What makes vectors one long."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def put(call: Any, found: Tensor, rows: Tensor, there: Tensor) -> None:
    """Write the results `[B, max_seqlen_q, ...]` to the tokens' rows of the output, and 0 to the
    others."""
    call.output.copy_(packed(found, rows, there, call.output.shape[0]))


def packed(found: Tensor, rows: Tensor, there: Tensor, tokens: int) -> Tensor:
    """`[B, max_seqlen_q, ...]` as `[T, ...]`, 0 where there is no token."""
    # Results of no token go to a row past the last, so that no size follows from the data.
    whole = found.new_zeros((tokens + 1, *found.shape[2:]))
    whole[torch.where(there, rows, tokens).flatten()] = found.flatten(0, 1)
    return whole[:tokens]


def causal_conv1d(call: CausalConv1d) -> None:
    """The reference of `attnops.ops.causal_conv1d`."""
    if call.accepted is not None:
        call.state.copy_(inputs_after(call))
    whole, place, _, after = laid_out(call, state_before(call))
    y = convolved(call, whole, place)
    y = F.silu(y) if call.activation else y
    call.output.copy_(torch.where((place < len(whole) - 1)[:, None], y, 0.0))
    if call.accepted is None:
        call.state.copy_(whole[after].transpose(1, 2))
    else:
        keep(call, x="kept_x")


def inputs_after(call: CausalConv1d) -> Tensor:
    """The last inputs `[B, C, S]` behind the accepted tokens."""
    before, rows, there = over_accepted(call, x="kept_x")
    state = call.state
    newer = padded(before.x, rows, there, state.dtype)
    whole = torch.cat([state, newer.transpose(1, 2)], 2)
    columns = torch.arange(state.shape[2], device=state.device) + there.sum(1)[:, None]
    return whole.gather(2, columns[:, None].expand_as(state))


def laid_out(call: Any, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(inputs, rows of the tokens, rows of the states before the tokens, and after them).

    Inputs `[T + B * S + 1, C]`: the S inputs of a request's state, then its tokens, then the next
    request; the last row is 0. Rows of tokens `[T]`: the last row for padding. Rows of states
    `[B, S]`.
    """
    x, starts = wide(call.x), call.cu_seqlens_q.long()
    (tokens, channels), (requests, _, kept) = x.shape, state.shape
    t = torch.arange(tokens, device=x.device)
    # Not in a view: Inductor of torch 2.11 forgets its offset.
    owner = torch.searchsorted(call.cu_seqlens_q[1:].long(), t, right=True)
    last = tokens + requests * kept
    real = owner < requests
    place = torch.where(real, t + (owner + 1) * kept, last)
    rows = torch.arange(requests * kept, device=x.device).view(requests, kept)
    before = rows + starts[:-1, None]
    whole = x.new_zeros(last + 1, channels)
    whole[place] = torch.where(real[:, None], x, 0.0)
    whole[before] = wide(state).transpose(1, 2)
    return whole, place, before, rows + starts[1:, None]


def convolved(call: Any, whole: Tensor, place: Tensor) -> Tensor:
    """What the convolution gives of such inputs, before the activation."""
    weight = wide(call.weight)
    width = weight.shape[1]
    y = whole.new_zeros(call.x.shape) if call.bias is None else wide(call.bias).expand(call.x.shape)
    for w in range(width):
        y = y + whole[(place + w - (width - 1)).clamp(min=0)] * weight[:, w]
    return y


def causal_conv1d_backward(call: CausalConv1dBackward) -> tuple[Tensor, ...]:
    """The reference of the gradient: a convolution in the other direction."""
    weight = wide(call.weight)
    whole, place, before, after = laid_out(call, state_of(call))
    last, width = len(whole) - 1, weight.shape[1]
    real = (place < last)[:, None]
    slope = torch.where(real, wide(call.grad_output), 0.0)
    if call.activation:
        y = convolved(call, whole, place)
        share = y.sigmoid()
        slope = slope * share * (1 + y * (1 - share))
    slopes = torch.zeros_like(whole)
    slopes[place] = slope
    row = torch.arange(last + 1, device=whole.device)
    grads, of_weight = torch.zeros_like(whole), list[Tensor]()
    for w in range(width):
        back = width - 1 - w
        grads = grads + slopes[(row + back).clamp(max=last)] * weight[:, w]
        of_weight.append((slope * whole[(place - back).clamp(min=0)]).sum(0))
    grads[after] += wide(call.grad_after).transpose(1, 2)
    of_state = grads[before].transpose(1, 2)
    if call.state is None:
        of_state = zero_where_tokens(call, of_state)
    return (
        torch.where(real, grads[place], 0.0).to(call.x.dtype),
        torch.stack(of_weight, 1).to(call.x.dtype),
        call.x.new_empty(0) if call.bias is None else slope.sum(0).to(call.x.dtype),
        compact(of_state.to(call.x.dtype)),
    )


def mamba2_scan(call: Mamba2Scan) -> None:
    """The reference of `attnops.ops.mamba2_scan`."""
    state = state_before(call)
    if call.accepted is not None:
        state = _scanned(state, *over_accepted(call, c="kept_b", **SCAN_KEEPS))[1]
        call.state.copy_(state)
    if is_blank(call):
        return
    rows, there = rows_of(call)
    found, state = _scanned(state, call, rows, there)
    put(call, found, rows, there)
    if call.accepted is None:
        call.state.copy_(state)
    else:
        keep(call, **SCAN_KEEPS)


def _scanned(state: Tensor, call: Mamba2Scan, rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """(the outputs `[B, tokens, Hv, Dv]`, the states after the tokens)."""
    inputs = x, dt, *_ = scan_inputs(call, rows, there)
    decay = (dt * call.a.to(dt.dtype)).exp()[..., None, None]
    state, outputs = state.to(dt.dtype), list[Tensor]()
    for x_t, dt_t, b_t, c_t, left in zip(*(y.unbind(1) for y in (*inputs, decay)), strict=True):
        state = state * left + (x_t * dt_t[..., None])[..., None] * b_t[..., None, :]
        outputs.append(read(state.mT, c_t))
    found = torch.stack(outputs, 1)
    if call.d is not None:
        found = found + x * call.d.to(x.dtype)[:, None]
    return found, state


def scan_inputs(call: Any, rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the lengths of the steps, b and c: `[B, max_seqlen_q, Hv, ...]`. Steps are 0
    past a request's last token: such positions do not change the state."""
    x, b, c = (padded(y, rows, there, wide(call.x).dtype) for y in (call.x, call.b, call.c))
    dt = raw_steps(call, rows, there)
    if call.dt_softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    dt = torch.where(there[..., None], dt.clamp(call.dt_min, call.dt_max or inf), 0.0)
    group = call.x.shape[1] // call.b.shape[1]
    return x, dt, b.repeat_interleave(group, 2), c.repeat_interleave(group, 2)


def raw_steps(call: Any, rows: Tensor, there: Tensor) -> Tensor:
    """The sums of dt and its bias, `[B, max_seqlen_q, Hv]`."""
    dt = padded(call.dt, rows, there, wide(call.x).dtype)
    return dt if call.dt_bias is None else dt + call.dt_bias.to(dt.dtype)
