"""Device function: the gradient of an additive mask, one program for a tile of it, which computes
the scores again."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.attend import load_keys
from attnops.kernels.triton.device.gradient_parts import (
    VARYING,
    bounds_of,
    in_steps,
    load_stats,
    seen_by,
    weights_of,
)
from attnops.kernels.triton.device.softmax import span


@triton.jit(do_not_specialize=VARYING)
def grad_mask(
    g_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    start_ptr,
    end_ptr,
    stats_ptr,
    out_ptr,
    scale,
    cap,
    left,
    right,
    chunk,
    requests,
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
    mask_q,
    mask_k,
    HEADS: constexpr,
    GROUP: constexpr,
    D: constexpr,
    DV: constexpr,
    BLOCK_D: constexpr,
    BLOCK_DV: constexpr,
    TILE_Q: constexpr,
    TILE_K: constexpr,
    COMPUTE: constexpr,
    CAUSAL: constexpr,
    ALL_REQUESTS: constexpr,
    ALL_HEADS: constexpr,
    ALL_QUERIES: constexpr,
    MASK_STEP: constexpr,
    OFFSETS: constexpr,
):
    """Grid: requests * heads * tiles of queries * tiles of keys, 1 for each of the first three that
    the mask broadcasts over.

    A program adds up the requests, heads and tiles of queries that its tile of the mask serves, in
    this order. each: tiles of a request's queries. ALL_x: the mask broadcasts over x.
    """
    c = tl.arange(0, TILE_K)
    columns = c.to(OFFSETS)
    r = tl.arange(0, TILE_Q)
    rows = r.to(OFFSETS)
    key_tiles = tl.cdiv(width_k, TILE_K)
    first = tl.program_id(0) % key_tiles * TILE_K
    own = tl.program_id(0) // key_tiles
    j = first + c
    wide = tl.full([], 0, tl.int64)
    own_tile = 0
    if not ALL_QUERIES:
        own_tile = own % each
        own = own // each
    OUT_HEADS: constexpr = 1 if ALL_HEADS else HEADS
    own_head = wide + own % OUT_HEADS
    own_request = wide + own // OUT_HEADS
    low_tile = own_tile
    tiles = 1
    if ALL_QUERIES:
        low_tile = 0
        tiles = each
    if start_ptr is None and end_ptr is None:
        # All requests' queries see the same keys, so that the program may leave out tiles.
        last = tl.minimum(first + TILE_K, width_k) - 1
        start, end = seen_by(first, last, width_q, width_k - width_q, left, right, chunk, CAUSAL)
        past = tl.minimum(low_tile + tiles, tl.cdiv(end, TILE_Q))
        low_tile = tl.maximum(low_tile, start // TILE_Q)
        tiles = tl.maximum(past - low_tile, 0)
    turns = tiles
    if ALL_REQUESTS:
        turns = turns * requests
    if ALL_HEADS:
        turns = turns * HEADS
    # A program's tile of the mask is the same in all turns. Numbers past the last query or key are
    # not used.
    row = 0 if ALL_QUERIES else own_tile * TILE_Q
    at = (
        mask_ptr
        + own_request * mask_b
        + own_head * mask_h
        + (wide + row) * mask_q
        + (wide + first) * mask_k
    )
    seen = (row + r < width_q)[:, None] & in_steps(j, width_k, MASK_STEP)[None, :] & (turns > 0)
    bias = tl.load(at + (rows * mask_q)[:, None] + (columns * mask_k)[None, :], mask=seen, other=0)
    acc = tl.zeros([TILE_Q, TILE_K], tl.float32)
    for turn in range(turns):
        request = own_request
        head = own_head
        tile = low_tile
        rest = turn
        if ALL_QUERIES:
            tile = low_tile + rest % tiles
            rest = rest // tiles
        if ALL_HEADS:
            head = wide + rest % HEADS
            rest = rest // HEADS
        if ALL_REQUESTS:
            request = rest
        begin, queries, base, low, high, offset = bounds_of(
            None, None, start_ptr, end_ptr, request, width_q, width_k
        )
        query = tile * TILE_Q
        live = query + r < queries
        inside = (j >= low) & (j < high)
        kv_head = head // GROUP
        far = wide + request
        token = begin + query
        q = load_keys(
            q_ptr + token * q_t + far * q_b + head * q_h, rows * q_t, live, D, BLOCK_D, True
        ).to(COMPUTE)
        g = load_keys(
            g_ptr + token * g_t + far * g_b + head * g_h, rows * g_t, live, DV, BLOCK_DV, True
        ).to(COMPUTE)
        key = base + first
        k = load_keys(
            k_ptr + key * k_t + far * k_b + kv_head * k_h, columns * k_t, inside, D, BLOCK_D, True
        ).to(COMPUTE)
        v = load_keys(
            v_ptr + key * v_t + far * v_b + kv_head * v_h, columns * v_t, inside, DV, BLOCK_DV, True
        ).to(COMPUTE)
        z, delta = load_stats(stats_ptr + (head * tokens + token) * 2, queries - query, TILE_Q)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_p = tl.dot(g, tl.trans(v), input_precision="ieee")
        position = offset + query + r
        zero = position * 0
        lowest, highest = span(
            position, position, low + zero, high + zero, left, right, chunk, CAUSAL
        )
        visible = (
            live[:, None]
            & inside[None, :]
            & (j[None, :] >= lowest[:, None])
            & (j[None, :] < highest[:, None])
        )
        p, _ = weights_of(s, z[:, None], bias, visible, scale, cap, "additive", True, COMPUTE)
        acc += p * (grad_p - delta[:, None])
    if ALL_QUERIES:
        out_ptr += (wide + own) * width_k
        tl.store(out_ptr + j, tl.sum(acc, 0), mask=j < width_k)
    else:
        i = own_tile * TILE_Q + r
        out_ptr += ((wide + own) * width_q + own_tile * TILE_Q) * width_k
        at = r.to(tl.int64)[:, None] * width_k + j[None, :]
        tl.store(out_ptr + at, acc, mask=(i < width_q)[:, None] & (j < width_k)[None, :])
