"""`triton`, of the experts of a mixture: up to 64 tokens, by the weights of the experts that they
choose alone."""

from __future__ import annotations

from attnops.core.kernel import at_most, one_of
from attnops.core.problem import Problem
from attnops.kernels.shared.experts import TAKES, cost_us, products_us
from attnops.kernels.triton.attention import launched, own
from attnops.kernels.triton.launch.experts_tiles import MOST_TOKENS

MOST_CHOICES = 32
"""Experts of a token: a program holds them at once."""


def _cost_us(p: Problem) -> float:
    """Two or three launches, then the bytes. Of more tokens the kernel calls torch's products."""
    tokens = max(p.sizes.tokens.hint, 1)
    return 5.0 + products_us(p, tokens) if tokens <= MOST_TOKENS else 10.0 + 1.1 * cost_us(p)


NEEDS = (one_of("last_dim_contiguous", True), at_most("top_k", MOST_CHOICES))
own(
    "experts",
    launched("experts", "experts"),
    _cost_us,
    "attnops' own; of more than 64 tokens, torch's products",
    TAKES,
    needs=NEEDS,
    again=launched("experts", "repeated"),
)
