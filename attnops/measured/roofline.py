"""`Roofline`: the estimate of a kernel without measured times, by five numbers that were fitted to the table of an H200."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import hypot, inf

from attnops.measured.rates import rates_of
from attnops.measured.shape import Shape, decodes, sizes_of
from attnops.problem import Problem


@dataclass(frozen=True)
class Roofline:
    """Device microseconds of a Problem: launches, then the hypotenuse of bytes, products and the keys that one program reads in turn.

    launch_us: at any sizes. bandwidth, products: shares of the GPU's rates (`attnops.measured.rates`) that are reached. key_us:
    of a key, where programs are too few to hide it; keys: the most that a program reads, since more are split among several.
    """

    launch_us: float
    bandwidth: float
    products: float
    key_us: float = 0.0
    keys: float = inf

    def __call__(self, p: Problem) -> float:
        behind = [n for n in (p.window[0], p.attention_chunk - 1) if n >= 0]
        dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype))
        dims = p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim, p.rope_dim, p.page_size
        work = Shape(p.op, dtype, kv_dtype, *dims, p.causal, min(behind, default=-1)).work(sizes_of(p))
        rates = rates_of(p.target)
        moved = work.bytes / (self.bandwidth * rates.bandwidth * 1e6)
        # Half as many numbers a second that are twice as wide.
        done = work.flops * p.dtype.itemsize / 2 / (self.products * rates.matmul * 1e6)
        keys = max(p.context.hint, 1) if not behind else min(max(p.context.hint, 1), min(behind) + max(p.queries.hint, 1))
        return self.launch_us + hypot(moved, done, self.key_us * min(keys, self.keys))


def phases(decode: Callable[[Problem], float], extend: Callable[[Problem], float]) -> Callable[[Problem], float]:
    """One estimate for one new token a request, another for more."""
    return lambda p: decode(p) if decodes(p) else extend(p)


def copy_us(p: Problem, numbers: float) -> float:
    """A pass that reads and writes so many numbers of the query's dtype."""
    return 2.0 * p.dtype.itemsize * numbers / (rates_of(p.target).bandwidth * 1e6)
