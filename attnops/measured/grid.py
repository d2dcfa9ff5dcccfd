"""`Grid`: the times of one shape over its sizes, and their interpolation."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from attnops.measured.shape import Shape, Sizes, Work

AXES = ("batch", "queries", "ratio")
Axes = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]

BALANCE = 150.0
"""Operations a byte at which GPUs of several generations go from waiting for memory to computing (H200: 650 TFLOP/s, 4.2 TB/s)."""

POWERS = (1, 2, 1)
"""How work grows with batch, queries (whose keys grow with them) and ratio."""


@dataclass(frozen=True)
class Grid:
    """Device microseconds of each kernel at every (batch, queries, ratio), the last running fastest; None: not timed.

    plan_us: host microseconds that a kernel's plan took, the median over the grid; not part of the times.
    skipped: why a kernel that fits has no times here.
    """

    shape: Shape
    batch: tuple[float, ...]
    queries: tuple[float, ...]
    ratio: tuple[float, ...]
    us: Mapping[str, tuple[float | None, ...]]
    plan_us: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> Axes:
        """batch, queries, ratio."""
        return self.batch, self.queries, self.ratio

    def points(self) -> list[Sizes]:
        """The sizes in the order of `us`."""
        return [Sizes(*at) for at in product(*self.axes)]

    def at(self, kernel: str, sizes: Sizes) -> float | None:
        """Microseconds of `kernel` at any sizes, or None when it was never timed here.

        Between measured points it is linear in the work, as a launch plus bytes over bandwidth or operations over throughput is: in
        batch, in ratio, and in what more queries add. Below the first point of an axis: that point. Beyond the last: on along the
        line of the last two, or where there is one point in proportion to the work. At a measured point the result is what was
        measured, and it grows with every size along which the measured times grow.
        """
        table = self._filled.get(kernel)
        if table is None:
            return None
        b, r = _locate(self.batch, sizes.batch), _locate(self.ratio, sizes.ratio)
        q = _locate(tuple(map(self._added, self.queries)), self._added(sizes.queries))
        scale = 1.0
        for axis, size, power in zip(self.axes, sizes, POWERS, strict=True):
            if len(axis) == 1:
                scale *= max(size / axis[-1], 1.0) ** power
        return scale * _linear(b, lambda i: _linear(q, lambda j: _linear(r, lambda k: table[self._index(i, j, k)])))

    def _added(self, queries: float) -> float:
        """The work of so many queries, in bytes: few queries wait for the keys, many for the products."""
        work = self.shape.work(Sizes(1.0, queries, self.ratio[len(self.ratio) // 2]))
        return max(work.bytes, work.flops / BALANCE)

    def _index(self, i: int, j: int, k: int) -> int:
        return (i * len(self.queries) + j) * len(self.ratio) + k

    @functools.cached_property
    def _filled(self) -> dict[str, tuple[float, ...]]:
        return {name: full for name, us in self.us.items() if (full := self._fill(us)) is not None}

    def _fill(self, us: tuple[float | None, ...]) -> tuple[float, ...] | None:
        """Points without a time get their smaller neighbour's, in proportion to the work; kernels keep their order there."""
        filled = list(us)
        for at in product(*(range(len(axis)) for axis in self.axes)):
            here = self._index(*at)
            for axis in (2, 0, 1):
                before, values = tuple(n - (a == axis) for a, n in enumerate(at)), self.axes[axis]
                if filled[here] is None and at[axis] and (smaller := filled[self._index(*before)]) is not None:
                    filled[here] = smaller * (values[at[axis]] / values[before[axis]]) ** POWERS[axis]
        known = [t for t in filled if t is not None]
        # Points before the first time: the smallest sizes failed, and the next time is the best guess.
        return tuple(known[0] if t is None else t for t in filled) if known else None

    def best_rates(self) -> Work:
        """The most bytes and operations a microsecond that any kernel reached here."""
        works = list(map(self.shape.work, self.points()))
        timed = [(work, us) for times in self.us.values() for work, us in zip(works, times, strict=True) if us]
        return Work(max((w.bytes / us for w, us in timed), default=0.0), max((w.flops / us for w, us in timed), default=0.0))


Ends = tuple[tuple[int, float], ...]


def _locate(axis: tuple[float, ...], size: float) -> Ends:
    """The two neighbours on the axis, each with its index and its weight; beyond the end the last two."""
    size = max(size, axis[0])
    high = min(bisect_right(axis, size), len(axis) - 1)
    low = max(high - 1, 0)
    if high == low:
        return ((low, 1.0),)
    weight = (size - axis[low]) / (axis[high] - axis[low])
    return (low, 1 - weight), (high, weight)


def _linear(ends: Ends, value: Callable[[int], float]) -> float:
    found = sum(weight * value(i) for i, weight in ends if weight)
    # Beyond the last point noise must not turn into a line that falls.
    return found if len(ends) == 1 or ends[1][1] <= 1 else max(found, value(ends[1][0]))
