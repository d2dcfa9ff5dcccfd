"""`GatedDeltaNet`: a decoder layer's linear attention with its projections, as Qwen3-Next has
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.recurrent import RecurrentLayer, Requests
from attnops.ops import gated_delta_rule


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet, https://arxiv.org/abs/2412.06464: projections, causal convolution of query,
    key and value, gated delta rule, RMS norm with a gate, projection back. Dense, packed or jagged.

    Parameters have the names and layouts of Hugging Face's Qwen3NextGatedDeltaNet, so that its
    weights load.

    Args:
        hidden_size: E of input and output.
        num_v_heads: Hv, heads of the value and the state.
        num_k_heads: Hk, heads of query and key, a divisor of Hv; default Hv.
        head_dim: Dk of query and key.
        v_head_dim: Dv of the value; default Dk.
        conv_size: W, inputs that the convolution sees.
        norm_eps: epsilon of the norm.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_v_heads: int,
        num_k_heads: int | None = None,
        *,
        head_dim: int = 128,
        v_head_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        heads = check.size("num_v_heads", num_v_heads)
        keys = heads if num_k_heads is None else check.size("num_k_heads", num_k_heads)
        need(heads % keys == 0, "num_k_heads", num_k_heads, f"a divisor of num_v_heads = {heads}")
        dk = check.size("head_dim", head_dim)
        dv = dk if v_head_dim is None else check.size("v_head_dim", v_head_dim)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = 2 * keys * dk + heads * dv
        super().__init__(hidden_size, channels, conv_size, False, heads, (dk, dv), made)
        self.num_v_heads, self.num_k_heads, self.head_dim, self.v_head_dim = heads, keys, dk, dv
        self.in_proj_qkvz = nn.Linear(hidden_size, channels + heads * dv, bias=False, **made)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * heads, bias=False, **made)
        self.norm = nn.RMSNorm(dv, eps=check.number("norm_eps", norm_eps, 0.0), **made)
        self.out_proj = nn.Linear(heads * dv, hidden_size, bias=False, **made)

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """(query, key and value, z, b, a). The weights have these of a key's head together."""
        group = self.num_v_heads // self.num_k_heads
        values = group * self.v_head_dim
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_k_heads, -1))
        *qkv, z = by_head.split([self.head_dim, self.head_dim, values, values], -1)
        b, a = self.in_proj_ba(hidden).unflatten(-1, (self.num_k_heads, -1)).split(group, -1)
        return torch.cat([x.flatten(-2) for x in qkv], -1), *(x.flatten(-2) for x in (z, b, a))

    def _read(self, projected: tuple[Tensor, ...], requests: Requests) -> Tensor:
        qkv, z, b, a = projected
        keys = self.num_k_heads * self.head_dim
        query, key, value = self._convolved(qkv, requests).split(
            [keys, keys, self.num_v_heads * self.v_head_dim], -1
        )
        query, key = (x.unflatten(-1, (self.num_k_heads, self.head_dim)) for x in (query, key))
        heads = self.num_v_heads, self.v_head_dim
        output = gated_delta_rule(
            query,
            key,
            value.unflatten(-1, heads),
            self._forgets() * F.softplus(a.float() + self.dt_bias.float()),
            b.sigmoid(),
            requests.states.state,
            normalize=True,
            **requests.arguments(),
        )
        gated = self.norm(output) * F.silu(z.float()).unflatten(-1, heads)
        out: Tensor = self.out_proj(gated.to(output.dtype).flatten(-2))
        return out

    def extra_repr(self) -> str:
        return check.shown(
            f"{self.hidden_size}",
            f"{self.num_v_heads}",
            f"{self.num_k_heads}",
            f"head_dim={self.head_dim}",
            v_head_dim=(self.v_head_dim, self.head_dim),
        )
