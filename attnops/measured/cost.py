"""The cost of a call without a measured time, by its work and the rates of GPUs.

`Shape` holds the facts of a call that do not change with its sizes, as tables of measured times name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot, inf, log2
from typing import NamedTuple

import torch

from attnops.core.problem import Problem, Target

NEAR_HEAD_DIM = 2.0
"""A shape speaks for head dims up to this factor away from its own."""


class Sizes(NamedTuple):
    """Requests, new tokens of each, and keys of each per new token (for one new token: its keys). Each at least 1, except `ratio`.

    Other shapes than those of attention say what these are of theirs.
    """

    batch: float
    queries: float
    ratio: float


class Work(NamedTuple):
    """Bytes that must be moved and floating-point operations that must be done."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Shape:
    """A kind of call. Fields as in Problem. window: its left side, -1 is unbounded. square: as many keys as queries, by construction.

    lse: the call returns the lse, as the forward of a training step does. Such a shape speaks for such calls only.

    A shape speaks for its neighbours: other head counts count as more or fewer requests, other differences as a distance.
    """

    op: str
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    rope_dim: int = 0
    page_size: int = 0
    causal: bool = True
    window: int = -1
    sinks: bool = False
    kv_range: bool = False
    square: bool = False
    decode: bool = False
    softcap: bool = False
    lse: bool = False

    def distance(self, p: Problem) -> float:
        """How unlike `p` the shape is: 0 for the same kind, infinite when the shape does not speak for `p`.

        The weights below count octaves. `square` matters where it says whether a mask must be written out.
        """
        own, rules = (self.op, self.rope_dim, self.kv_range, self.window >= 0, self.decode, self.page_size > 0), p.rules
        if own != (p.op, p.rope_dim, rules.kv_range, rules.windowed, decodes(p), p.page_size > 0) or rules.mask != "none":
            return inf
        if rules.attention_chunk or p.dtype is None or p.kv_dtype is None or not p.q_heads or not p.kv_heads:
            return inf
        if self.lse and not p.results.lse:
            return inf
        dims = ((self.head_dim, p.head_dim), (self.v_head_dim, p.v_head_dim))
        if (
            (_width(self.dtype), _width(self.kv_dtype)) != (p.dtype.itemsize, p.kv_dtype.itemsize)
            or (not self.decode and self.causal and not self.kv_range and self.square != p.step.sizes_equal)
            or any(not b or max(a / b, b / a) > NEAR_HEAD_DIM for a, b in dims)
        ):
            return inf
        return (
            0.75 * sum(octaves(a, b) for a, b in dims)
            + octaves(self.group_size, p.group_size) * (1.0 if self.decode else 0.5)
            + 0.25 * (octaves(self.kv_heads, p.kv_heads) + octaves(self.page_size, p.page_size))
            + 0.1 * octaves(self.window + 1, rules.window[0] + 1)
            + 0.5 * (not self.decode and self.causal != rules.causal)
            + 0.25 * ((self.sinks != rules.sinks) + (self.softcap != rules.softcap))
            + 2.0 * (self.lse != p.results.lse)
        )

    @property
    def group_size(self) -> int:
        """Query heads a key head serves."""
        return self.q_heads // self.kv_heads

    @property
    def sound(self) -> bool:
        """Has it heads and dtypes?"""
        known = all(isinstance(getattr(torch, name, None), torch.dtype) for name in (self.dtype, self.kv_dtype))
        return known and min(self.q_heads, self.kv_heads) >= 1

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + f"/{self.v_head_dim}" * (self.v_head_dim != self.head_dim)
        words = [self.op, "decode" if self.decode else "extend", f"{self.q_heads}/{self.kv_heads} heads of {dims}", self.dtype]
        words += [f"keys {self.kv_dtype}"] * (self.kv_dtype != self.dtype) + [f"page {self.page_size}"] * bool(self.page_size)
        words += [f"window {self.window}"] * (self.window >= 0) + ["sinks"] * self.sinks + ["padded"] * self.kv_range
        words += ["soft cap"] * self.softcap + ["with lse"] * self.lse
        return " ".join(words + ["not causal"] * (not self.causal and not self.decode))

    def place(self, p: Problem) -> Sizes:
        """The sizes of this shape with the work of `p`.

        Heads and head dims count as requests: key heads in a decode step, query heads in a prefill. Over pages, where many keys may meet
        few queries, the query heads of a group count as queries. Less than one request is one with less work.
        """
        batch, queries, ratio = sizes_of(p)
        paged = self.page_size > 0 and not self.decode
        heads = p.kv_heads / self.kv_heads if self.decode or paged else p.q_heads / self.q_heads
        if paged:
            group = p.group_size / self.group_size
            queries, ratio = queries * group, ratio / group
            if ratio < 1:
                queries, ratio = queries * ratio**0.5, 1.0
        batch *= heads * (p.head_dim + p.v_head_dim) / (self.head_dim + self.v_head_dim)
        if batch < 1 and self.decode:
            batch, ratio = 1.0, ratio * batch
        elif batch < 1:
            batch, queries = 1.0, queries * batch**0.5
        return Sizes(batch, queries, ratio)

    def work(self, at: Sizes) -> Work:
        """The bytes and operations of a call of this shape."""
        every = at.queries * at.ratio
        keys = min(every, self.window + at.queries) if self.window >= 0 else every
        most = self.window + 1 if self.window >= 0 else inf
        pairs = at.batch * (_causal_pairs(at.queries, every, most) if self.causal else at.queries * keys)
        width = self.head_dim + self.v_head_dim
        stored = self.head_dim if self.rope_dim else self.kv_heads * width
        moved = at.batch * (at.queries * self.q_heads * width * _width(self.dtype) + keys * stored * _width(self.kv_dtype))
        return Work(moved, 2.0 * pairs * self.q_heads * width)


