"""`aten`: the routing of a mixture as torch ops, lowered in place, so that the compiler fuses what
is around its sorts."""

from __future__ import annotations

import torch

from attnops.core.kernel import Inline, Kernel, register
from attnops.core.problem import Problem
from attnops.kernels.shared.route import TAKES
from attnops.kernels.torch.by_request import by_token, register_by_token
from attnops.ops.experts.route_reference import route as reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cost_us(p: Problem) -> float:
    """A sort that keeps the order of equals, and what is around it; of groups, three sorts. Not
    measured."""
    sorts = 3.0 if "groups" in p.asks else 1.0
    return 8.0 * (1.0 + sorts) + max(p.sizes.tokens.hint, 1) * p.experts * sorts / 1e5


register(
    Kernel(
        "aten",
        "route",
        reference,
        TAKES,
        FLOATS,
        cost_us=cost_us,
        inline=Inline(),
        about="torch's own sorts; the compiler fuses the rest",
    )
)
register_by_token("route", by_token(reference), TAKES, FLOATS, cost_us, "plain torch, float32")
