"""Attention of timm's models, where it calls torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnops.adapters.callers import calls_sdpa
from attnops.adapters.swap import Change


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches a module with `fused_attn`, which is True from then on; None for
    other modules."""
    cls: Any = type(module)
    if "fused_attn" not in vars(module) or not calls_sdpa(cls):
        return None
    return Change(module, "forward", {"fused_attn": True})
