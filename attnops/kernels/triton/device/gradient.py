"""Device functions: the gradient of attention over packed tokens, one program for a tile of queries, then one for a tile of keys.

Each number has one program that sums it, so that the order of a sum follows from the request's own tiles. FlashAttention-2,
https://arxiv.org/abs/2307.08691, section 3.1.2, as two kernels in place of one loop.
"""

import triton
import triton.language as tl

from attnops.kernels.triton.device.softmax import LOG2E, chunk_of, sees, span, tanh


@triton.jit
def rows_at(ptr, at, live, width: tl.constexpr, BLOCK: tl.constexpr):
    """`[rows, BLOCK]` numbers at the offsets `at`; 0 for rows that are not live."""
    dims = tl.arange(0, BLOCK)
    return tl.load(ptr + at[:, None] + dims[None, :], mask=live[:, None] & (dims < width)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, at, x, live, width: tl.constexpr, BLOCK: tl.constexpr):
    """Write live rows of `[rows, BLOCK]` numbers at the offsets `at`."""
    dims = tl.arange(0, BLOCK)
    tl.store(ptr + at[:, None] + dims[None, :], x.to(ptr.dtype.element_ty), mask=live[:, None] & (dims < width)[None, :])


@triton.jit
def bounds_of(bounds_ptr, requests, request):
    """(first query, queries, row of key 0, first key, end of keys, position of the first query) of a request."""
    at = bounds_ptr + request
    begin, base = tl.load(at).to(tl.int64), tl.load(at + 2 * requests).to(tl.int64)
    return begin, tl.load(at + requests), base, tl.load(at + 3 * requests), tl.load(at + 4 * requests), tl.load(at + 5 * requests)


@triton.jit
def weights_of(s, z, visible, scale, cap, CAP: tl.constexpr):
    """(weights, derivative of the capped logit by the raw logit). s: products. z: log-sum-exps in base 2, which broadcast."""
    slope = 1.0
    if CAP:
        bent = tanh(s * scale)
        slope = 1.0 - bent * bent
        s = bent * cap
    else:
        s = s * scale
    return tl.where(visible, tl.exp2(s - z), 0.0), slope


VARYING = ["left", "right", "chunk", "requests", "tiles"]


