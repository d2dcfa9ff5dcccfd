"""The cost of a call without a measured time, by its work and the rates of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot, inf
from typing import NamedTuple

from attnops.core.problem import Problem, Target

MEASURED, SCALED, ESTIMATED, UNMEASURED = "measured", "scaled from", "estimated", "not measured"


class Cost(NamedTuple):
    """Device microseconds. how: MEASURED, `SCALED <a sibling GPU>`, ESTIMATED, or UNMEASURED beside
    kernels that have times."""

    us: float
    how: str

    @property
    def timed(self) -> bool:
        """Is it a measured time, of this GPU or of a sibling?"""
        return self.how == MEASURED or self.how.startswith(SCALED)

    def __str__(self) -> str:
        return (
            f"{self.us:.4g} us {self.how}"
            if self.how.startswith(SCALED)
            else f"{self.how} {self.us:.4g} us"
        )


class Sizes(NamedTuple):
    """Requests, new tokens of each, and keys of each per new token (for one new token: its keys).
    Each at least 1, except `ratio`. Other families than attention say what these are of theirs.
    """

    batch: float
    queries: float
    ratio: float


class Work(NamedTuple):
    """Bytes that must be moved and floating-point operations that must be done."""

    bytes: float
    flops: float


def decodes(p: Problem) -> bool:
    """One new token a request, as far as the hint says."""
    return p.sizes.queries.hint <= 1


def sizes_of(p: Problem) -> Sizes:
    """From the hints: requests, their mean number of new tokens, and keys per new token of the
    longest, which the others resemble."""
    batch, tokens, most, context = (
        float(max(x.hint, 1))
        for x in (p.sizes.batch, p.sizes.tokens, p.sizes.queries, p.sizes.context)
    )
    return Sizes(batch, 1.0 if decodes(p) else max(min(tokens / batch, most), 1.0), context / most)


def keys_behind(p: Problem) -> int:
    """The most keys before its own that a token sees; -1: all of them."""
    limits = p.rules.window[0], p.rules.attention_chunk - 1
    return min((n for n in limits if n >= 0), default=-1)


def work_of_attention(p: Problem, at: Sizes) -> Work:
    """The bytes and operations of a call like `p`, or of a call of a kind, at these sizes."""
    every, behind = at.queries * at.ratio, keys_behind(p)
    keys, most = (min(every, behind + at.queries), behind + 1) if behind >= 0 else (every, inf)
    pairs = at.batch * (
        _causal_pairs(at.queries, every, most) if p.rules.causal else at.queries * keys
    )
    width = p.head_dim + p.v_head_dim
    stored = p.head_dim if p.rope_dim else p.kv_heads * width
    moved = at.batch * (
        at.queries * p.q_heads * width * p.dtype.itemsize + keys * stored * p.kv_dtype.itemsize
    )
    return Work(moved, 2.0 * pairs * p.q_heads * width)


def _causal_pairs(queries: float, keys: float, most: float) -> float:
    """Pairs of a request's new tokens and the keys that each sees, at most `most`."""
    queries = min(queries, keys)  # the other queries see no key
    unseen = max(0.0, keys - most)
    return (
        queries * most
        if 0 < queries <= unseen
        else queries * (keys - 0.5 * (queries - 1)) - unseen * (unseen + 1) / 2
    )


class Rates(NamedTuple):
    """TB/s of a pass over memory, and TFLOP/s of a large product in bfloat16."""

    bandwidth: float
    matmul: float


# Of large copies and products about this much of the datasheet's figures was measured where both
# are known.
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
"""By the device's name as its driver says it. Of GPUs of one architecture the first one speaks for
a target of no name."""

BY_ARCH: Mapping[int, Rates] = {
    80: Rates(2.04 * COPY, 312 * PRODUCT),
    86: Rates(0.94 * COPY, 142 * PRODUCT),
    89: Rates(0.86 * COPY, 362 * PRODUCT),
    90: RATES["NVIDIA H200"],
    100: Rates(8.0 * COPY, 2250 * PRODUCT),
    103: Rates(8.0 * COPY, 2500 * PRODUCT),
    120: Rates(1.79 * COPY, 210 * PRODUCT),
}
"""By compute capability, of a GPU of no name or not in RATES: the datasheets' figures of A100, RTX
3090, L40S, B200, B300 and RTX 5090."""

RTX_PRO_6000 = Rates(1.79 * COPY, 500 * PRODUCT)
"""The other GPU of compute capability 120, by its datasheet."""

CPU = Rates(0.09, 0.8)
"""A few cores of a CPU."""


def rates_of(target: Target) -> Rates:
    """For estimates. A CPU counts as an H200: kernels are compared with each other only."""
    return RATES.get(target.gpu) or BY_ARCH.get(target.arch, BY_ARCH[90])


@dataclass(frozen=True)
class Roofline:
    """Estimated device microseconds of a Problem: launches, then the hypotenuse of bytes, products
    and the keys a program reads in turn.

    The five numbers were fitted to the table of an H200. launch_us: at any sizes. bandwidth,
    products: shares of the GPU's rates.
    key_us: of a key, where programs are too few to hide it. keys: the most that a program reads,
    since more are split among several.
    """

    launch_us: float
    bandwidth: float
    products: float
    key_us: float = 0.0
    keys: float = inf

    def __call__(self, p: Problem) -> float:
        behind, rates = keys_behind(p), rates_of(p.target)
        work = work_of_attention(p, sizes_of(p))
        moved = work.bytes / (self.bandwidth * rates.bandwidth * 1e6)
        # Half as many numbers a second that are twice as wide.
        done = work.flops * p.dtype.itemsize / 2 / (self.products * rates.matmul * 1e6)
        keys = min(
            max(p.sizes.context.hint, 1),
            behind + max(p.sizes.queries.hint, 1) if behind >= 0 else inf,
        )
        return self.launch_us + hypot(moved, done, self.key_us * min(keys, self.keys))


def phases(
    decode: Callable[[Problem], float], extend: Callable[[Problem], float]
) -> Callable[[Problem], float]:
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


def token_writes_us(launch_us: float, numbers_a_us: float, p: Problem) -> float:
    """A launch, and the keys and values, or the latents, of the new tokens."""
    numbers = p.head_dim if p.rope_dim else p.kv_heads * (p.head_dim + p.v_head_dim)
    return launch_us + max(p.sizes.tokens.hint, 1) * numbers / numbers_a_us


def written_us(p: Problem) -> float:
    """A reference: the logits are written out in float32, and read several times."""
    sizes = p.sizes
    logits = max(p.q_heads, 1) * max(sizes.tokens.hint, 1) * max(sizes.context.hint, 1)
    return 1000.0 + 32e-6 * logits


SLOWEST = Roofline(0.0, 0.05, 0.05, 0.02)


def products_us(p: Problem) -> float:
    """A reference that multiplies: more than the estimate of any kernel of attention at any size
    but flex's on a CPU, which counts its compilation."""
    return written_us(p) + SLOWEST(p)
