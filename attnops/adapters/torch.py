"""torch.nn.MultiheadAttention, as torch.nn.TransformerEncoder and torchvision's ViT have it."""

from __future__ import annotations

from torch import nn

from attnops.adapters.swap import Change
from attnops.nn.multihead import MultiheadAttention

NOTE = "torch.nn.MultiheadAttention returns weights by default; such calls run in plain torch, calls with need_weights=False in attnops"


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches a torch.nn.MultiheadAttention to ours, which reads the same parameters; None for other modules."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module) is not nn.MultiheadAttention:
        return "it is a subclass of torch.nn.MultiheadAttention, whose code may differ"
    # Encoder layers read the weights of a module with this flag for a kernel of their own, and do not call it.
    return Change(module, MultiheadAttention, {"_qkv_same_embed_dim": False, "kernel": kernel}, NOTE)
