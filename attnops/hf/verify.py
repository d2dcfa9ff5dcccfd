"""Run a model twice, patched and eager, and measure the distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnops.errors import PatchError
from attnops.hf.report import Verification

# Of the largest logit. Rounding differs at every layer, so this is tens of units in the last place, not one.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_MAIN = ("logits", "last_hidden_state")


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


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The floating-point tensors `[B, ...]` of a model's output by name, the main one first."""
    items = result.items() if isinstance(result, dict) else ()
    found = {name: x for name, x in items if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1}
    return {name: found[name] for name in sorted(found, key=lambda name: _MAIN.index(name) if name in _MAIN else len(_MAIN))}


def output_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, Tensor]:
    """The name and value of the model's main output: logits, the last hidden state, or what else it has. Raises PatchError: nothing."""
    result = model(**inputs)
    for name, value in outputs_of(result).items():
        return name, value
    raise PatchError(f"verify: got {type(result).__name__}, want an output with a tensor, as logits or last_hidden_state")
