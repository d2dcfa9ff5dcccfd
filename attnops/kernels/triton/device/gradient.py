"""Device functions: the gradient of attention, one program for a tile of queries, one for a tile of
keys.

Each number has one program that sums it, so that the order of a sum follows from the request's own
tiles. FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2, as two kernels in place of
one loop. Tiles of which every query sees every key are not masked. The offset of a tile's first row
has 64 bits; those within a tile are OFFSETS, 32 bits wherever these hold them.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.attend import load_keys
from attnops.kernels.triton.device.gradient_parts import (
    VARYING,
    add_parts,
    bounds_of,
    in_steps,
    load_parts,
    load_stats,
    multiply,
    request_at,
    seen_by,
    store_parts,
    store_rows,
    weights_of,
)
from attnops.kernels.triton.device.softmax import FAINT, LOG2E, span


@triton.jit(do_not_specialize=VARYING)
def grad_queries(
    g_ptr,
    grad_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    sinks_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    start_ptr,
    end_ptr,
    stats_ptr,
    sink_parts_ptr,
    out_ptr,
    scale,
    factor,
    cap,
    left,
    right,
    chunk,
    requests,
    steps,
    tiles,
    each,
    width_q,
    width_k,
    tokens,
    g_b,
    g_t,
    g_h,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    o_b,
    o_t,
    o_h,
    mask_b,
    mask_h,
    mask_t,
    mask_q,
    mask_k,
    HEADS: constexpr,
    GROUP: constexpr,
    D: constexpr,
    DV: constexpr,
    BLOCK_D: constexpr,
    REST: constexpr,
    BLOCK_DV: constexpr,
    TILE_Q: constexpr,
    TILE_K: constexpr,
    COMPUTE: constexpr,
    CAUSAL: constexpr,
    MASK: constexpr,
    MASK_STEP: constexpr,
    OFFSETS: constexpr,
):
    """Grid: heads * tiles of queries, the last tile first: it sees the most keys.

    scale: of the products. factor: of the gradient. cu_q, cu_k: of packed requests; the others have
    width_q queries and width_k keys. REST: the padded dims of query and key past BLOCK_D, 0 where
    there are none. x_b: what a request's rows are off those of one long batch. Writes the gradient
    `[T, H, D]` and, for the other kernels, stats `[H, T, 2]`: z, the log-sum-exp in base 2, and
    delta, the sum of grad_output * output, minus grad_lse. A query that sees no key, or whose row
    is faint, has inf and 0.
    """
    wide = tl.full([], 0, tl.int64)
    at = tl.program_id(0)
    head = wide + at % HEADS
    request, tile = request_at(cu_q_ptr, tiles - 1 - at // HEADS, requests, steps, each, TILE_Q)
    if request == requests:
        return
    begin, queries, base, low, high, offset = bounds_of(
        cu_q_ptr, cu_k_ptr, start_ptr, end_ptr, request, width_q, width_k
    )
    first = tile * TILE_Q
    if first >= queries:
        return
    r = tl.arange(0, TILE_Q)
    rows = r.to(OFFSETS)
    live = first + r < queries
    position = offset + first + r
    token = begin + first
    kv_head = head // GROUP
    request = wide + request
    q_ptr += token * q_t + request * q_b + head * q_h
    k_ptr += base * k_t + request * k_b + kv_head * k_h
    v_ptr += base * v_t + request * v_b + kv_head * v_h
    q, q_rest = load_parts(q_ptr, rows * q_t, live, D, BLOCK_D, REST, COMPUTE)
    g = load_keys(
        g_ptr + token * g_t + request * g_b + head * g_h, rows * g_t, live, DV, BLOCK_DV, True
    )
    o = load_keys(
        o_ptr + token * o_t + request * o_b + head * o_h, rows * o_t, live, DV, BLOCK_DV, True
    )
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    g = g.to(COMPUTE)
    z = tl.load(lse_ptr + token * HEADS + head + r * HEADS, mask=live, other=0.0)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + token * HEADS + head + r * HEADS, mask=live, other=0.0)
    # Without a key, and in a faint row: every weight is 0.
    quiet = z < FAINT
    delta = tl.where(quiet, 0.0, delta)
    z = tl.where(quiet, float("inf"), z * LOG2E)
    row = head * tokens + token + r
    tl.store(stats_ptr + row * 2, z, mask=live)
    tl.store(stats_ptr + row * 2 + 1, delta, mask=live)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        # A sink of +inf has all of the weight.
        tl.store(
            sink_parts_ptr + row, -tl.where(sink == z, 1.0, tl.exp2(sink - z)) * delta, mask=live
        )
    if MASK != "none":
        mask_ptr += request * mask_b + begin * mask_t + head * mask_h + (wide + first) * mask_q

    last = offset + tl.minimum(first + TILE_Q, queries) - 1
    start, end = span(offset + first, last, low, high, left, right, chunk, CAUSAL)
    all_low, all_high = span(last, offset + first, low, high, left, right, chunk, CAUSAL)
    # Tiles are counted from the request's first key, wherever the range begins.
    start = low + (start - low) // TILE_K * TILE_K
    end = start + tl.cdiv(tl.maximum(end - start, 0), TILE_K) * TILE_K
    middle = tl.minimum(tl.maximum(low + tl.cdiv(all_low - low, TILE_K) * TILE_K, start), end)
    shared = tl.maximum(low + (tl.minimum(all_high, end) - low) // TILE_K * TILE_K - middle, 0)
    # Each query's range of keys. No key is before `low`.
    lowest, highest = span(position, position, low, high, left, right, chunk, CAUSAL)
    c = tl.arange(0, TILE_K)
    columns = c.to(OFFSETS)
    acc = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    acc_rest = tl.zeros([TILE_Q, REST or 1], tl.float32)
    # First the masked tiles, then the `shared` keys from `middle` on, which every query sees.
    for part in tl.static_range(2):
        first_key = start if part == 0 else middle
        count = end - start - shared if part == 0 else shared
        for step in range(0, count, TILE_K):
            MASKED: constexpr = part == 0
            key = first_key + step
            if MASKED:
                key = tl.where(key >= middle, key + shared, key)
            j = key + c
            inside = j < high
            k_at = k_ptr + (wide + key) * k_t
            s, k, k_rest = multiply(
                q, q_rest, k_at, columns * k_t, inside, D, BLOCK_D, REST, MASKED, COMPUTE
            )
            v = load_keys(
                v_ptr + (wide + key) * v_t, columns * v_t, inside, DV, BLOCK_DV, MASKED
            ).to(COMPUTE)
            grad_p = tl.dot(g, tl.trans(v), input_precision="ieee")
            visible = j[None, :] < (
                highest[:, None] if CAUSAL or right is not None or chunk is not None else high
            )
            if left is not None or chunk is not None:
                visible = visible & (j[None, :] >= lowest[:, None])
            bias = s
            if MASK != "none":
                # Rows of the tile may be dead in every part.
                seen = live[:, None]
                if MASKED:
                    seen = seen & in_steps(j, high, MASK_STEP)[None, :]
                at_key = ((wide + key) * mask_k + columns * mask_k)[None, :]
                bias = tl.load(mask_ptr + (rows * mask_q)[:, None] + at_key, mask=seen, other=0)
            p, slope = weights_of(s, z[:, None], bias, visible, scale, cap, MASK, MASKED, COMPUTE)
            grad_s = (p * (grad_p - delta[:, None]) * slope).to(COMPUTE)
            acc, acc_rest = add_parts(acc, acc_rest, grad_s, k, k_rest, REST)
    store_parts(
        out_ptr + (token * HEADS + head) * D,
        r * (HEADS * D),
        acc * factor,
        acc_rest * factor,
        live,
        D,
        BLOCK_D,
        REST,
    )


@triton.jit(do_not_specialize=VARYING)
def grad_keys(
    g_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    start_ptr,
    end_ptr,
    stats_ptr,
    out_k_ptr,
    out_v_ptr,
    scale,
    factor,
    cap,
    left,
    right,
    chunk,
    requests,
    steps,
    tiles,
    each,
    width_q,
    width_k,
    tokens,
    g_b,
    g_t,
    g_h,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    mask_b,
    mask_h,
    mask_t,
    mask_q,
    mask_k,
    HEADS: constexpr,
    GROUP: constexpr,
    D: constexpr,
    DV: constexpr,
    BLOCK_D: constexpr,
    REST: constexpr,
    BLOCK_DV: constexpr,
    TILE_Q: constexpr,
    TILE_K: constexpr,
    COMPUTE: constexpr,
    CAUSAL: constexpr,
    MASK: constexpr,
    MASK_STEP: constexpr,
    OFFSETS: constexpr,
):
    """Grid: heads of keys * tiles of keys. A program adds up its key head's query heads one after
    the other. See `grad_queries`."""
    KV_HEADS: constexpr = HEADS // GROUP
    wide = tl.full([], 0, tl.int64)
    at = tl.program_id(0)
    kv_head = wide + at % KV_HEADS
    request, tile = request_at(cu_k_ptr, at // KV_HEADS, requests, steps, each, TILE_K)
    if request == requests:
        return
    begin, queries, base, low, high, offset = bounds_of(
        cu_q_ptr, cu_k_ptr, start_ptr, end_ptr, request, width_q, width_k
    )
    first = low + tile * TILE_K
    if first >= high:
        return
    c = tl.arange(0, TILE_K)
    columns = c.to(OFFSETS)
    j = first + c
    inside = j < high
    request = wide + request
    k_ptr += (base + first) * k_t + request * k_b + kv_head * k_h
    v_ptr += (base + first) * v_t + request * v_b + kv_head * v_h
    k, k_rest = load_parts(k_ptr, columns * k_t, inside, D, BLOCK_D, REST, COMPUTE)
    v = load_keys(v_ptr, columns * v_t, inside, DV, BLOCK_DV, True).to(COMPUTE)
    if MASK != "none":
        mask_ptr += request * mask_b + begin * mask_t + (wide + first) * mask_k

    last = tl.minimum(first + TILE_K, high) - 1
    start, end = seen_by(first, last, queries, offset, left, right, chunk, CAUSAL)
    all_start, all_end = seen_by(last, first, queries, offset, left, right, chunk, CAUSAL)
    # Each key's range of queries.
    lowest, highest = seen_by(j, j, queries, offset, left, right, chunk, CAUSAL)
    start = start // TILE_Q * TILE_Q
    end = start + tl.cdiv(tl.maximum(end - start, 0), TILE_Q) * TILE_Q
    middle = tl.minimum(tl.maximum(tl.cdiv(all_start, TILE_Q) * TILE_Q, start), end)
    stop = tl.maximum(tl.minimum(all_end, end) // TILE_Q * TILE_Q, middle)
    r = tl.arange(0, TILE_Q)
    rows = r.to(OFFSETS)
    acc_k = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    acc_rest = tl.zeros([TILE_K, REST or 1], tl.float32)
    acc_v = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    group = kv_head * GROUP
    q_ptr += begin * q_t + request * q_b
    g_ptr += begin * g_t + request * g_b
    # First the masked tiles, start..middle and stop..end, then those that every query sees. One
    # loop serves all heads, so that loads run ahead from head to head.
    for part in tl.static_range(2):
        if part == 0:
            first_query = tl.where(start < middle, start, stop)
            past = end
            count = middle - start + end - stop
        else:
            first_query = middle
            past = stop
            count = stop - middle
        head = group
        query = first_query
        for _ in range(0, count * GROUP, TILE_Q):
            MASKED: constexpr = part == 0
            i = query + r
            live = i < queries
            far = wide + query
            # A query that is not live has 0 everywhere, and adds 0 to every sum.
            q_at = q_ptr + far * q_t + head * q_h
            s, q, q_rest = multiply(
                k, k_rest, q_at, rows * q_t, live, D, BLOCK_D, REST, MASKED, COMPUTE
            )
            g = load_keys(
                g_ptr + far * g_t + head * g_h, rows * g_t, live, DV, BLOCK_DV, MASKED
            ).to(COMPUTE)
            grad_p = tl.dot(v, tl.trans(g), input_precision="ieee")
            z, delta = load_stats(
                stats_ptr + (head * tokens + begin + query) * 2, queries - query, TILE_Q
            )
            visible = live[None, :]
            if CAUSAL or right is not None or chunk is not None:
                visible = i[None, :] >= lowest[:, None]
            if left is not None or chunk is not None:
                visible = visible & (i[None, :] < highest[:, None])
            bias = s
            if MASK != "none":
                seen = in_steps(j, high, MASK_STEP)[:, None]
                if MASKED:
                    seen = seen & live[None, :]
                row = mask_ptr + head * mask_h + far * mask_q
                bias = tl.load(
                    row + (rows * mask_q)[None, :] + (columns * mask_k)[:, None], mask=seen, other=0
                )
            p, slope = weights_of(s, z[None, :], bias, visible, scale, cap, MASK, MASKED, COMPUTE)
            acc_v = tl.dot(p.to(COMPUTE), g, acc_v, input_precision="ieee")
            grad_s = (p * (grad_p - delta[None, :]) * slope).to(COMPUTE)
            acc_k, acc_rest = add_parts(acc_k, acc_rest, grad_s, q, q_rest, REST)
            query += TILE_Q
            if MASKED:
                query = tl.where(query == middle, stop, query)
            head = tl.where(query == past, head + 1, head)
            query = tl.where(query == past, first_query, query)
    row = (base + first) * KV_HEADS + kv_head
    store_parts(
        out_k_ptr + row * D,
        c * (KV_HEADS * D),
        acc_k * factor,
        acc_rest * factor,
        inside,
        D,
        BLOCK_D,
        REST,
    )
    store_rows(out_v_ptr + row * DV, c * (KV_HEADS * DV), acc_v, inside, DV, BLOCK_DV)
