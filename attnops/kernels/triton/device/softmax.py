"""Device functions: the running softmax in base 2, log-sum-exps, and how a request's keys are shared out among programs."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(top):
    """`top`, and 0 where it is -inf: what may be subtracted from logits when all of them are -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def tanh(x):
    """tanh to float32's precision. exp alone cancels near 0, so that a series (Abramowitz and Stegun, 4.5.64) serves there."""
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def with_sink(acc_factor, z, sink):
    """(factor on the output, log-sum-exp) once a logit `sink` without a value has joined; all in base 2."""
    top = tl.maximum(z, sink)
    top = finite(top)
    joined = tl.exp2(z - top) + tl.exp2(sink - top)
    share = tl.where(joined > 0, tl.exp2(z - top) / joined, 0.0)
    return acc_factor * share, top + tl.log2(joined)


@triton.jit
def chunk_of(position, chunk):
    """The first key of a position's chunk; before the first key, that of a chunk of no key."""
    return tl.where(position < 0, -chunk, position // chunk * chunk)


@triton.jit
def span(first, last, low, high, left, right, chunk, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNKED: tl.constexpr):
    """The range within `[low, high)` of the keys that the positions first..last see, some of them, or all where last <= first."""
    if CAUSAL:
        high = tl.minimum(high, last + 1)
    if RIGHT:
        high = tl.minimum(high, last + right + 1)
    if LEFT:
        low = tl.maximum(low, first - left)
    if CHUNKED:
        low = tl.maximum(low, chunk_of(first, chunk))
        high = tl.minimum(high, chunk_of(last, chunk) + chunk)
    return low, high


@triton.jit
def sees(visible, position, key, left, right, chunk, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNKED: tl.constexpr):
    """Does each position see each key, of those that are `visible`? position and key broadcast."""
    if CAUSAL:
        visible = visible & (key <= position)
    if LEFT:
        visible = visible & (key >= position - left)
    if RIGHT:
        visible = visible & (key <= position + right)
    if CHUNKED:
        begun = chunk_of(position, chunk)
        visible = visible & (key >= begun) & (key < begun + chunk)
    return visible


@triton.jit
def closed(top, total):
    """(factor on the sum, log-sum-exp in base 2) of weights that add up to `total * 2^top`: 0 and -inf where there are none."""
    return tl.where(total > 0, 1.0 / total, 0.0), finite(top) + tl.log2(total)


@triton.jit
def share(length, queries, left, chunk, splits, split_keys, tile, LEFT: tl.constexpr, CHUNKED: tl.constexpr):
    """(first key, keys a split) of a request, both multiples of `tile`. split_keys 0: as even a share as `splits` allow."""
    first = 0
    if LEFT:
        first = tl.maximum(length - queries - left, 0)
    if CHUNKED:
        first = tl.maximum(chunk_of(length - queries, chunk), first)
    first = first // tile * tile
    size = split_keys
    if split_keys == 0:
        size = tl.maximum(tl.cdiv(tl.cdiv(length - first, splits), tile), 1) * tile
    return first, size


@triton.jit
def let_next_begin():
    """Programs of the next kernel may be placed once all of this one have come here (PTX: griddepcontrol, sm90)."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_previous():
    """What the kernel before wrote is there. Needed before every exit too: who comes next takes it that both are done."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
