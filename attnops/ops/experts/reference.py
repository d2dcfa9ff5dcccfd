"""Reference of the experts of a mixture: every token's experts one after the other, in float32 or
float64.

In float16, which ends at 65,504, what an expert computes saturates: gates, factors, what they make
together, and its result. Rounded to an infinity they would make NaN of each other, or of their sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.tensors import wide
from attnops.ops.linear.reference import GATES, saturated

if TYPE_CHECKING:
    from attnops.ops.experts.record import Experts


def experts(call: Experts) -> None:
    """The reference of `attnops.ops.experts`."""
    x, index = wide(call.x), call.top_k_index
    total, weights = x.new_zeros(call.output.shape), call.top_k_weights.to(x.dtype)
    for e in range(call.gate_up.shape[0]):
        weight = torch.where(index == e, weights, 0.0).sum(1)
        bias = None if call.gate_up_bias is None else call.gate_up_bias[e].to(x.dtype)
        h = gated(call, F.linear(x, call.gate_up[e].to(x.dtype), bias), call.x.dtype)
        y = F.linear(
            h,
            call.down[e].to(x.dtype),
            None if call.down_bias is None else call.down_bias[e].to(x.dtype),
        )
        y = saturated(y, call.x.dtype)
        # An expert that was not chosen adds nothing, even if it is not finite.
        total += torch.where((index == e).any(1)[:, None], y * weight[:, None], 0.0)
    call.output.copy_(total)


def gated(call: Any, y: Tensor, dtype: torch.dtype) -> Tensor:
    """The gated activation of `y` `[..., 2 Inner]`, as the arguments of `call` ask for it.

    dtype: of the tokens, within whose range the results stay.
    """
    y = saturated(y, dtype)
    gate, up = (y[..., ::2], y[..., 1::2]) if call.interleaved else y.chunk(2, -1)
    if call.limit:
        gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
    act = (
        gate * torch.sigmoid(gate * call.alpha) if call.alpha != 1 else GATES[call.activation](gate)
    )
    up = saturated(up + call.offset, dtype) if call.offset else up
    return saturated(act * up, dtype)
