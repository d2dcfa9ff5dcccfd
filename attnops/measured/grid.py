"""`Grid`: the times of one shape over its sizes, and their interpolation."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from attnops.measured.shape import Shape, Sizes

AXES = ("batch", "queries", "ratio")
Axis = tuple[float, ...]

BALANCE = 150.0
"""Operations a byte at which GPUs of several generations go from waiting for memory to computing (H200: 650 TFLOP/s, 4.2 TB/s)."""

POWERS = (1, 2, 1)
"""How work grows with batch, queries (whose keys grow with them) and ratio."""


@dataclass(frozen=True)
class Axes:
    """A shape and its sizes."""

    shape: Shape
    batch: Axis
    queries: Axis
    ratio: Axis

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """batch, queries, ratio."""
        return self.batch, self.queries, self.ratio

    def points(self) -> list[Sizes]:
        """Every combination of batch, queries and ratio, the last running fastest."""
        return [Sizes(*at) for at in product(*self.axes)]


@dataclass(frozen=True)
class Grid(Axes):
    """Device microseconds of each kernel at each of the points; None: not timed.

    plan_us: host microseconds that a kernel's plan took, the median over the grid; not part of the times.
    skipped: why a kernel that fits has no times here.
    """

    us: Mapping[str, tuple[float | None, ...]]
    plan_us: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def at(self, kernel: str, sizes: Sizes) -> float | None:
        """Microseconds of `kernel` at any sizes, or None when it was never timed here.

        Linear between measured points: in batch, in ratio, and in the work that more queries add. Below the first point of an axis the
        time is that point's. Beyond the last it follows the line of the last two, or is in proportion to the work of a single point.
        """
        if (table := self._filled.get(kernel)) is None:
            return None
        b, r = _locate(self.batch, sizes.batch), _locate(self.ratio, sizes.ratio)
        q = _locate(tuple(map(self._added, self.queries)), self._added(sizes.queries))
        scale = 1.0
        for axis, size, power in zip(self.axes, sizes, POWERS, strict=True):
            if len(axis) == 1:
                scale *= max(size / axis[-1], 1.0) ** power
        queries, ratios = len(self.queries), len(self.ratio)
        return scale * _linear(b, lambda i: _linear(q, lambda j: _linear(r, lambda k: table[(i * queries + j) * ratios + k])))

    def _added(self, queries: float) -> float:
        """The work of this number of queries, in bytes: few queries wait for the keys, many for the products."""
        work = self.shape.work(Sizes(1.0, queries, self.ratio[len(self.ratio) // 2]))
        return max(work.bytes, work.flops / BALANCE)

    @functools.cached_property
    def _filled(self) -> dict[str, tuple[float, ...]]:
        """Points without a time get their smaller neighbour's, in proportion to the work; kernels keep their order there."""
        out, strides = {}, (len(self.queries) * len(self.ratio), len(self.ratio), 1)
        for name, us in self.us.items():
            filled = list(us)
            for here, at in enumerate(product(*(range(len(axis)) for axis in self.axes))):
                for axis in (2, 0, 1):
                    if filled[here] is None and (i := at[axis]) and (smaller := filled[here - strides[axis]]) is not None:
                        filled[here] = smaller * (self.axes[axis][i] / self.axes[axis][i - 1]) ** POWERS[axis]
            # Points before the first time: the smallest sizes failed, and the next time is the best guess.
            if known := [t for t in filled if t is not None]:
                out[name] = tuple(known[0] if t is None else t for t in filled)
        return out


Ends = tuple[tuple[int, float], ...]


def _locate(axis: Axis, size: float) -> Ends:
    """The index and the weight of both neighbours on the axis; beyond the end of the last two."""
    if len(axis) == 1:
        return ((0, 1.0),)
    size = max(size, axis[0])
    high = bisect_right(axis, size, 1, len(axis) - 1)
    weight = (size - axis[high - 1]) / (axis[high] - axis[high - 1])
    return (high - 1, 1 - weight), (high, weight)


def _linear(ends: Ends, value: Callable[[int], float]) -> float:
    """Beyond the last point noise must not turn into a line that falls."""
    found = sum(weight * value(i) for i, weight in ends if weight)
    return found if len(ends) == 1 or ends[1][1] <= 1 else max(found, value(ends[1][0]))
