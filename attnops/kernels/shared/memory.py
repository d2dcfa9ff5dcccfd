"""Memory of calls: checks of alignment and size that no Problem shows, and the one workspace that
kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import demand
from attnops.core.private_torch import FakeTensor

PACK = 16
"""Bytes that kernels move at a time; a workspace begins at a multiple of it too."""

COUNTERS = 8 << 20
"""Bytes at the start of a workspace where kernels count blocks that are done; scratch that may hold
anything follows. Zero before the first call and, because every kernel counts back, after each.
Fixed, so that kernels that take turns agree; two million counters of 32 bits, as FlashInfer sets
aside for XQA."""

not_of_a_plan = demand(
    "plan", "none (a host plan fills the workspace)", lambda p: p.step.plan != "host"
)
"""A need: no host plan, whose tables fill the workspace where the counters have to be zero."""


def in_packs(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows do not start at multiples of PACK bytes: the kernels do not
    look. A row is a multiple of PACK bytes."""
    unit = PACK // x.itemsize
    odd = x.data_ptr() % PACK or (
        not x.is_contiguous() and (x.stride(-1) != 1 or any(n % unit for n in x.stride()[:-1]))
    )
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def aligned(**given: Tensor) -> None:
    """Raise InvalidInput unless every row starts at a multiple of 16 bytes.

    Kernels that move 16 bytes at a time and do not look end the process's CUDA context with a
    misaligned address.
    """
    for field, x in given.items():
        steps = [
            stride * x.dtype.itemsize
            for size, stride in zip(x.shape[:-1], x.stride(), strict=False)
            if size > 1
        ]
        if x.numel() and any(n % PACK for n in (x.data_ptr(), *steps)):
            raise InvalidInput(
                field,
                f"strides {x.stride()} from {x.data_ptr():#x}",
                f"rows that start at multiples of {PACK} bytes",
            )


def address(x: Tensor) -> int:
    """The address of a tensor; of a fake one an address that is aligned alike."""
    return int(x.storage_offset()) * x.dtype.itemsize if isinstance(x, FakeTensor) else x.data_ptr()


def total(scratch: int) -> int:
    """Bytes of a workspace that has `scratch` bytes for results under way."""
    return COUNTERS + scratch


def split(workspace: Tensor | None, scratch: int) -> tuple[Tensor, Tensor]:
    """(the counters, the at least `scratch` bytes after them, which may hold anything). Raises
    InvalidInput when it is too small."""
    if workspace is None or workspace.numel() < total(scratch) or address(workspace) % PACK:
        at = (
            ""
            if workspace is None or not address(workspace) % PACK
            else f" at an address not a multiple of {PACK}"
        )
        got = "None" if workspace is None else f"{workspace.numel()} bytes{at}"
        raise InvalidInput(
            "workspace",
            got,
            f">= {total(scratch)} bytes, aligned to {PACK}, zero before the first call",
        )
    return workspace[:COUNTERS], workspace[COUNTERS:]
