"""Inner attention of the models of torchtitan 0.2; torchtitan.py serves later ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchtitan.models import attention as theirs

from attnops.adapters.swap import Change
from attnops.ops import varlen_attention


class VarlenAttention(theirs.VarlenAttentionWrapper):  # type: ignore[misc]
    """torchtitan's VarlenAttentionWrapper, on `attnops.varlen_attention`."""

    kernel: str | None = None

    def forward(
        self, xq: Tensor, xk: Tensor, xv: Tensor, attention_masks: Any, scale: float | None = None
    ) -> Tensor:
        """Attend, causally within each document: xq `[B, Hq, S, D]`, xk and xv `[B, Hkv, S, D]`;
        the result is `[B * S, Hq, D]`."""
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv))
        return varlen_attention(
            query,
            key,
            value,
            attention_masks.cu_seq_q,
            attention_masks.cu_seq_k,
            max_seqlen_q=int(attention_masks.max_q),
            max_seqlen_k=int(attention_masks.max_k),
            scale=scale,
            causal=True,
            padded=False,
            kernel=self.kernel,
        )


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches one of torchtitan's wrappers of attention, the reason against it, or
    None for other modules."""
    if isinstance(module, theirs.FlexAttentionWrapper):
        return "its masks are functions of flex_attention, which no other kernel takes"
    if type(module) is theirs.VarlenAttentionWrapper:
        return Change(module, VarlenAttention, {"kernel": kernel})
    return None
