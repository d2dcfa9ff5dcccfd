"""`triton`, of the experts of a mixture with weights of MXFP4: up to 64 tokens, by the weights of
the experts that they choose alone."""

from __future__ import annotations

import torch

from attnops.core.kernel import at_most, one_of
from attnops.core.problem import Problem
from attnops.kernels.shared.experts import products_us
from attnops.kernels.shared.mxfp4_experts import TAKES, cost_us
from attnops.kernels.triton.attention import launched, own
from attnops.kernels.triton.experts import MOST_CHOICES
from attnops.kernels.triton.launch.experts_tiles import MOST_TOKENS

BYTES = 17 / 32
"""Of a number of a weight: half a byte, and a 32nd of a scale."""


def _cost_us(p: Problem) -> float:
    """Two or three launches, then the bytes at 0.7 of the rate. Of more tokens the kernel calls
    torch's products."""
    tokens = max(p.sizes.tokens.hint, 1)
    return (
        5.0 + products_us(p, tokens) * BYTES / p.dtype.itemsize / 0.7
        if tokens <= MOST_TOKENS
        else 10.0 + 1.1 * cost_us(p)
    )


NEEDS = (one_of("last_dim_contiguous", True), at_most("top_k", MOST_CHOICES))
own(
    "mxfp4_experts",
    launched("mxfp4_experts", "mxfp4_experts"),
    _cost_us,
    "attnops' own; of more than 64 tokens, weights decoded for torch's products",
    TAKES,
    (torch.bfloat16, torch.float32),
    needs=NEEDS,
)
