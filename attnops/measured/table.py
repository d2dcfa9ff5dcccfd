"""`Table`: the measured times of one GPU, a grid a kind of call, as JSON, too, and the cost of a
call by them.

{"format": 2, "gpu": "NVIDIA H200", "target": "sm90", "made": {...}, "versions":
{"paged_attention.fa3": "sgl_kernel==0.4.3"},
 "grids": [{"problem": {"op": "paged_attention", "queries": 1, ...}, "batch": [...], "queries":
     [...], "ratio": [...],
            "us": {"fa3": [...]}}]}
"""

from __future__ import annotations

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, log, prod
from operator import itemgetter
from typing import Any

import torch

from attnops.core.errors import BadTable
from attnops.core.kernel import Kernel
from attnops.core.problem import Problem, Target, altered
from attnops.measured.cost import (
    ESTIMATED,
    MEASURED,
    RATES,
    SCALED,
    UNMEASURED,
    Cost,
    Rates,
    Sizes,
    Work,
)
from attnops.measured.kind_json import kind_of, leaves_of
from attnops.measured.kinds import counting, work

FORMAT = 2

TRITON_CODE = "0.1.0"
"""The release in which the code of attnops' Triton kernels last became faster or slower: tables of
other code do not speak for them."""

HANDICAP = 4.0
"""A kernel that was not timed must promise to be this much faster than the measured ones."""

AXES = ("batch", "queries", "ratio")
Axis = tuple[float, ...]

BALANCE = 150.0
"""Operations a byte at which GPUs of several generations go from waiting for memory to computing
(H200: 650 TFLOP/s, 4.2 TB/s)."""

POWERS = (1, 2, 1)
"""How work grows with batch, queries (whose keys grow with them) and ratio."""


