"""What kernels of several backends take and cost, of the experts of a mixture with weights of
MXFP4."""

from __future__ import annotations

from attnops.core.problem import Problem
from attnops.kernels.shared import experts as plain
from attnops.measured import copy_us

TAKES = frozenset({"gate_up_bias", "down_bias", "alpha", "limit", "offset"})


def cost_us(p: Problem) -> float:
    """A dozen passes over all weights, and the products."""
    weights = 3.0 * p.experts * p.in_features * p.out_features
    return plain.cost_us(p) + 100.0 + copy_us(p, 6 * weights)
