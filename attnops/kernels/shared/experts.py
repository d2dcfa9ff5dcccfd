"""torch's products of the experts of a mixture, and what they cost: for kernels of several
backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.problem import Problem
from attnops.measured.cost import multiply_us
from attnops.ops.experts.reference import gated
from attnops.ops.linear.reference import saturated

if TYPE_CHECKING:
    from attnops.ops.experts.record import Experts

TAKES = frozenset(
    {"gate_up_bias", "down_bias", "activation", "interleaved", "alpha", "limit", "offset"}
)
ALIGNED = 16
"""Bytes. torch's grouped product takes rows that are multiples of it."""


def experts(call: Experts) -> None:
    """Choices sorted by expert, so that each expert's tokens are next to each other, and the two
    products."""
    index = call.top_k_index
    if not index.shape[0]:
        return
    count, k = call.gate_up.shape[0], index.shape[1]
    # Numbers that are no expert come last, and belong to no group.
    number = torch.where((index < 0) | (index >= count), count, index).flatten()
    number, order = torch.sort(number, stable=True)
    ends = torch.searchsorted(
        number,
        torch.arange(count, device=index.device, dtype=number.dtype),
        right=True,
        out_int32=True,
    )
    x, mine = call.x[order // k], number.clamp(max=count - 1)
    h = gated(call, _product(x, call.gate_up, call.gate_up_bias, ends, mine), x.dtype)
    y = saturated(_product(h, call.down, call.down_bias, ends, mine), x.dtype)
    y = y * call.top_k_weights.flatten()[order][:, None]
    y = torch.where(
        (number < count)[:, None], y, 0.0
    )  # rows of no group keep what their memory held
    unsorted = torch.empty_like(y)
    unsorted[order] = y
    call.output.copy_(
        unsorted.view(*index.shape, y.shape[1]).sum(
            1, dtype=torch.promote_types(y.dtype, torch.float32)
        )
    )


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, number: Tensor
) -> Tensor:
    if _grouped(x, weight):
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    elif x.is_cuda and torch.cuda.is_current_stream_capturing():
        # The host cannot read how many tokens an expert has.
        y = torch.stack(
            [F.linear(row, weight[e].squeeze(0)) for row, e in zip(x, number.split(1), strict=True)]
        )
    else:
        y, begin = x.new_zeros((x.shape[0], weight.shape[1])), 0
        for e, end in enumerate(ends.tolist()):
            if end > begin:
                y[begin:end] = F.linear(x[begin:end], weight[e])
            begin = end
    return y if bias is None else y + bias[number]


def _grouped(x: Tensor, weight: Tensor) -> bool:
    """Has torch a grouped product of these that leaves the host alone?"""
    if (
        not x.is_cuda
        or x.dtype != torch.bfloat16
        or not hasattr(F, "grouped_mm")
        or torch.cuda.get_device_capability(x.device) < (8, 0)
    ):
        return False
    rows = (x.stride(0), *(n for n in weight.stride() if n != 1))
    return all(n * x.dtype.itemsize % ALIGNED == 0 for n in rows) and 1 in weight.stride()[1:]


def touched(p: Problem, tokens: int) -> float:
    """The experts that so many tokens choose, if every choice is as likely as any other."""
    return p.experts * (1.0 - (1.0 - p.top_k / max(p.experts, 1)) ** tokens)


def products_us(p: Problem, tokens: int) -> float:
    """Both products of so many tokens: every byte of the experts touched is read once."""
    numbers = 3.0 * p.in_features * p.out_features
    moved = p.dtype.itemsize * numbers * touched(p, tokens)
    return multiply_us(p, moved, 2.0 * tokens * p.top_k * numbers)


def cost_us(p: Problem) -> float:
    """A dozen launches around the products; torch's grouped product reads weights of few tokens at
    half of the rate."""
    tokens = max(p.sizes.tokens.hint, 1)
    return 40.0 + products_us(p, tokens) * (2.0 if tokens <= 64 else 1.0)
