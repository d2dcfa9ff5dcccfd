"""Checks of memory that no Problem shows: alignment and size."""

from __future__ import annotations

from torch import Tensor

from attnops.errors import InvalidInput

PACK = 16
OFFSETS = 2**32


def aligned(**given: Tensor) -> None:
    """Raise InvalidInput unless every row starts at a multiple of 16 bytes.

    Kernels that move 16 bytes at a time and do not look end the process's CUDA context with a misaligned address.
    """
    for field, x in given.items():
        steps = [stride * x.dtype.itemsize for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
        if x.numel() and any(n % PACK for n in (x.data_ptr(), *steps)):
            raise InvalidInput(field, f"strides {x.stride()} from {x.data_ptr():#x}", f"rows that start at multiples of {PACK} bytes")


def countable(**given: Tensor) -> None:
    """Raise InvalidInput unless the kernel's 32 bits hold the offset of every number."""
    for field, x in given.items():
        if x.numel() >= OFFSETS:
            raise InvalidInput(field, f"{x.numel()} numbers", f"< {OFFSETS}: the kernel counts them in 32 bits")
