"""`Mamba2`: a mixer of Mamba-2 with its projections, as Bamba and Hugging Face's Mamba2 have it."""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.recurrent import RecurrentLayer, Requests
from attnops.ops import mamba2_scan


class Mamba2(RecurrentLayer):
    """Mamba-2, https://arxiv.org/abs/2405.21060: projection, causal convolution, selective scan,
    RMS norm after a gate, projection back. Dense, packed or jagged.

    Parameters have the names and layouts of Hugging Face's Mamba2Mixer and BambaMixer, so that
    their weights load. Steps are limited in every call, also where a request goes on by one token.

    Args:
        hidden_size: E of input and output.
        num_heads: H.
        head_dim: P, numbers of a head.
        state_size: N, numbers of a head's state for each of these.
        num_groups: groups of heads that share b and c, a divisor of H.
        norm_groups: equal parts of the H * P numbers of a token, each normalised by itself; as many
            as num_groups in Nemotron-H, and in Bamba of transformers 5.24.
        conv_size: W, inputs that the convolution sees.
        conv_bias: has it a bias?
        bias: have the projections one?
        dt_limit: (the shortest step, the longest), from 0 to infinity.
        norm_eps: epsilon of the norm.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        norm_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        dt_limit: tuple[float, float] = (0.0, inf),
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        heads, width = check.size("num_heads", num_heads), check.size("head_dim", head_dim)
        groups, size = check.size("num_groups", num_groups), check.size("state_size", state_size)
        need(heads % groups == 0, "num_groups", groups, f"a divisor of num_heads = {heads}")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = heads * width
        channels = inner + 2 * groups * size
        super().__init__(hidden_size, channels, conv_size, conv_bias, heads, (width, size), made)
        self.num_heads, self.head_dim, self.state_size = heads, width, size
        self.num_groups, self.norm_groups = groups, check.size("norm_groups", norm_groups)
        need(inner % norm_groups == 0, "norm_groups", norm_groups, f"a divisor of {inner}")
        shortest, longest = dt_limit
        ordered = 0 <= shortest <= longest and longest > 0 and not isinf(shortest)
        need(ordered, "dt_limit", dt_limit, "(least, most), 0 <= least <= most, least finite")
        self.dt_limit = float(shortest), float(longest)
        self.in_proj = nn.Linear(hidden_size, inner + channels + heads, bias=bias, **made)
        self.D = nn.Parameter(torch.ones(heads, **made))
        self.norm = nn.RMSNorm(inner, eps=check.number("norm_eps", norm_eps, 0.0), **made)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias, **made)

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """(x, b and c, the gate, dt)."""
        inner, projected = self.num_heads * self.head_dim, self.in_proj(hidden)
        sizes = inner, projected.shape[-1] - inner - self.num_heads, self.num_heads
        gate, mixed, dt = projected.split(sizes, -1)
        return mixed, gate, dt

    def _read(self, projected: tuple[Tensor, ...], requests: Requests) -> Tensor:
        mixed, gate, dt = projected
        inner, states = self.num_heads * self.head_dim, self.num_groups * self.state_size
        x, b, c = self._convolved(mixed, requests).split([inner, states, states], -1)
        b, c = (y.unflatten(-1, (self.num_groups, self.state_size)) for y in (b, c))
        shortest, longest = self.dt_limit
        output = mamba2_scan(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            dt,
            self._forgets(),
            b,
            c,
            requests.states.state,
            d=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_min=shortest,
            dt_max=0.0 if isinf(longest) else longest,
            **requests.arguments(),
        )
        gated = output.flatten(-2).float() * F.silu(gate.float())
        parts = gated.unflatten(-1, (self.norm_groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], eps=self.norm.eps).flatten(-2)
        out: Tensor = self.out_proj(normed.to(output.dtype) * self.norm.weight)
        return out

    def extra_repr(self) -> str:
        return check.shown(
            f"{self.hidden_size}",
            f"{self.num_heads}",
            f"head_dim={self.head_dim}",
            f"state_size={self.state_size}",
            num_groups=(self.num_groups, 1),
            norm_groups=(self.norm_groups, 1),
            dt_limit=(self.dt_limit, (0.0, inf)),
        )
