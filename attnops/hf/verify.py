"""Run a model twice, patched and eager, and measure the distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnops.errors import PatchError
from attnops.hf.report import Verification

# Of the largest logit. Rounding differs at every layer, so this is tens of units in the last place, not one.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def compare(ours: Tensor, eager: Tensor, visible: Tensor | None, name: str, tolerance: float | None) -> Verification:
    """Figures of two outputs `[B, S, ...]`; visible: 2-D mask `[B, S]` of the positions that count."""
    limit = TOLERANCES.get(eager.dtype, TOLERANCES[torch.float32]) if tolerance is None else tolerance
    finite = bool(torch.isfinite(ours).all())
    if visible is not None and visible.dim() == 2 and visible.shape == eager.shape[:2]:
        seen = visible.to(eager.device).bool()
        ours, eager = ours[seen], eager[seen]
    ours, eager = ours.double(), eager.double()
    off = float((ours - eager).abs().max()) if eager.numel() else 0.0
    top = float(eager.abs().max()) if eager.numel() else 0.0
    same = float((ours.argmax(-1) == eager.argmax(-1)).double().mean()) if eager.numel() else 1.0
    return Verification(name, "", eager[..., 0].numel(), off, off / top if top else off, limit, same, finite)


def output_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, Tensor]:
    """The name and value of the model's main output: logits, or the last hidden state. Raises PatchError when it has neither."""
    result = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        value = getattr(result, name, None)
        if isinstance(value, Tensor):
            return name, value
    raise PatchError(f"verify: got {type(result).__name__}, want an output with logits or last_hidden_state")