@dataclass(frozen=True)
class Axes:
    """A kind of call and its sizes."""

    kind: Problem
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

    plan_us: host microseconds that a kernel's plan took, the median over the grid; not part of the
    times.
    skipped: why a kernel that fits has no times here.
    """

    us: Mapping[str, tuple[float | None, ...]]
    plan_us: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def at(self, kernel: str, sizes: Sizes) -> float | None:
        """Microseconds of `kernel` at any sizes, or None when it was never timed here.

        Linear between measured points: in batch, in ratio, and in the work that more queries add.
        Below the first point of an axis the time is that point's. Beyond the last it follows the
        line of the last two, or is in proportion to the work of a single point.
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
        return scale * _linear(
            b,
            lambda i: _linear(
                q, lambda j: _linear(r, lambda k: table[(i * queries + j) * ratios + k])
            ),
        )

    def _added(self, queries: float) -> float:
        """The work of this number of queries, in bytes: few queries wait for the keys, many for the
        products."""
        added = work(self.kind, Sizes(1.0, queries, self.ratio[len(self.ratio) // 2]))
        return max(added.bytes, added.flops / BALANCE)

    @functools.cached_property
    def _filled(self) -> dict[str, tuple[float, ...]]:
        """Points without a time get their smaller neighbour's, in proportion to the work; kernels
        keep their order there."""
        out, strides = {}, (len(self.queries) * len(self.ratio), len(self.ratio), 1)
        for name, us in self.us.items():
            filled = list(us)
            for here, at in enumerate(product(*(range(len(axis)) for axis in self.axes))):
                for axis in (2, 0, 1):
                    if (
                        filled[here] is None
                        and (i := at[axis])
                        and (smaller := filled[here - strides[axis]]) is not None
                    ):
                        filled[here] = (
                            smaller * (self.axes[axis][i] / self.axes[axis][i - 1]) ** POWERS[axis]
                        )
            # Points before the first time: the smallest sizes failed, and the next time is the best
            # guess.
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


@dataclass(frozen=True, eq=False)
class Table:
    """Measured times. Two tables of the same text are equal; `to_json` gives that of a table that
    was not read.

    gpu: the device's name. target: as `str(Target)`. versions: by `op.kernel`, the version that was
    timed.
    made: date and software of the measurement. source: the sibling GPU whose times were scaled; ""
    where they are of `gpu` itself.
    sibling: the scaled table of another GPU, for kernels and kinds of calls that this one has no
    times of. No part of the JSON text.
    """

    gpu: str
    target: str
    versions: Mapping[str, str]
    grids: tuple[Grid, ...]
    made: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    sibling: Table | None = None

    @functools.cached_property
    def text_digest(self) -> str:
        """sha256 of the JSON text. A table that was read has that of its file, since writing it
        again takes longer."""
        return _sha256(self.to_json())

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the JSON text, and of the sibling's."""
        return (
            self.text_digest
            if self.sibling is None
            else _sha256(self.text_digest + self.sibling.digest)
        )

    def beside(self, sibling: Table) -> Table:
        """The same table with a sibling."""
        return _with_digest(replace(self, sibling=sibling), self.text_digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.digest == self.digest

    def nearest(self, problem: Problem) -> tuple[Grid, Sizes] | None:
        """The grid of the kind nearest to `problem`, and the problem's sizes in it; None when no
        kind speaks for it."""
        counts = counting(problem.op)
        near = (
            (counts.distance(g.kind, problem), g) for g in self.grids if g.kind.op == problem.op
        )
        far, grid = min(near, key=itemgetter(0), default=(inf, None))
        return None if grid is None or far == inf else (grid, counts.place(grid.kind, problem))

    def speaks_for(self, kernel: Kernel, target: Target) -> bool:
        """Was this version of `kernel` timed? A target that assumes its packages has the table's
        versions."""
        known = self.versions.get(f"{kernel.op}.{kernel.name}")
        return known is not None and (target.assume is not None or known == version_of(kernel))

    def times(
        self, kernels: Iterable[Kernel], target: Target, grid: Grid, at: Sizes
    ) -> Iterator[tuple[Kernel, float]]:
        """Those of `kernels` that were timed in a grid, with their microseconds at some sizes."""
        for kernel in kernels:
            if self.speaks_for(kernel, target) and (us := grid.at(kernel.name, at)) is not None:
                yield kernel, us

    @property
    def how(self) -> str:
        """How its costs are known."""
        return f"{SCALED} {self.source}" if self.source else MEASURED

    def floor_us(self, grid: Grid, at: Sizes) -> float:
        """The time of the work at the best rates any kernel reached anywhere, and never less than
        the shortest time in `grid`."""
        least = min((t for times in grid.us.values() for t in times if t is not None), default=0.0)
        return max(
            least,
            *(
                need / rate
                for need, rate in zip(work(grid.kind, at), self._best_rates, strict=True)
                if rate
            ),
        )

    @functools.cached_property
    def _best_rates(self) -> tuple[float, ...]:
        points = (
            (work(g.kind, at), times)
            for g in self.grids
            for at, *times in zip(g.points(), *g.us.values(), strict=True)
        )
        rates = [(done.bytes / us, done.flops / us) for done, times in points for us in times if us]
        return tuple(map(max, zip((0.0, 0.0), *rates, strict=True)))

    def to_json(self) -> str:
        """The file's text, one line a grid."""
        head = {
            "format": FORMAT,
            "gpu": self.gpu,
            "target": self.target,
            "made": dict(self.made),
            "versions": dict(self.versions),
        }
        head |= {"source": self.source} if self.source else {}
        lines = [json.dumps(_grid_dict(g), separators=(",", ":")) for g in self.grids]
        return (
            json.dumps(head, indent=1)[:-2] + ',\n "grids": [\n' + ",\n".join(lines) + "\n ]\n}\n"
        )


def costs(problem: Problem, kernels: Sequence[Kernel], table: Table | None) -> dict[str, Cost]:
    """The cost of each of `kernels`, which can all run `problem`.

    Measured times rank the kernels that the table covers, and its sibling's times those that the
    sibling alone covers. The sibling's come first where it alone has kinds with lse for a call with
    lse. Another kernel costs HANDICAP times the larger of its own estimate and the time of its work
    at the best rates measured: it is chosen only where all measured times are slow. Their own
    estimates rank all kernels where no table covers one. A kernel that reads a plan of the device
    was timed with it: a call without a plan takes longer by the kernel's own estimate.
    """
    sources = [
        (t, *near)
        for t in (table, table and table.sibling)
        if t is not None and (near := t.nearest(problem)) is not None
    ]
    # Times with lse and without are not compared where one of the tables has those that the call
    # asks for.
    sources.sort(key=lambda source: source[1].kind.results.lse != problem.results.lse)
    timed, floor = dict[str, Cost](), 0.0
    for source, grid, at in sources:
        own = {
            k.name: Cost(us + _unplanned_us(k, problem), source.how)
            for k, us in source.times(kernels, problem.target, grid, at)
        }
        if own and not timed:
            floor = source.floor_us(grid, at)
        timed = own | timed
    estimates = {k.name: k.cost_us(problem) for k in kernels}
    if not timed:
        return {name: Cost(us, ESTIMATED) for name, us in estimates.items()}
    return {
        name: timed.get(name, Cost(HANDICAP * max(us, floor), UNMEASURED))
        for name, us in estimates.items()
    }


def _unplanned_us(kernel: Kernel, problem: Problem) -> float:
    """How much longer the kernel takes without its plan, by its own estimate."""
    if kernel.plan.device is None or problem.step.plan != "none":
        return 0.0
    return kernel.cost_us(problem) - kernel.cost_us(altered(problem, plan="device"))


def version_of(kernel: Kernel) -> str:
    """The versions that a time of `kernel` holds for: its packages', and TRITON_CODE for Triton
    kernels; else torch's minor one."""
    own = f";attnops=={TRITON_CODE}" if any(p.module == "triton" for p in kernel.packages) else ""
    return (
        ";".join(kernel.versions()) + own or f"torch=={'.'.join(torch.__version__.split('.')[:2])}"
    )


def _grid_dict(grid: Grid) -> dict[str, Any]:
    def short(values: Sequence[float | None]) -> list[float | None]:
        """Without the Nones at the end: a slow kernel has many."""
        count = max((i for i, x in enumerate(values, 1) if x is not None), default=0)
        return [int(x) if x is not None and x == int(x) else x for x in values[:count]]

    out: dict[str, Any] = {"problem": leaves_of(grid.kind)}
    out |= {n: short(axis) for n, axis in zip(AXES, grid.axes, strict=True)} | {
        "us": {n: short(us) for n, us in grid.us.items()}
    }
    return out | {
        n: dict(v) for n, v in (("plan_us", grid.plan_us), ("skipped", grid.skipped)) if v
    }


def from_json(text: str) -> Table:
    """The table that `text` holds. Raises BadTable for text that is no table of this version's
    format."""
    want = "a file that `attnops tune` wrote"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadTable("file", f"no JSON ({error})", want) from None
    if (got := data.get("format") if isinstance(data, dict) else type(data).__name__) != FORMAT:
        raise BadTable("format", got, f"{FORMAT}: run `attnops tune` again")
    try:
        table = Table(
            str(data["gpu"]),
            str(data["target"]),
            dict(data["versions"]),
            tuple(map(_grid, data["grids"])),
            dict(data["made"]),
        )
        return _with_digest(table, _sha256(text))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise BadTable("table", f"{type(error).__name__}: {error}", want) from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _with_digest(table: Table, text_digest: str) -> Table:
    vars(table)["text_digest"] = text_digest
    return table


def _grid(data: dict[str, Any]) -> Grid:
    batch, queries, ratio = axes = [_axis(data[name]) for name in AXES]
    us = {str(k): _times(row, prod(map(len, axes))) for k, row in data["us"].items()}
    plan_us = {str(k): float(us) for k, us in data.get("plan_us", {}).items()}
    if not all(0 <= us < inf for us in plan_us.values()):
        raise ValueError("want finite times of plans")
    skipped = {str(k): str(why) for k, why in data.get("skipped", {}).items()}
    return Grid(kind_of(data["problem"]), batch, queries, ratio, us, plan_us, skipped)


def _axis(points: Iterable[Any]) -> Axis:
    axis = tuple(map(float, points))
    if not (axis and axis[0] >= 1 and list(axis) == sorted({*axis}) and axis[-1] < inf):
        raise ValueError("an axis does not grow from 1 or more")
    return axis


def _times(row: Sequence[Any], count: int) -> tuple[float | None, ...]:
    """The times of `count` points, of which the last ones may be left out."""
    times = tuple(None if t is None else float(t) for t in row)
    if len(times) > count or not all(t is None or 0 < t < inf for t in times):
        raise ValueError(f"want at most {count} positive times a kernel")
    return times + (None,) * (count - len(times))


def nearness(gpu: str, other: str) -> tuple[float, int]:
    """Sorts tables of `other` GPUs by how well they serve `gpu`: by their rates where both are
    known, then in the order of RATES."""
    place = list(RATES).index(other) if other in RATES else len(RATES)
    if gpu not in RATES or other not in RATES:
        return inf if gpu in RATES else 0.0, place
    return sum(abs(log(a / b)) for a, b in zip(RATES[gpu], RATES[other], strict=True)), place


def scaled(table: Table, gpu: str) -> Table:
    """`table` for `gpu`, of the same architecture: every time grows by the difference of the two
    rooflines.

    Times of an H200 scaled to an H100 are 3.1% off in the median, and 1.4% of all pairs of kernels
    change their order. A GPU of unknown rates counts as equally fast.
    """
    here, there = RATES.get(table.gpu), RATES.get(gpu)
    if here is None or there is None:
        return replace(table, gpu=gpu, source=table.gpu)
    found = replace(
        table, gpu=gpu, source=table.gpu, grids=tuple(_scaled(g, here, there) for g in table.grids)
    )
    return _with_digest(found, _sha256(f"{table.text_digest} for {gpu}"))


def _scaled(grid: Grid, here: Rates, there: Rates) -> Grid:
    def us(done: Work, rates: Rates) -> float:
        return max(done.bytes / (rates.bandwidth * 1e6), done.flops / (rates.matmul * 1e6))

    longer = [
        us(done, there) - us(done, here) for at in grid.points() for done in (work(grid.kind, at),)
    ]

    def on(times: tuple[float | None, ...]) -> tuple[float | None, ...]:
        launch = min((t for t in times if t is not None), default=0.0)
        return tuple(
            None if t is None else max(t + more, launch)
            for t, more in zip(times, longer, strict=True)
        )

    return replace(grid, us={name: on(times) for name, times in grid.us.items()})