@triton.jit(do_not_specialize=VARYING)
def grad_queries(
    g_ptr, grad_lse_ptr, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, bounds_ptr, delta_ptr, sink_parts_ptr, out_ptr,
    scale, factor, cap, left, right, chunk, requests, tiles, g_t, g_h, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, COMPUTE: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Grid: heads * tiles * requests, the last tile first: it sees the most keys.

    bounds: int32 `[6, requests]`: first query, queries, row of key 0, first key, end of keys, position of the first query.
    scale: of the products. factor: of the gradient. Writes the gradient `[T, H, D]` and, for `grad_keys`, delta `[T, H]`: the sum of
    grad_output * output, minus grad_lse.
    """
    at = tl.program_id(0)
    head = at % HEADS
    tile = tiles - 1 - at // HEADS % tiles
    request = at // HEADS // tiles
    begin, queries, base, low, high, offset = bounds_of(bounds_ptr, requests, request)
    first = tile * TILE_Q
    if first >= queries:
        return
    i = first + tl.arange(0, TILE_Q)
    live = i < queries
    position = offset + i
    token = begin + i
    q = rows_at(q_ptr, token * q_t + head * q_h, live, D, BLOCK_D).to(COMPUTE)
    g = rows_at(g_ptr, token * g_t + head * g_h, live, DV, BLOCK_DV)
    o = rows_at(o_ptr, token * o_t + head * o_h, live, DV, BLOCK_DV)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    g = g.to(COMPUTE)
    row = token * HEADS + head
    z = tl.load(lse_ptr + row, mask=live, other=0.0)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row, mask=live, other=0.0)
    # A query that sees no key has no gradient.
    delta = tl.where(z == float("-inf"), 0.0, delta)
    z = tl.where(z == float("-inf"), 0.0, z) * LOG2E
    tl.store(delta_ptr + row, delta, mask=live)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        tl.store(sink_parts_ptr + row, -tl.exp2(sink - z) * delta, mask=live)

    last = offset + tl.minimum(first + TILE_Q, queries) - 1
    start, end = span(offset + first, last, low, high, left, right, chunk, CAUSAL, LEFT, RIGHT, CHUNKED)
    # Tiles are counted from the request's first key, wherever the range begins.
    start = low + (start - low) // TILE_K * TILE_K
    kv_head = head // GROUP
    acc = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    for key in range(start, end, TILE_K):
        j = key + tl.arange(0, TILE_K)
        inside = (j >= low) & (j < high)
        k = rows_at(k_ptr, (base + j) * k_t + kv_head * k_h, inside, D, BLOCK_D).to(COMPUTE)
        v = rows_at(v_ptr, (base + j) * v_t + kv_head * v_h, inside, DV, BLOCK_DV).to(COMPUTE)
        visible = sees(inside[None, :], position[:, None], j[None, :], left, right, chunk, CAUSAL, LEFT, RIGHT, CHUNKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p, slope = weights_of(s, z[:, None], visible, scale, cap, CAP)
        grad_p = tl.dot(g, tl.trans(v), input_precision="ieee")
        grad_s = p * (grad_p - delta[:, None]) * slope
        acc = tl.dot(grad_s.to(COMPUTE), k, acc, input_precision="ieee")
    store_rows(out_ptr, row * D, acc * factor, live, D, BLOCK_D)


@triton.jit(do_not_specialize=VARYING)
def grad_keys(
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, bounds_ptr, delta_ptr, out_k_ptr, out_v_ptr,
    scale, factor, cap, left, right, chunk, requests, tiles, g_t, g_h, q_t, q_h, k_t, k_h, v_t, v_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, COMPUTE: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Grid: heads of keys * tiles * requests. A program adds up its key head's query heads one after the other. See `grad_queries`."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    at = tl.program_id(0)
    kv_head = at % KV_HEADS
    tile = at // KV_HEADS % tiles
    request = at // KV_HEADS // tiles
    begin, queries, base, low, high, offset = bounds_of(bounds_ptr, requests, request)
    first = low + tile * TILE_K
    if first >= high:
        return
    j = first + tl.arange(0, TILE_K)
    inside = j < high
    k = rows_at(k_ptr, (base + j) * k_t + kv_head * k_h, inside, D, BLOCK_D).to(COMPUTE)
    v = rows_at(v_ptr, (base + j) * v_t + kv_head * v_h, inside, DV, BLOCK_DV).to(COMPUTE)

    last = tl.minimum(first + TILE_K, high) - 1
    start = 0
    end = queries
    if CAUSAL:
        start = tl.maximum(start, first - offset)
    if RIGHT:
        start = tl.maximum(start, first - right - offset)
    if LEFT:
        end = tl.minimum(end, last + left - offset + 1)
    if CHUNKED:
        start = tl.maximum(start, chunk_of(first, chunk) - offset)
        end = tl.minimum(end, chunk_of(last, chunk) + chunk - offset)
    start = start // TILE_Q * TILE_Q
    acc_k = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    acc_v = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for query in range(start, end, TILE_Q):
            i = query + tl.arange(0, TILE_Q)
            live = i < queries
            token = begin + i
            q = rows_at(q_ptr, token * q_t + head * q_h, live, D, BLOCK_D).to(COMPUTE)
            g = rows_at(g_ptr, token * g_t + head * g_h, live, DV, BLOCK_DV).to(COMPUTE)
            row = token * HEADS + head
            z = tl.load(lse_ptr + row, mask=live, other=0.0)
            z = tl.where(z == float("-inf"), 0.0, z) * LOG2E
            delta = tl.load(delta_ptr + row, mask=live, other=0.0)
            position = offset + i
            visible = sees(inside[:, None], position[None, :], j[:, None], left, right, chunk, CAUSAL, LEFT, RIGHT, CHUNKED)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            p, slope = weights_of(s, z[None, :], visible, scale, cap, CAP)
            acc_v = tl.dot(p.to(COMPUTE), g, acc_v, input_precision="ieee")
            grad_p = tl.dot(v, tl.trans(g), input_precision="ieee")
            grad_s = p * (grad_p - delta[None, :]) * slope
            acc_k = tl.dot(grad_s.to(COMPUTE), q, acc_k, input_precision="ieee")
    row = (base + j) * KV_HEADS + kv_head
    store_rows(out_k_ptr, row * D, acc_k * factor, inside, D, BLOCK_D)
    store_rows(out_v_ptr, row * DV, acc_v, inside, DV, BLOCK_DV)
