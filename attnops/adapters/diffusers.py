"""attnops as a backend of diffusers' attention dispatcher, and attention whose processor calls
torch by itself.

With this module imported `model.set_attention_backend("attnops")` and
`with attention_backend("attnops")` work as for diffusers' own.
"""

from __future__ import annotations

import functools
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from attnops.adapters.callers import calls_sdpa
from attnops.adapters.sdpa import scaled_dot_product_attention
from attnops.adapters.swap import Change
from attnops.core.record import need

NAME = "attnops"


@functools.cache
def backend(kernel: str | None) -> Any:
    """The member of diffusers' AttentionBackendName that is attnops with this kernel forced;
    registered now if it was not."""
    value = NAME if kernel is None else f"{NAME}_{kernel}"
    member = str.__new__(AttentionBackendName, value)
    member._name_, member._value_ = value.upper(), value
    # A process that loads it may not have registered it.
    member.__reduce_ex__ = lambda proto: (backend, (kernel,))
    AttentionBackendName._member_map_[value.upper()] = AttentionBackendName._value2member_map_[
        value
    ] = member

    @_AttentionBackendRegistry.register(member)  # type: ignore[untyped-decorator]
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Attend as diffusers' native backend: query `[B, S, H, D]`, key `[B, K, H, D]`, any mask,
        also `[B, K]`; `[B, S, H, Dv]`."""
        need(
            _parallel_config is None,
            "parallel_config",
            _parallel_config,
            "None: attnops has no context parallelism",
        )
        need(
            attn_mask is None or isinstance(attn_mask, Tensor),
            "attn_mask",
            type(attn_mask).__name__,
            "a tensor, or None",
        )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel=kernel
        ).transpose(1, 2)

    return member


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches a module with an attention processor, the reason against it, or None
    for other modules."""
    processor = getattr(module, "processor", None)
    cls: Any = type(processor)
    if processor is None:
        return None
    if hasattr(processor, "_attention_backend"):
        if getattr(processor, "_parallel_config", None) is not None:
            return "it runs in context parallelism, which attnops does not have"
        if getattr(processor._attention_backend, "value", "").startswith(NAME):
            return "it calls attnops already"
        return Change(processor, None, {"_attention_backend": backend(kernel)})
    if calls_sdpa(cls):
        return Change(module, "forward")
    return f"its {cls.__name__} does not call torch's scaled_dot_product_attention"


backend(None)
