"""`aten`: linear layers, and norms alone, as the torch ops of transformers, lowered in place, so
that the compiler fuses all but the product.

Every step is rounded where transformers rounds it: the norm is float32 and becomes the input's
dtype before its gain, or after it where the gain has an offset (Gemma) or is wide (OLMo 2);
its gate is float32, too; product, activation and residual are in the input's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.kernel import Inline, Kernel, deterministic, register
from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.kernels.shared.linear import NORM_TAKES, TAKES, norm_us, product_us
from attnops.kernels.torch.by_request import by_token, register_by_token
from attnops.ops.linear import reference as formulas

if TYPE_CHECKING:
    from attnops.ops.linear.norm import RmsNorm
    from attnops.ops.linear.record import Linear

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(call: Linear) -> None:
    """The torch ops of transformers."""
    x = call.x
    if call.norm_weight is not None:
        x = _normed(x, call.norm_weight, call.norm_eps, call.norm_offset)
    y = F.linear(x, call.weight, call.bias)
    if call.activation:
        gate, up = formulas.saturated(y, y.dtype).chunk(2, -1)  # 0 times infinity is NaN
        y = formulas.GATES[call.activation](gate) * up
    call.output.copy_(y if call.residual is None else call.residual + y)


def rms_norm(call: RmsNorm) -> None:
    """The torch ops of transformers."""
    y = _normed(call.x, call.weight, call.eps, call.offset, call.wide_gain)
    if call.gate is not None:
        y = (y * F.silu(call.gate.to(torch.promote_types(y.dtype, torch.float32)))).to(y.dtype)
    call.output.copy_(y if call.residual is None else call.residual + y)


def _normed(
    x: Tensor, weight: Tensor, eps: float, offset: float, wide_gain: bool = False
) -> Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (y * (offset + weight.to(y.dtype))).to(x.dtype)
    if wide_gain:
        return (weight * y).to(x.dtype)
    return weight * y.to(x.dtype)


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


def norm_cost_us(p: Problem) -> float:
    """A launch for each torch op, or for all where a compiler fuses them. Not measured."""
    parts = len(p.asks & {"offset", "residual"}) + 4 * ("gate" in p.asks)
    launches = 1 if p.step.compiled else 6 + parts
    return launches * (2.5 + norm_us(p))


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
register(
    Kernel(
        "aten",
        "rms_norm",
        rms_norm,
        NORM_TAKES,
        FLOATS,
        cost_us=norm_cost_us,
        inline=Inline(),
        about="torch's own ops; the compiler fuses them",
    )
)
register_by_token("rms_norm", by_token(formulas.rms_norm), NORM_TAKES, FLOATS, norm_cost_us)
