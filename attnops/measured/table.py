"""`Table`: the measured times of one GPU, as JSON, too, and the cost of a call by them.

{"format": 1, "gpu": "NVIDIA H200", "target": "sm90", "made": {...}, "versions": {"paged_attention.fa3": "sgl_kernel==0.4.3"},
 "grids": [{"shape": {...}, "batch": [...], "queries": [...], "ratio": [...], "us": {"fa3": [...]}}]}
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from typing import Any, NamedTuple

import torch

from attnops.errors import BadTable
from attnops.kernel import Kernel
from attnops.measured.grid import AXES, Grid
from attnops.measured.shape import Shape, Sizes, Work
from attnops.problem import Problem, Target
from attnops.version import VERSION

FORMAT = 1
LARGEST_INT = 1 << 31

HANDICAP = 4.0
"""A kernel that was not timed must promise to be this much faster than the measured ones."""

MEASURED, SCALED, ESTIMATED, UNMEASURED = "measured", "scaled from", "estimated", "not measured"


class Cost(NamedTuple):
    """Device microseconds, and how they are known.

    how: MEASURED, `SCALED <a sibling GPU>`, ESTIMATED, or UNMEASURED among kernels that are measured or scaled.
    """

    us: float
    how: str

    @property
    def timed(self) -> bool:
        """Is it a measured time, of this GPU or of a sibling?"""
        return self.how == MEASURED or self.how.startswith(SCALED)

    def __str__(self) -> str:
        return f"{self.us:.4g} us {self.how}" if self.how.startswith(SCALED) else f"{self.how} {self.us:.4g} us"


@dataclass(frozen=True, eq=False)
class Table:
    """Measured times. Two tables with the same content are equal.

    gpu: the device's name.
    target: as `str(Target)`.
    versions: by `op.kernel`, the version that was timed.
    made: date and software of the measurement.
    source: the sibling GPU that the times were scaled from (`attnops.measured.rates`); "" where they are of `gpu` itself.
    """

    gpu: str
    target: str
    versions: Mapping[str, str]
    grids: tuple[Grid, ...]
    made: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.digest == self.digest

    def nearest(self, problem: Problem) -> tuple[Grid, Sizes] | None:
        """The grid of the shape nearest to `problem`, and the problem's sizes in it; None when no shape speaks for it."""
        far = [g.shape.distance(problem) for g in self.grids]
        if not far or (least := min(far)) == inf:
            return None
        grid = self.grids[far.index(least)]
        return grid, grid.shape.place(problem)

    def speaks_for(self, kernel: Kernel, target: Target) -> bool:
        """Was this very version of `kernel` timed? A target that assumes its packages has the table's versions."""
        known = self.versions.get(f"{kernel.op}.{kernel.name}")
        return known is not None and (target.assume is not None or known == version_of(kernel))

    def floor_us(self, grid: Grid, at: Sizes) -> float:
        """The time of the work at the best rates any kernel reached anywhere, and never less than the shortest time in `grid`."""
        least = min((t for times in grid.us.values() for t in times if t is not None), default=0.0)
        return max(least, *(need / rate for need, rate in zip(grid.shape.work(at), self._best_rates, strict=True) if rate))

    @functools.cached_property
    def _best_rates(self) -> Work:
        seen = [g.best_rates() for g in self.grids]
        return Work(max((r.bytes for r in seen), default=0.0), max((r.flops for r in seen), default=0.0))

    def to_json(self) -> str:
        """The file's text, one line a grid."""
        head = {"format": FORMAT, "gpu": self.gpu, "target": self.target, "made": dict(self.made), "versions": dict(self.versions)}
        head |= {"source": self.source} if self.source else {}
        lines = [json.dumps(_grid_dict(g), separators=(",", ":")) for g in self.grids]
        return json.dumps(head, indent=1)[:-2] + ',\n "grids": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def costs(problem: Problem, kernels: Iterable[Kernel], table: Table | None) -> dict[str, Cost]:
    """The cost of each of `kernels`, which can all run `problem`.

    Where the table covers at least one kernel, measured times rank the kernels it covers. Another kernel costs HANDICAP times the larger
    of its own estimate and the time of its work at the best rates measured: it is chosen only where all measured times are slow. Where
    the table covers no kernel, their own estimates rank them.
    A kernel that reads a plan of the device was timed with it: a call without a plan takes longer by the kernel's own estimate.
    """
    kernels = tuple(kernels)
    found = table.nearest(problem) if table is not None else None
    times: dict[str, float] = {}
    if table is not None and found is not None:
        grid, at = found
        for k in kernels:
            if table.speaks_for(k, problem.target) and (us := grid.at(k.name, at)) is not None:
                unplanned = k.plan.device is not None and problem.plan == "none"
                times[k.name] = us + (k.cost_us(problem) - k.cost_us(replace(problem, plan="device")) if unplanned else 0.0)
    if table is None or found is None or not times:
        return {k.name: Cost(k.cost_us(problem), ESTIMATED) for k in kernels}
    floor, how = table.floor_us(*found), f"{SCALED} {table.source}" if table.source else MEASURED
    return {
        k.name: Cost(times[k.name], how) if k.name in times else Cost(HANDICAP * max(k.cost_us(problem), floor), UNMEASURED)
        for k in kernels
    }


