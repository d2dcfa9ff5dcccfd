"""Sizes of tiles. Plain Python: no triton, no device."""

from __future__ import annotations


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def padded(n: int) -> int:
    """The next power of two, at least 16, the least that a matrix product takes."""
    return max(16, power(n))
