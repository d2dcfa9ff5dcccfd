"""`RotaryEmbedding`: positions as rotations of query and key, in plain torch operators that a
compiler fuses."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.core.tensors import rotate
from attnops.nn import arguments as check

SCALINGS = ("none", "linear", "yarn", "llama3")


def rope_of(rope: RotaryEmbedding | None, field: str, head_dim: int) -> RotaryEmbedding | None:
    """`rope`, of the layer's `head_dim`, which is its argument `field`. Raises InvalidInput."""
    need(
        rope is None or isinstance(rope, RotaryEmbedding),
        "rope",
        type(rope).__name__,
        "a RotaryEmbedding or None",
    )
    if rope is not None:
        need(
            rope.head_dim == head_dim,
            "rope.head_dim",
            rope.head_dim,
            f"{head_dim}, the layer's {field}",
        )
    return rope


class RotaryEmbedding(nn.Module):
    """Rotary position embedding, https://arxiv.org/abs/2104.09864, equation 34.

    Pair i of a head is turned by `position * theta ** (-2 i / head_dim)`; scaling "linear" divides
    that by `factor` (https://arxiv.org/abs/2306.15595). "yarn" (https://arxiv.org/abs/2309.00071,
    section 3.2) divides the slow pairs by `factor`, leaves the fast ones and goes from the one to
    the other along a straight line in the pairs; "llama3", as Llama 3.1 has it, along one in the
    frequencies. There is no buffer: angles are computed in float32 (float64 for float64 queries)
    from Python numbers, so that a cast of the module to a lower precision does not touch them.

    Args:
        head_dim: D, even.
        theta: base of the frequencies; > 1 with "yarn".
        scaling: "none", "linear", "yarn" or "llama3".
        factor: >= 1, how many times longer the context became; 1 with "none".
        interleaved: are the two parts of pair i the numbers 2 i and 2 i + 1 of a head? Otherwise
            they are i and i + D / 2. The result has the layout of the input.
        original_max_position: "yarn" and "llama3" only, and needed there: positions the model knew
            before.
        beta_fast, beta_slow: "yarn" and "llama3", whose configs call them high_freq_factor and
            low_freq_factor: a pair that turns more often than beta_fast within
            original_max_position is fast, one that turns less often than beta_slow is slow.
        truncate: "yarn": the bounds in between are whole pairs.
        mscale, mscale_all_dim: "yarn", as DeepSeek has them; with m(x) = 0.1 x ln(factor) + 1 the
            rotation is multiplied by m(mscale) / m(mscale_all_dim), or by m(1) where not both are
            given, and `softmax_scale()` is m(mscale_all_dim) ** 2.
        attention_factor: "yarn": multiply the rotation by this instead.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    __prepare_scriptable__ = check.not_scripted

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        scaling: str = "none",
        factor: float = 1.0,
        interleaved: bool = False,
        original_max_position: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim = check.size("head_dim", head_dim)
        need(head_dim % 2 == 0, "head_dim", head_dim, "an even number")
        self.theta = check.number("theta", theta, 1.0)
        need(scaling in SCALINGS, "scaling", repr(scaling), " | ".join(map(repr, SCALINGS)))
        self.scaling = scaling
        self.factor = check.number("factor", factor, 1.0)
        need(scaling != "none" or factor == 1.0, "factor", factor, "1.0, because scaling is 'none'")
        self.interleaved = interleaved
        # Factors of a head's rotation and of its softmax, and where the change between divided
        # frequencies and others begins and ends: pairs with "yarn", radians a position with
        # "llama3".
        self.attention_factor, self._softmax_scale, self._ramp = 1.0, 1.0, (0.0, 1.0)
        if scaling in ("yarn", "llama3"):
            why = f"because scaling is {scaling!r}"
            need(original_max_position is not None, "original_max_position", None, f"an int, {why}")
            known = check.size("original_max_position", original_max_position, "positions")
            slow = check.number("beta_slow", beta_slow, 1e-9)
            fast = check.number("beta_fast", beta_fast, slow)
            if scaling == "yarn":
                need(theta != 1.0, "theta", theta, f"> 1.0, {why}")
                self._ramp = self._ramp_of(known, fast, slow, truncate)
            else:
                need(fast > slow, "beta_fast", fast, f"> beta_slow = {slow}, {why}")
                self._ramp = (slow * 2 * math.pi / known, fast * 2 * math.pi / known)
        else:
            check.absent(
                "unless scaling is 'yarn' or 'llama3'", original_max_position=original_max_position
            )
        if scaling == "yarn":
            self._take_factors(mscale, mscale_all_dim, attention_factor)
        else:
            check.absent(
                "unless scaling is 'yarn'",
                mscale=mscale,
                mscale_all_dim=mscale_all_dim,
                attention_factor=attention_factor,
            )

    def _take_factors(
        self, mscale: float | None, mscale_all_dim: float | None, attention_factor: float | None
    ) -> None:
        for field, value in (
            ("mscale", mscale),
            ("mscale_all_dim", mscale_all_dim),
            ("attention_factor", attention_factor),
        ):
            if value is not None:
                check.number(field, value, 0.0)
        m = [0.1 * (x or 0.0) * math.log(self.factor) + 1.0 for x in (mscale, mscale_all_dim, 1.0)]
        both = m[0] / m[1] if mscale and mscale_all_dim else m[2]
        self.attention_factor = both if attention_factor is None else float(attention_factor)
        self._softmax_scale = m[1] ** 2 if mscale_all_dim else 1.0

    def _ramp_of(self, known: int, fast: float, slow: float, truncate: bool) -> tuple[float, float]:
        """The pairs up to which all are fast, and from which all are slow: equation 20 of YaRN
        solved for the dimension."""
        low, high = (
            self.head_dim * math.log(known / (n * 2 * math.pi)) / (2 * math.log(self.theta))
            for n in (fast, slow)
        )
        low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
        low, high = float(max(low, 0)), float(min(high, self.head_dim - 1))
        return low, high if high != low else high + 0.001

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """query `[..., T, Hq, D]` and key `[..., T, Hkv, D]` turned by their positions, int
        `[..., T]`, which may broadcast.

        Raises InvalidInput.
        """
        dims = self.head_dim
        if query.shape[-1] != dims or key.shape[-1] != dims:
            check.last("query", query, dims)
            check.last("key", key, dims)
        cos, sin = self.cos_sin(positions, query)
        cos, sin = cos[..., None, :], sin[..., None, :]
        turned = rotate(query.to(cos.dtype), cos, sin, self.interleaved).to(query.dtype)
        return turned, rotate(key.to(cos.dtype), cos, sin, self.interleaved).to(key.dtype)

    def cos_sin(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(`[..., D / 2]`, `[..., D / 2]`): cosine and sine of the angles at int positions `[...]`,
        for kernels that rotate.

        float32 (float64 where `like` is), on the device of `like`, attention factor included.
        Raises InvalidInput.
        """
        if positions.is_floating_point() or positions.dtype == torch.bool:
            fail(InvalidInput, "positions.dtype", positions.dtype, "int32 | int64")
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        pairs = torch.arange(0, self.head_dim, 2, device=like.device, dtype=wide)
        turns = self.theta ** (-pairs / self.head_dim)
        at = positions.to(wide)[..., None]
        if self.scaling == "yarn":
            low, high = self._ramp
            slow = ((pairs / 2 - low) / (high - low)).clamp(0, 1)
            turns = turns / self.factor * slow + turns * (1 - slow)
        elif self.scaling == "llama3":
            low, high = self._ramp
            fast = ((turns - low) / (high - low)).clamp(0, 1)
            turns = turns * fast + turns / self.factor * (1 - fast)
        angles = (at / self.factor if self.scaling == "linear" else at) * turns
        cos, sin = angles.cos(), angles.sin()
        return (
            (cos, sin)
            if self.attention_factor == 1.0
            else (cos * self.attention_factor, sin * self.attention_factor)
        )

    def softmax_scale(self) -> float:
        """The factor on 1 / sqrt(D) of the attention: 1, or with "yarn" and mscale_all_dim the
        square of its m."""
        return self._softmax_scale

    def extra_repr(self) -> str:
        scaled = (
            () if self.scaling == "none" else (f"scaling={self.scaling!r}, factor={self.factor}",)
        )
        return check.shown(
            f"{self.head_dim}",
            f"theta={self.theta}",
            *scaled,
            interleaved=(self.interleaved, False),
        )