def version_of(kernel: Kernel) -> str:
    """The versions that a measured time of `kernel` holds for: its packages', or torch's minor version for a kernel without packages.

    For our own Triton kernels the version of attnops is among them.
    """
    own = f";attnops=={VERSION}" if any(p.module == "triton" for p in kernel.packages) else ""
    return ";".join(kernel.versions()) + own or f"torch=={'.'.join(torch.__version__.split('.')[:2])}"


_DEFAULTS = asdict(Shape(""))


def _grid_dict(grid: Grid) -> dict[str, Any]:
    def short(values: Iterable[float | None]) -> list[float | None]:
        return [int(x) if x is not None and x == int(x) else x for x in values]

    shape = {n: v for n, v in asdict(grid.shape).items() if v != _DEFAULTS[n]}
    # The Nones at the end are left out: a slow kernel has many.
    counts = {n: max((i for i, t in enumerate(times, 1) if t is not None), default=0) for n, times in grid.us.items()}
    times = {name: short(times[: counts[name]]) for name, times in grid.us.items()}
    out = {"shape": shape, **{n: short(axis) for n, axis in zip(AXES, grid.axes, strict=True)}, "us": times}
    return out | {n: dict(v) for n, v in (("plan_us", grid.plan_us), ("skipped", grid.skipped)) if v}


def from_json(text: str) -> Table:
    """The table that `text` holds. Raises BadTable for text that is no table of this version's format."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadTable("file", f"no JSON ({error})", "a file that `attnops tune` wrote") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise BadTable("format", got, str(FORMAT))
    try:
        table = Table(str(data["gpu"]), str(data["target"]), dict(data["versions"]), tuple(map(_grid, data["grids"])), dict(data["made"]))
        _ = table.digest  # a table that cannot be written again is refused
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadTable("table", f"{type(error).__name__}: {error}", "a file that `attnops tune` wrote") from None
    return table


def _grid(data: dict[str, Any]) -> Grid:
    shape = Shape(**data["shape"])
    batch, queries, ratio = axes = [tuple(float(x) for x in data[name]) for name in AXES]
    count = len(batch) * len(queries) * len(ratio)
    times = {str(k): tuple(None if t is None else float(t) for t in row) for k, row in data["us"].items()}
    plans = {str(k): float(us) for k, us in data.get("plan_us", {}).items()}
    if any(type(value) is not type(_DEFAULTS[name]) for name, value in asdict(shape).items()):
        raise ValueError(f"shape {data['shape']} has a field of another type")
    dtypes = (getattr(torch, name, None) for name in (shape.dtype, shape.kv_dtype))
    wanted = {
        "a number of the shape is too large": not any(isinstance(v, int) and abs(v) > LARGEST_INT for v in asdict(shape).values()),
        f"shape {data['shape']} has no such heads or dtypes": min(shape.q_heads, shape.kv_heads) >= 1
        and all(isinstance(d, torch.dtype) for d in dtypes),
        "an axis does not grow from 1 or more": all(a and a[0] >= 1 and list(a) == sorted(set(a)) and isfinite(a[-1]) for a in axes),
        f"want at most {count} positive times a kernel": all(
            len(row) <= count and all(t is None or (t > 0 and isfinite(t)) for t in row) for row in times.values()
        ),
        "want finite times of plans": all(isfinite(us) and us >= 0 for us in plans.values()),
    }
    if broken := [text for text, holds in wanted.items() if not holds]:
        raise ValueError(broken[0])
    times = {name: row + (None,) * (count - len(row)) for name, row in times.items()}
    return Grid(shape, batch, queries, ratio, times, plans, {str(k): str(why) for k, why in data.get("skipped", {}).items()})
