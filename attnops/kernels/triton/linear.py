"""`triton`, of linear layers: up to 64 rows, with norm, activation and residual in the launch that reads the weight."""

from __future__ import annotations

import torch

from attnops.kernel import one_of
from attnops.kernels.torch.linear import TAKES, cost_us, product_us
from attnops.kernels.triton.attention import launched, own
from attnops.problem import Problem, Refusal

MOST_ROWS = 64


def _cost_us(p: Problem) -> float:
    """A launch, then the bytes. Of more rows the kernel calls torch's ops, which the compiler would have fused."""
    rows = max(p.sizes.tokens.hint, 1)
    return 2.5 + product_us(p, rows if rows == 1 else max(rows, 16)) if rows <= MOST_ROWS else 10.0 + 1.1 * cost_us(p)


def _finite(p: Problem) -> Refusal | None:
    if p.dtype != torch.float16 or "norm_weight" not in p.asks:
        return None
    return Refusal("norm_weight", "a norm of float16", "bfloat16 | float32: the input times its gain, unscaled, may overflow")


NEEDS = (one_of("last_dim_contiguous", True), _finite)
own("linear", launched("linear", "linear"), _cost_us, "attnops' own, up to 64 rows", TAKES, needs=NEEDS)
