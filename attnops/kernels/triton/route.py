"""`triton`, of the routing of a mixture: one launch, a token a program."""

from __future__ import annotations

from attnops.core.kernel import at_most
from attnops.core.problem import Problem
from attnops.kernels.shared.route import TAKES
from attnops.kernels.triton.attention import launched, own
from attnops.kernels.triton.experts import MOST_CHOICES

MOST_EXPERTS = 512
"""A warp holds the logits of a token, at most four numbers of a thread for one of an expert where
groups are padded to powers of two."""


def _cost_us(p: Problem) -> float:
    """A launch, a round for each choice, and the bytes; not measured."""
    return 2.5 + 0.15 * p.top_k + max(p.sizes.tokens.hint, 1) * p.experts * p.dtype.itemsize / 1e6


NEEDS = (at_most("experts", MOST_EXPERTS), at_most("top_k", MOST_CHOICES))
own(
    "route",
    launched("route", "route"),
    _cost_us,
    "attnops' own, a token a program",
    TAKES,
    needs=NEEDS,
)
