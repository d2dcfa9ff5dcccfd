"""torch.nn.MultiheadAttention, as torch.nn.TransformerEncoder and torchvision's ViT have it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from attnops.adapters.swap import Change
from attnops.core.checks import is_foreign
from attnops.core.tracers import is_recorded
from attnops.nn.multihead import MultiheadAttention

NOTE = (
    "torch.nn.MultiheadAttention returns weights by default; such calls run in plain torch, "
    "calls with need_weights=False in attnops"
)


def stock(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's own computation, in code that torch.jit.script compiles in place of ours."""
    turned = self.batch_first and query.dim() == 3
    if turned and query is key and key is value:
        query = key = value = query.transpose(0, 1)
    elif turned:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    output, weights = F.multi_head_attention_forward(
        query,
        key,
        value,
        self.embed_dim,
        self.num_heads,
        self.in_proj_weight,
        self.in_proj_bias,
        self.bias_k,
        self.bias_v,
        self.add_zero_attn,
        self.dropout,
        self.out_proj.weight,
        self.out_proj.bias,
        training=self.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=self.in_proj_weight is None,
        q_proj_weight=self.q_proj_weight,
        k_proj_weight=self.k_proj_weight,
        v_proj_weight=self.v_proj_weight,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    if turned:
        output = output.transpose(0, 1)
    return output, weights


class Served(MultiheadAttention):
    """attnops' module, but torch's own for tools that record it, and for classes of tensors."""

    def forward(self, query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        """As `stock`."""
        given = (query, key, value, *more, *named.values())
        if is_recorded(*given) or any(is_foreign(type(x)) for x in given if isinstance(x, Tensor)):
            return stock(self, query, key, value, *more, **named)
        return super().forward(query, key, value, *more, **named)

    forward.__wrapped__ = stock  # type: ignore[attr-defined]

    def __prepare_scriptable__(self) -> nn.Module:
        return self


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches a torch.nn.MultiheadAttention to ours; None for other modules."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module) is not nn.MultiheadAttention:
        return "it is a subclass of torch.nn.MultiheadAttention, whose code may differ"
    # Encoder layers read the weights of a module with this flag for a kernel of their own, and do
    # not call it.
    return Change(module, Served, {"_qkv_same_embed_dim": False, "kernel": kernel}, NOTE)
