"""Launches of gradients of layers that carry a state. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import compact
from attnops.kernels.shared.launch.gpu import flat, launch
from attnops.kernels.shared.sizes import power
from attnops.kernels.shared.tokens import clear
from attnops.kernels.triton.device import conv_gradient

if TYPE_CHECKING:
    from attnops.ops.recurrent.conv import CausalConv1dBackward

CONV_TOKENS, CONV_CHANNELS = 32, 64


def causal_conv1d_backward(call: CausalConv1dBackward) -> tuple[Tensor, ...]:
    """One launch, and the sum of what tiles of tokens give to the weight."""
    x, width = call.x, call.weight.shape[1]
    requests, channels, kept = call.grad_after.shape
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_state = x.new_empty(call.grad_after.shape)
    if call.padded:
        clear((call.cu_seqlens_q, grad_x, 0.0))
    rows = (x.shape[0] + requests * kept) // CONV_TOKENS + requests
    sums = x.new_zeros((rows, width + 1, channels), dtype=torch.float32)
    tiles = -(-(call.max_seqlen_q + kept) // CONV_TOKENS)
    block = min(CONV_CHANNELS, power(channels))
    if requests and tiles:
        launch(
            conv_gradient.gradient,
            (requests * tiles, -(-channels // block)),
            {
                "WIDTH": width,
                "KEPT": kept,
                "SILU": call.activation == "silu",
                "BLOCK_T": CONV_TOKENS,
                "BLOCK_C": block,
            },
            (
                x,
                call.weight.t().contiguous(),
                flat(call.bias),
                call.cu_seqlens_q,
                call.grad_output,
                call.grad_after.contiguous(),
                flat(call.state),
                grad_x,
                grad_state,
                sums,
                tiles,
                channels,
                *x.stride(),
                *call.grad_output.stride(),
                call.cu_seqlens_q.stride(0),
            ),
        )
    whole = sums.sum(0).to(x.dtype)
    grad_bias = x.new_empty(0) if call.bias is None else whole[width].clone()
    return grad_x, compact(whole[:width].t()), grad_bias, grad_state
