"""One workspace that kernels share: counters that must be zero, then scratch that may hold anything."""

from __future__ import annotations

from torch import Tensor

from attnops.errors import InvalidInput
from attnops.problem import Problem, Refusal

COUNTERS = 8 << 20
"""Bytes at the start where kernels count blocks that are done. Zero before the first call and, because every kernel counts back, after
each. Fixed, so that kernels that take turns agree; two million counters of 32 bits, as FlashInfer sets aside for XQA."""

ALIGNMENT = 16


def not_of_a_plan(p: Problem) -> Refusal | None:
    """A need: the workspace of a call that was planned on the host holds the plan's tables, where counters would have to be zero."""
    return Refusal("plan", p.plan, "none (a host plan fills the workspace)") if p.plan == "host" else None


def total(scratch: int) -> int:
    """Bytes of a workspace that has `scratch` bytes for results under way."""
    return COUNTERS + scratch


def split(workspace: Tensor | None, scratch: int) -> tuple[Tensor, Tensor]:
    """(the counters, what follows them: at least `scratch` bytes that may hold anything). Raises InvalidInput when it is too small."""
    if workspace is None or workspace.numel() < total(scratch) or workspace.data_ptr() % ALIGNMENT:
        at = "" if workspace is None or not workspace.data_ptr() % ALIGNMENT else f" at an address not a multiple of {ALIGNMENT}"
        got = "None" if workspace is None else f"{workspace.numel()} bytes{at}"
        raise InvalidInput("workspace", got, f">= {total(scratch)} bytes, aligned to {ALIGNMENT}, zero before the first call")
    return workspace[:COUNTERS], workspace[COUNTERS:]
