"""`RotaryEmbedding`: positions as rotations of query and key, in plain torch operators that a compiler fuses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnops.errors import InvalidInput
from attnops.nn import _check as check


class RotaryEmbedding(nn.Module):
    """Rotary position embedding, https://arxiv.org/abs/2104.09864, equation 34, with the halves of a head as the pairs' two parts.

    Pair i of a head is turned by `position / factor * theta ** (-2 i / head_dim)`. There is no buffer: angles are computed in float32
    (float64 for float64 queries) from Python numbers, so that a cast of the module to a lower precision does not touch them.

    Args:
        head_dim: D, even. theta: base of the frequencies.
        scaling: "none", or "linear": positions are divided by `factor` (https://arxiv.org/abs/2306.15595).
        factor: >= 1; 1 unless scaling is "linear".

    Raises:
        InvalidInput: an argument is out of its range.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0, *, scaling: str = "none", factor: float = 1.0) -> None:
        super().__init__()
        self.head_dim = check.size("head_dim", head_dim)
        if head_dim % 2:
            raise InvalidInput("head_dim", head_dim, "an even number")
        self.theta = check.number("theta", theta, 1.0)
        if scaling not in ("none", "linear"):
            raise InvalidInput("scaling", repr(scaling), "'none' | 'linear'")
        self.scaling = scaling
        self.factor = check.number("factor", factor, 1.0)
        if scaling == "none" and factor != 1.0:
            raise InvalidInput("factor", factor, "1.0, because scaling is 'none'")

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """query `[..., T, Hq, D]` and key `[..., T, Hkv, D]` turned by their positions, int `[..., T]`, which may broadcast.

        Raises InvalidInput.
        """
        check.last("query", query, self.head_dim)
        check.last("key", key, self.head_dim)
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise InvalidInput("positions.dtype", positions.dtype, "int32 | int64")
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        pairs = torch.arange(0, self.head_dim, 2, device=query.device, dtype=wide)
        angles = (positions.to(wide) / self.factor)[..., None, None] * self.theta ** (-pairs / self.head_dim)
        cos, sin = angles.cos(), angles.sin()
        return _turn(query, cos, sin), _turn(key, cos, sin)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.head_dim}, theta={self.theta}" + (f", scaling={self.scaling!r}, factor={self.factor}" if self.factor != 1.0 else "")


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
