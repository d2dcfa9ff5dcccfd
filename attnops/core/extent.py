"""`Extent`: what is known of a size that may be symbolic."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Extent:
    """Bounds of a size that may be symbolic: `lo <= size`, `size <= hi` (None: unbounded), and `hint`, a typical value, for costs.

    Concrete sizes are rounded out to powers of two, and the hint up to one of eight steps an octave, so that a growing context
    does not make a new Problem at every step.
    """

    lo: int = 0
    hi: int | None = None
    hint: int = 1

    @classmethod
    def of(cls, size: int | torch.SymInt, typical: int = 1) -> Extent:
        """The extent of an int (its power-of-two bucket, the hint in it) or of a SymInt (its range; no guard is installed).

        typical: the hint of a SymInt that the trace has none for, because only data decide it.
        """
        if not isinstance(size, torch.SymInt):
            return _bucket(int(size))
        node = size.node
        if (known := node.maybe_as_int()) is not None:
            return _bucket(known)
        bounds = node.shape_env.bound_sympy(node.expr)
        # An unbounded side is one of several infinities, none of them an Integer; the largest int64 stands for one too.
        lo = int(bounds.lower) if bounds.lower.is_Integer else 0
        hi = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**62 else None
        hint = node.hint if node.has_hint() else None
        if hint is None:
            return cls(lo, hi, max(lo, 1, typical if hi is None else min(typical, hi)))
        return cls(lo, hi, _bucket(int(hint)).hint)

    def __str__(self) -> str:
        return str(self.lo) if self.lo == self.hi else f"{self.lo}..{'' if self.hi is None else self.hi}"


ONE = Extent(1, 1, 1)
OPEN = Extent(0, None, 1024)
"""A size that is left open: any, more than one as a rule."""


@functools.cache
def _bucket(n: int) -> Extent:
    if n <= 2:
        return Extent(n, n, n)
    top = 1 << (n - 1).bit_length()
    # The faster of two kernels changes between one power of two and the next, so the hint is finer (docs/tuning.md).
    shift = max(n.bit_length() - 4, 0)
    return Extent(top // 2 + 1, top, -(-n >> shift) << shift)


def alike(size: int) -> tuple[int, int]:
    """The least and the largest int with the extent of `size`."""
    hint = _bucket(size).hint
    if size <= 2:
        return hint, hint
    # Steps are as wide as below the octave's end everywhere in it; at the end itself they are twice that, and it is a multiple of both.
    top = 1 << (size - 1).bit_length()
    return hint - (1 << max(top.bit_length() - 5, 0)) + 1, hint