def _causal_pairs(queries: float, keys: float, most: float) -> float:
    """Pairs of a request's new tokens and the keys that each sees, at most `most`."""
    queries = min(queries, keys)  # the other queries see no key
    unseen = max(0.0, keys - most)
    return queries * most if 0 < queries <= unseen else queries * (keys - 0.5 * (queries - 1)) - unseen * (unseen + 1) / 2


def decodes(p: Problem) -> bool:
    """One new token a request, as far as the hint says."""
    return p.sizes.queries.hint <= 1


def sizes_of(p: Problem) -> Sizes:
    """From the hints: requests, their mean number of new tokens, and keys per new token of the longest, which the others resemble."""
    batch, tokens, most, context = (float(max(x.hint, 1)) for x in (p.sizes.batch, p.sizes.tokens, p.sizes.queries, p.sizes.context))
    return Sizes(batch, 1.0 if decodes(p) else max(min(tokens / batch, most), 1.0), context / most)


def octaves(a: float, b: float) -> float:
    """How often one of both is to be doubled to be the other; 0 where one is 0."""
    return abs(log2(a / b)) if a and b else 0.0


def _width(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


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

RTX_PRO_6000 = Rates(1.79 * COPY, 500 * PRODUCT)
"""The other GPU of compute capability 120, by its datasheet."""

CPU = Rates(0.09, 0.8)
"""A few cores of a CPU."""


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
        behind = min((n for n in (p.rules.window[0], p.rules.attention_chunk - 1) if n >= 0), default=-1)
        dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype))
        dims = p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim, p.rope_dim, p.page_size
        work, rates = Shape(p.op, dtype, kv_dtype, *dims, p.rules.causal, behind).work(sizes_of(p)), rates_of(p.target)
        moved = work.bytes / (self.bandwidth * rates.bandwidth * 1e6)
        # Half as many numbers a second that are twice as wide.
        done = work.flops * p.dtype.itemsize / 2 / (self.products * rates.matmul * 1e6)
        keys = min(max(p.sizes.context.hint, 1), behind + max(p.sizes.queries.hint, 1) if behind >= 0 else inf)
        return self.launch_us + hypot(moved, done, self.key_us * min(keys, self.keys))


def phases(decode: Callable[[Problem], float], extend: Callable[[Problem], float]) -> Callable[[Problem], float]:
    """One estimate for one new token a request, another for more."""
    return lambda p: decode(p) if decodes(p) else extend(p)


def copy_us(p: Problem, numbers: float) -> float:
    """A pass that reads and writes so many numbers of the query's dtype."""
    return 2.0 * p.dtype.itemsize * numbers / (rates_of(p.target).bandwidth * 1e6)


def multiply_us(p: Problem, moved: float, flops: float) -> float:
    """A large product in the Problem's dtype that moves so many bytes."""
    rates = rates_of(p.target)
    # float32 without TF32 has no matrix units.
    flops *= 16.0 if p.dtype.itemsize >= 4 else 1.0
    return hypot(moved / rates.bandwidth, flops / rates.matmul) / 1e6


def logits_us(launch_us: float, us_a_logit: float, p: Problem) -> float:
    """A launch, and the logits written out and read again."""
    return launch_us + max(p.q_heads, 1) * max(p.sizes.tokens.hint, 1) * max(p.sizes.context.hint, 1) * us_a_logit


def token_writes_us(launch_us: float, numbers_a_us: float, p: Problem) -> float:
    """A launch, and the keys and values, or the latents, of the new tokens."""
    numbers = p.head_dim if p.rope_dim else p.kv_heads * (p.head_dim + p.v_head_dim)
    return launch_us + max(p.sizes.tokens.hint, 1) * numbers / numbers_a_us
