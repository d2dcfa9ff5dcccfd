"""`aten`: linear layers as the torch ops of transformers, lowered in place, so that the compiler
fuses all but the product.

Every step is rounded where transformers rounds it: the norm is float32 and becomes the input's
dtype before its gain, or after it where the gain has an offset (Gemma); product, activation and
residual are in the input's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from attnops.core.kernel import Inline, Kernel, deterministic, register
from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.kernels.shared.linear import TAKES, product_us
from attnops.kernels.torch.by_request import by_token, register_by_token
from attnops.ops.linear import reference as formulas

if TYPE_CHECKING:
    from attnops.ops.linear.record import Linear

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(call: Linear) -> None:
    """The torch ops of transformers."""
    x = call.x
    if call.norm_weight is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + call.norm_eps)
        if call.norm_offset:
            x = (x * (call.norm_offset + call.norm_weight.to(x.dtype))).to(call.x.dtype)
        else:
            x = call.norm_weight * x.to(call.x.dtype)
    y = F.linear(x, call.weight, call.bias)
    if call.activation:
        gate, up = formulas.saturated(y, y.dtype).chunk(2, -1)  # 0 times infinity is NaN
        y = formulas.GATES[call.activation](gate) * up
    call.output.copy_(y if call.residual is None else call.residual + y)


def cost_us(p: Problem) -> float:
    """A launch for the product, and one for each part around it."""
    rows = max(p.sizes.tokens.hint, 1)
    return 4.0 + product_us(p, rows) + 2.5 * len(p.asks & {"norm_weight", "activation", "residual"})


def _reference(call: Any) -> None:
    if deterministic(call.policy):  # once, and not for every token
        call = changed(
            call, weight=call.weight.to(torch.promote_types(call.x.dtype, torch.float32))
        )
    _by_token(call)


_by_token = by_token(formulas.linear)


register(
    Kernel(
        "aten",
        "linear",
        linear,
        TAKES,
        FLOATS,
        cost_us=cost_us,
        inline=Inline(),
        about="torch's own product; the compiler fuses the rest",
    )
)
register_by_token("linear", _reference, TAKES, FLOATS, cost_us)
