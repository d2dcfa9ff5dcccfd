"""Device functions that the kernels of the gradient share: where a request is, rows in two parts,
ranges of queries, and weights."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.attend import find, load_keys
from attnops.kernels.triton.device.softmax import LOG2E, chunk_of, tanh

VARYING = [
    "left",
    "right",
    "chunk",
    "requests",
    "steps",
    "tiles",
    "each",
    "width_q",
    "width_k",
    "tokens",
]


@triton.jit
def load_parts(
    base, at, seen, D: constexpr, BLOCK_D: constexpr, REST: constexpr, COMPUTE: constexpr
):
    """Rows of D numbers in two parts, `[rows, BLOCK_D]` and `[rows, REST]`. The second is not read
    where REST is 0."""
    part = load_keys(base, at, seen, D, BLOCK_D, True).to(COMPUTE)
    rest = part
    if REST:
        rest = load_keys(base + BLOCK_D, at, seen, D - BLOCK_D, REST, True).to(COMPUTE)
    return part, rest


@triton.jit
def multiply(
    a,
    a_rest,
    base,
    at,
    seen,
    D: constexpr,
    BLOCK_D: constexpr,
    REST: constexpr,
    MASKED: constexpr,
    COMPUTE: constexpr,
):
    """(`a @ b.T`, both parts of b) of rows in two parts; those of b are loaded as by `load_parts`,
    each ahead of its product."""
    b = load_keys(base, at, seen, D, BLOCK_D, MASKED).to(COMPUTE)
    s = tl.dot(a, tl.trans(b), input_precision="ieee")
    b_rest = b
    if REST:
        b_rest = load_keys(base + BLOCK_D, at, seen, D - BLOCK_D, REST, MASKED).to(COMPUTE)
        s = tl.dot(a_rest, tl.trans(b_rest), s, input_precision="ieee")
    return s, b, b_rest


@triton.jit
def add_parts(acc, acc_rest, x, rows, rows_rest, REST: constexpr):
    """Both parts of a sum, plus `x @ rows`."""
    acc = tl.dot(x, rows, acc, input_precision="ieee")
    if REST:
        acc_rest = tl.dot(x, rows_rest, acc_rest, input_precision="ieee")
    return acc, acc_rest


@triton.jit
def store_rows(ptr, at, x, live, WIDTH: constexpr, BLOCK: constexpr):
    """Write live rows of `[rows, BLOCK]` numbers at the offsets `at`."""
    dims = tl.arange(0, BLOCK)
    tl.store(ptr + at[:, None] + dims[None, :], x, mask=live[:, None] & (dims < WIDTH)[None, :])


@triton.jit
def store_parts(ptr, at, acc, acc_rest, live, D: constexpr, BLOCK_D: constexpr, REST: constexpr):
    """Write live rows of both parts of a sum."""
    store_rows(ptr, at, acc, live, D, BLOCK_D)
    if REST:
        store_rows(ptr + BLOCK_D, at, acc_rest, live, D - BLOCK_D, REST)


@triton.jit
def request_at(cu_ptr, tile, requests, steps, each, TILE: constexpr):
    """(request, its tile) of a tile of all requests. A tile of padding rows has the request
    `requests`."""
    if cu_ptr is not None:
        request = find(cu_ptr, tile, requests, steps, TILE)
        return request, tile - tl.load(cu_ptr + request) // TILE - request
    else:
        return tile // each, tile % each


@triton.jit
def bounds_of(cu_q_ptr, cu_k_ptr, start_ptr, end_ptr, request, width_q, width_k):
    """(first query, queries, row of key 0, first key, end of keys, position of the first query) of
    a request."""
    if cu_q_ptr is not None:
        begin = tl.load(cu_q_ptr + request)
        base = tl.load(cu_k_ptr + request)
        queries = tl.load(cu_q_ptr + request + 1) - begin
        high = tl.load(cu_k_ptr + request + 1) - base
        return begin.to(tl.int64), queries, base.to(tl.int64), 0, high, high - queries
    else:
        low = 0
        high = width_k
        if start_ptr is not None:
            low = tl.maximum(tl.load(start_ptr + request).to(tl.int32), 0)
        if end_ptr is not None:
            high = tl.load(end_ptr + request).to(tl.int32)
        first = high - width_q
        wide = tl.full([], 0, tl.int64) + request
        return wide * width_q, width_q, wide * width_k, low, tl.minimum(high, width_k), first


@triton.jit
def seen_by(
    first,
    last,
    queries,
    offset,
    left,
    right,
    chunk,
    CAUSAL: constexpr,
):
    """The range of queries, `offset` the first one's position, that see some key of first..last.
    seen_by(last, first, ...): all keys."""
    start = 0
    end = queries
    if CAUSAL:
        start = tl.maximum(start, first - offset)
    if right is not None:
        start = tl.maximum(start, first - right - offset)
    if left is not None:
        end = tl.minimum(end, last + left - offset + 1)
    if chunk is not None:
        start = tl.maximum(start, chunk_of(first, chunk) - offset)
        end = tl.minimum(end, chunk_of(last, chunk) + chunk - offset)
    return start, end


@triton.jit
def in_steps(key, high, STEP: constexpr):
    """Is the key, or another one of its STEP neighbours, before `high`? Triton loads STEP numbers
    of a mask at once by it."""
    return key // STEP * STEP < high


@triton.jit
def load_stats(stats_ptr, rows, TILE: constexpr):
    """(z, delta) of TILE rows, 0 past `rows` of them: see `grad_queries`.

    Half of the places are masked off. Without them the tile would have fewer numbers than the
    program has threads, and Triton would have every thread load all of them.
    """
    at = tl.arange(0, 4 * TILE)
    both = tl.load(stats_ptr + at, mask=at < 2 * tl.minimum(rows, TILE), other=0.0)
    both, _ = tl.split(tl.permute(tl.reshape(both, [2, 2 * TILE]), (1, 0)))
    return tl.split(tl.reshape(both, [TILE, 2]))


@triton.jit
def weights_of(
    s,
    z,
    bias,
    visible,
    scale,
    cap,
    MASK: constexpr,
    MASKED: constexpr,
    COMPUTE: constexpr,
):
    """(weights, derivative of the capped logit by the raw logit). s: products. z: log-sum-exps in
    base 2, which broadcast."""
    slope = 1.0
    if cap is not None:
        if COMPUTE == tl.float32:
            bent = tanh(s * scale)
        else:
            # To float32's absolute precision: a number of 16 bits cannot tell.
            bent = 1.0 - 2.0 / (tl.exp2(s * (scale * (2.0 * LOG2E))) + 1.0)
        slope = 1.0 - bent * bent
        logit = bent * cap
    else:
        logit = s * scale
    if MASK == "additive":
        logit = logit + bias.to(tl.float32) * LOG2E
    p = tl.exp2(logit - z)
    if MASK == "bool":
        if MASKED:
            visible = visible & (bias != 0)
        else:
            visible = bias != 0
    if MASKED or MASK == "bool":
        p = tl.where(visible, p, 0.0)
    return p, slope
