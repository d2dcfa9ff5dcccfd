"""What kernels of several backends take and cost, of linear layers and of norms alone."""

from __future__ import annotations

from attnops.core.problem import Problem
from attnops.measured.cost import multiply_us

TAKES = frozenset({"bias", "norm_weight", "norm_eps", "norm_offset", "activation", "residual"})
NORM_TAKES = frozenset({"offset", "wide_gain", "gate", "residual"})


def product_us(p: Problem, rows: int) -> float:
    """The product of so many rows: every byte of the weight is read once."""
    numbers = p.in_features * p.out_features
    moved = p.dtype.itemsize * (numbers + rows * (p.in_features + p.out_features))
    return multiply_us(p, moved, 2.0 * rows * numbers)


def norm_us(p: Problem) -> float:
    """The rows of a norm alone, read and written once."""
    rows = max(p.sizes.tokens.hint, 1)
    moved = p.dtype.itemsize * rows * p.in_features * (2 + len(p.asks & {"gate", "residual"}))
    return multiply_us(p, moved, 0.0)
