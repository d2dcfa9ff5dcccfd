"""The highest rates of GPUs: estimates of kernels without measured times, and tables scaled to a sibling of the same architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import hypot, inf, log
from typing import NamedTuple

from attnops.measured.shape import Shape, Work, decodes, sizes_of
from attnops.measured.table import Grid, Table
from attnops.problem import Problem, Target


class Rates(NamedTuple):
    """TB/s of a pass over memory, and TFLOP/s of a large product in bfloat16."""

    bandwidth: float
    matmul: float


# Of large copies and products about this much of the datasheet's figures was measured where both are known.
COPY, PRODUCT = 0.9, 0.8

RATES: Mapping[str, Rates] = {
    "NVIDIA H200": Rates(4.27, 790.0),
    "NVIDIA H100 80GB HBM3": Rates(3.01, 785.0),
    # Not measured: the datasheets' figures.
    "NVIDIA H100 PCIe": Rates(2.0 * COPY, 756 * PRODUCT),
    "NVIDIA H100 NVL": Rates(3.9 * COPY, 835 * PRODUCT),
    "NVIDIA H200 NVL": Rates(4.8 * COPY, 835 * PRODUCT),
    "NVIDIA GH200 480GB": Rates(4.0 * COPY, 989 * PRODUCT),
    "NVIDIA GH200 144G HBM3e": Rates(4.9 * COPY, 989 * PRODUCT),
    "NVIDIA H800": Rates(3.35 * COPY, 989 * PRODUCT),
    "NVIDIA H20": Rates(4.0 * COPY, 148 * PRODUCT),
}
"""By the device's name as its driver says it. Of GPUs of one architecture the first one speaks for a target of no name."""

BY_ARCH: Mapping[int, Rates] = {
    80: Rates(2.04 * COPY, 312 * PRODUCT),
    86: Rates(0.94 * COPY, 142 * PRODUCT),
    89: Rates(0.86 * COPY, 362 * PRODUCT),
    90: RATES["NVIDIA H200"],
    100: Rates(8.0 * COPY, 2250 * PRODUCT),
    103: Rates(8.0 * COPY, 2500 * PRODUCT),
    120: Rates(1.79 * COPY, 210 * PRODUCT),
}
"""By compute capability, of a GPU of no name or not in RATES: the datasheets' figures of A100, RTX 3090, L40S, B200, B300 and RTX 5090."""


def rates_of(target: Target) -> Rates:
    """For estimates. A CPU counts as an H200: kernels are compared with each other only."""
    return RATES.get(target.gpu) or BY_ARCH.get(target.arch, BY_ARCH[90])


@dataclass(frozen=True)
class Roofline:
    """Estimated device microseconds of a Problem: launches, then the hypotenuse of bytes, products and the keys a program reads in turn.

    The five numbers were fitted to the table of an H200. launch_us: at any sizes. bandwidth, products: shares of the GPU's rates.
    key_us: of a key, where programs are too few to hide it. keys: the most that a program reads, since more are split among several.
    """

    launch_us: float
    bandwidth: float
    products: float
    key_us: float = 0.0
    keys: float = inf

    def __call__(self, p: Problem) -> float:
        behind = min((n for n in (p.window[0], p.attention_chunk - 1) if n >= 0), default=-1)
        dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype))
        dims = p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim, p.rope_dim, p.page_size
        work, rates = Shape(p.op, dtype, kv_dtype, *dims, p.causal, behind).work(sizes_of(p)), rates_of(p.target)
        moved = work.bytes / (self.bandwidth * rates.bandwidth * 1e6)
        # Half as many numbers a second that are twice as wide.
        done = work.flops * p.dtype.itemsize / 2 / (self.products * rates.matmul * 1e6)
        keys = min(max(p.context.hint, 1), behind + max(p.queries.hint, 1) if behind >= 0 else inf)
        return self.launch_us + hypot(moved, done, self.key_us * min(keys, self.keys))


def phases(decode: Callable[[Problem], float], extend: Callable[[Problem], float]) -> Callable[[Problem], float]:
    """One estimate for one new token a request, another for more."""
    return lambda p: decode(p) if decodes(p) else extend(p)


def copy_us(p: Problem, numbers: float) -> float:
    """A pass that reads and writes so many numbers of the query's dtype."""
    return 2.0 * p.dtype.itemsize * numbers / (rates_of(p.target).bandwidth * 1e6)


def nearness(gpu: str, other: str) -> tuple[float, int]:
    """Sorts tables of `other` GPUs by how well they serve `gpu`: by their rates where both are known, then in the order of RATES."""
    place = list(RATES).index(other) if other in RATES else len(RATES)
    if gpu not in RATES or other not in RATES:
        return inf if gpu in RATES else 0.0, place
    return sum(abs(log(a / b)) for a, b in zip(RATES[gpu], RATES[other], strict=True)), place


def scaled(table: Table, gpu: str) -> Table:
    """`table` for `gpu`, of the same architecture: every time grows by the difference of the two rooflines.

    Times of an H200 scaled to an H100 are 3.1% off in the median, and 1.4% of all pairs of kernels change their order. A GPU of unknown
    rates counts as equally fast.
    """
    here, there = RATES.get(table.gpu), RATES.get(gpu)
    if here is None or there is None:
        return replace(table, gpu=gpu, source=table.gpu)
    return replace(table, gpu=gpu, source=table.gpu, grids=tuple(_scaled(g, here, there) for g in table.grids))


def _scaled(grid: Grid, here: Rates, there: Rates) -> Grid:
    def us(work: Work, rates: Rates) -> float:
        return max(work.bytes / (rates.bandwidth * 1e6), work.flops / (rates.matmul * 1e6))

    longer = [us(work, there) - us(work, here) for work in map(grid.shape.work, grid.points())]

    def on(times: tuple[float | None, ...]) -> tuple[float | None, ...]:
        launch = min((t for t in times if t is not None), default=0.0)
        return tuple(None if t is None else max(t + more, launch) for t, more in zip(times, longer, strict=True))

    return replace(grid, us={name: on(times) for name, times in grid.us.items()})
