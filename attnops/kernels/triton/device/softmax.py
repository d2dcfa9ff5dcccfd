"""Device functions: the running softmax in base 2, the rules of visibility, and the split of a
request's keys among programs."""

import triton
import triton.language as tl
from triton.language import constexpr

LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)
LOWEST = constexpr(-1e38)
FAINT = constexpr(-1e6 * (1 + 2.0**-13))
"""See `attnops.core.tensors`: a log-sum-exp below this is a faint row's."""


@triton.jit
def finite(top):
    """`top`, and 0 where it is -inf, so that it can be subtracted from logits that are all -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def raised(top, logit):
    """(the larger of both, `finite` of it, the factor on sums of powers of 2 that `top` was
    subtracted from)."""
    higher = tl.maximum(top, logit)
    base = finite(higher)
    return higher, base, tl.exp2(top - base)


@triton.jit
def occupied(z):
    """A log-sum-exp with -inf for +inf, which kernels of other packages write where no key is
    seen."""
    return tl.where(z == float("inf"), float("-inf"), z)


@triton.jit
def in_base_2(bias):
    """float32 of an additive mask, in base 2. What is finite stays so: float32 ends at -2.36e38 in
    base 2."""
    wide = bias.to(tl.float32)
    if bias.dtype != tl.float16:
        wide = tl.where((wide < LOWEST) & (wide > float("-inf")), LOWEST, wide)
    return wide * LOG2E


@triton.jit
def tanh(x):
    """tanh to float32's precision. Near 0, where exp cancels, it is a series (Abramowitz and
    Stegun, 4.5.64)."""
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def with_sink(acc_factor, z, sink):
    """(factor on the output, log-sum-exp) with the logit `sink`, which has no value, among the
    others; all in base 2."""
    top = tl.maximum(z, sink)
    top = finite(top)
    # A sink of +inf has all of the weight.
    joined = tl.exp2(z - top) + tl.where(sink == top, 1.0, tl.exp2(sink - top))
    share = tl.where(joined > 0, tl.exp2(z - top) / joined, 0.0)
    return acc_factor * share, top + tl.log2(joined)


@triton.jit
def chunk_of(position, chunk):
    """The first key of a position's chunk. A position before the first key has an empty chunk."""
    return tl.where(position < 0, -chunk, position // chunk * chunk)


@triton.jit
def span(first, last, low, high, left, right, chunk, CAUSAL: constexpr):
    """The range of keys within `[low, high)` that some position of first..last sees. span(last,
    first, ...): that all positions see."""
    if CAUSAL:
        high = tl.minimum(high, last + 1)
    if right is not None:
        high = tl.minimum(high, last + right + 1)
    if left is not None:
        low = tl.maximum(low, first - left)
    if chunk is not None:
        low = tl.maximum(low, chunk_of(first, chunk))
        high = tl.minimum(high, chunk_of(last, chunk) + chunk)
    return low, high


@triton.jit
def sees(visible, position, key, left, right, chunk, CAUSAL: constexpr):
    """`visible` and the rules: does a position see a key? position and key broadcast."""
    if CAUSAL:
        visible = visible & (key <= position)
    if left is not None:
        visible = visible & (key >= position - left)
    if right is not None:
        visible = visible & (key <= position + right)
    if chunk is not None:
        begun = chunk_of(position, chunk)
        visible = visible & (key >= begun) & (key < begun + chunk)
    return visible


@triton.jit
def closed(top, total):
    """(factor on the weighted sum, log-sum-exp in base 2) of weights that add up to
    `total * 2^top`; 0 and -inf without weights."""
    return tl.where(total > 0, 1.0 / total, 0.0), finite(top) + tl.log2(total)


@triton.jit
def share(length, queries, left, chunk, splits, split_keys, tile):
    """(first key, keys a split) of a request, both multiples of `tile`. split_keys 0: `splits`
    shares as even as possible."""
    first = 0
    if left is not None:
        first = tl.maximum(length - queries - left, 0)
    if chunk is not None:
        first = tl.maximum(chunk_of(length - queries, chunk), first)
    first = first // tile * tile
    size = split_keys
    if split_keys == 0:
        size = tl.maximum(tl.cdiv(tl.cdiv(length - first, splits), tile), 1) * tile
    return first, size
