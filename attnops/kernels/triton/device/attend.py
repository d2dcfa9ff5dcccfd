"""Device function: stage one. A tile of query rows attends over the keys of its request, or over
one split of them.

The keys lie in pages, or follow one another in memory. A tile's rows are queries times the heads of
one key head's group (GQA packing): every key is loaded once for all of them. FlashAttention-2,
https://arxiv.org/abs/2307.08691, section 3.1, over pages; splits:
https://pytorch.org/blog/flash-decoding/.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats, let_next_begin
from attnops.kernels.triton.device.softmax import (
    LN2,
    LOG2E,
    closed,
    in_base_2,
    raised,
    sees,
    share,
    span,
    tanh,
    with_sink,
)


@triton.jit
def find(starts_ptr, tile, requests, steps, BLOCK_Q: constexpr):
    """The request of a tile, or `requests` for a tile of padding rows. Request b's tiles begin at
    starts[b] // BLOCK_Q + b."""
    low = 0
    high = requests
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begun = tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return low


@triton.jit
def load_keys(base, at, seen, WIDTH: constexpr, BLOCK: constexpr, MASKED: constexpr):
    """`[keys, BLOCK]` rows of pages; 0 for keys that are not seen, because their slots may hold
    NaN."""
    dims = tl.arange(0, BLOCK)
    pointers = base + at[:, None] + dims[None, :]
    if MASKED and WIDTH == BLOCK:
        return tl.load(pointers, mask=seen[:, None], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=seen[:, None] & (dims < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dims < WIDTH)[None, :], other=0.0)


@triton.jit
def slots_of(page, key, keys, stride_p, stride_n, PAGE: constexpr, TILE_N: constexpr):
    """Offsets of a tile's keys. One page holds the whole tile, or `page` holds an id for each key.
    PAGE 0: there are no pages."""
    if PAGE == 0:
        return keys.to(tl.int64) * stride_n
    elif PAGE % TILE_N == 0:
        return page.to(tl.int64) * stride_p + (key % PAGE + tl.arange(0, TILE_N)) * stride_n
    else:
        return page.to(tl.int64) * stride_p + (keys % PAGE) * stride_n


@triton.jit
def pages_of(row_ptr, key, high, PAGE: constexpr, TILE_N: constexpr):
    """The id of the page that holds a tile, or an id for each of its keys. PAGE 0: a number that is
    not read."""
    if PAGE == 0:
        return key
    elif PAGE % TILE_N == 0:
        return tl.load(row_ptr + key // PAGE, mask=key < high, other=0)
    else:
        keys = key + tl.arange(0, TILE_N)
        return tl.load(row_ptr + keys // PAGE, mask=keys < high, other=0)


@triton.jit
def attend_tile(
    acc,
    top,
    total,
    page,
    q,
    q_rest,
    key,
    low,
    high,
    first,
    length,
    position,
    k_ptr,
    v_ptr,
    row_ptr,
    mask_ptr,
    mask_row,
    live,
    scale,
    cap,
    temperature,
    left,
    right,
    chunk,
    k_p,
    k_n,
    v_p,
    v_n,
    mask_k,
    D: constexpr,
    DV: constexpr,
    DR: constexpr,
    BLOCK_D: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_DR: constexpr,
    PAGE: constexpr,
    TILE_N: constexpr,
    COMPUTE: constexpr,
    CAUSAL: constexpr,
    MASK: constexpr,
    LATENT: constexpr,
    MASKED: constexpr,
):
    """One step over the TILE_N keys in `page`. Also returns the page of the next step. MASKED: a
    row may not see every key."""
    keys = key + tl.arange(0, TILE_N)
    seen = (keys >= low) & (keys < high)
    k_at = slots_of(page, key, keys, k_p, k_n, PAGE, TILE_N)
    k = load_keys(k_ptr, k_at, seen, D, BLOCK_D, MASKED).to(COMPUTE)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if DR > 0:
        k_rest = load_keys(k_ptr + D, k_at, seen, DR, BLOCK_DR, MASKED).to(COMPUTE)
        s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
    if cap is not None:
        s = tanh(s * scale) * cap
    else:
        s = s * scale
    if temperature is not None:
        s = s * temperature[:, None]
    if MASK != "none":
        bias = tl.load(
            mask_ptr + mask_row[:, None] + keys[None, :] * mask_k,
            mask=live[:, None] & seen[None, :],
            other=0,
        )
        if MASK == "bool":
            s = tl.where(bias != 0, s, float("-inf"))
        else:
            s = s + in_base_2(bias)
    if MASKED:
        visible = (keys < length)[None, :]
        if first is not None:
            visible = visible & (keys >= first)[None, :]
        visible = sees(visible, position[:, None], keys[None, :], left, right, chunk, CAUSAL)
        s = tl.where(visible, s, float("-inf"))
    top, base, fade = raised(top, tl.max(s, 1))
    weights = tl.exp2(s - base[:, None])
    if len(total.shape) == 2:
        total = total * fade[:, None] + weights
    else:
        total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if LATENT:
        v = k
    else:
        v_at = slots_of(page, key, keys, v_p, v_n, PAGE, TILE_N)
        v = load_keys(v_ptr, v_at, seen, DV, BLOCK_DV, MASKED).to(COMPUTE)
    acc = tl.dot(weights.to(COMPUTE), v, acc, input_precision="ieee")
    page = pages_of(row_ptr, key + TILE_N, high, PAGE, TILE_N)
    return acc, top, total, page


# With so few rows, warps share the keys. A sum over keys waits for all warps, so it is computed
# once, at the end, if registers allow.
LATE_ROWS = constexpr(16)
VARYING = [
    "left",
    "right",
    "chunk",
    "requests",
    "tokens",
    "tiles",
    "pads",
    "each",
    "steps",
    "splits",
    "split_keys",
    "width",
    "rows",
    "fewest",
    "most",
    "capacity",
    "table_b",
    "mask_b",
    "mask_h",
    "mask_q",
    "q_b",
    "r_b",
]


@triton.jit(do_not_specialize=VARYING)
def attend(
    q_ptr,
    r_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    first_ptr,
    lengths_ptr,
    starts_ptr,
    mask_ptr,
    sinks_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    temperature_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    scale,
    cap,
    left,
    right,
    chunk,
    requests,
    tokens,
    tiles,
    pads,
    each,
    steps,
    splits,
    split_keys,
    width,
    rows,
    fewest,
    most,
    capacity,
    q_b,
    q_t,
    q_h,
    r_b,
    r_t,
    r_h,
    k_p,
    k_n,
    k_h,
    v_p,
    v_n,
    v_h,
    q_scale_h,
    k_scale_h,
    v_scale_h,
    table_b,
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    out_t,
    out_h,
    out_d,
    lse_t,
    lse_h,
    D: constexpr,
    DV: constexpr,
    DR: constexpr,
    BLOCK_D: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_DR: constexpr,
    PAGE: constexpr,
    KV_HEADS: constexpr,
    GROUP: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
    COMPUTE: constexpr,
    CAUSAL: constexpr,
    MASK: constexpr,
    LATENT: constexpr,
    RAGGED: constexpr,
    SPLIT: constexpr,
    PEEL: constexpr,
    OVERLAP: constexpr,
):
    """Grid: heads of keys * tiles of their group * (splits * tiles of queries + pads), the last
    tile first: it sees the most keys.

    tiles: all tiles of queries. The last `pads` of them, and the tiles after those of the requests
    where RAGGED, serve padding rows.
    each: tiles of one request, unless RAGGED. width: an upper bound of one request's queries.
    fewest, most: another launch serves requests with fewer or more queries.
    cap: soft cap in base 2; `scale` then holds scale / cap. None without. temperature: of each
    token, a factor on its capped logits. left, right, chunk: None without a bound.
    PEEL: tiles that every row sees are not masked. OVERLAP: stage two is launched while this kernel
    runs. DR: a key's numbers after the first D, which `r_ptr` has of the query. LATENT: `k_ptr`
    holds the value, too. PAGE: 0 for requests whose keys follow one another. Then `table_ptr` tells
    how many times k_p and v_p a request's first key and value lie past the first, and how many
    times q_b, r_b and mask_b to add to what its tokens say. At most `capacity` of its keys exist.
    first: of each request, the first key that may be seen.
    """
    HEADS: constexpr = GROUP if GROUP < TILE_M else TILE_M
    BLOCK_Q: constexpr = TILE_M // HEADS
    if OVERLAP:
        let_next_begin()
    HEAD_TILES: constexpr = (GROUP + HEADS - 1) // HEADS
    at = tl.program_id(0)
    head_tile = at % (KV_HEADS * HEAD_TILES)
    rest = at // (KV_HEADS * HEAD_TILES)
    real = tiles - pads
    split = rest % splits
    tile = real - 1 - rest // splits
    if rest >= real * splits:
        split = 0
        tile = rest - real * splits + real
    if RAGGED:
        request = find(starts_ptr, tile, requests, steps, BLOCK_Q)
        begin = tl.load(starts_ptr + request)
        origin = begin // BLOCK_Q + request
    else:
        request = tl.minimum(tile // each, requests)
        begin = tl.load(starts_ptr + request)
        origin = request * each

    # Both loads are issued together, so that the program waits for memory once.
    end = tl.load(starts_ptr + tl.minimum(request + 1, requests))
    length = tl.load(lengths_ptr + request, mask=request < requests, other=0)
    row = tl.arange(0, TILE_M)
    group_head = head_tile % HEAD_TILES * HEADS + row % HEADS
    kv_head = head_tile // HEAD_TILES
    head = kv_head * GROUP + group_head
    dims_v = tl.arange(0, BLOCK_DV)
    out_dims = dims_v.to(tl.int64) * out_d
    if request == requests:
        # Padding rows.
        if split == 0:
            for first in range(
                (tile - origin) * BLOCK_Q, tokens - begin, (tiles - origin) * BLOCK_Q
            ):
                i = first + row // HEADS
                live = (row < BLOCK_Q * HEADS) & (i < tokens - begin) & (group_head < GROUP)
                token = (begin + i).to(tl.int64)
                out_at = (
                    out_ptr
                    + (token * out_t + head.to(tl.int64) * out_h)[:, None]
                    + out_dims[None, :]
                )
                tl.store(out_at, 0.0, mask=live[:, None] & (dims_v < DV)[None, :])
                if lse_ptr is not None:
                    tl.store(
                        lse_ptr + token * lse_t + head.to(tl.int64) * lse_h,
                        float("-inf"),
                        mask=live,
                    )
        return

    queries = end - begin
    first_q = (tile - origin) * BLOCK_Q
    if first_q >= queries:
        return
    if (queries < fewest) | (queries > most):
        return
    start = 0
    size = length
    if SPLIT:
        start, size = share(length, queries, left, chunk, splits, split_keys, TILE_N)
        start += split * size
        if start >= length:
            return

    i = first_q + row // HEADS
    live = (row < BLOCK_Q * HEADS) & (i < queries) & (group_head < GROUP)
    token = (begin + i).to(tl.int64)
    position = length - queries + i
    lowest = length - queries + first_q
    highest = length - queries + tl.minimum(first_q + BLOCK_Q, queries) - 1
    earliest = 0
    if first_ptr is not None:
        earliest = tl.maximum(tl.load(first_ptr + request).to(tl.int32), 0)
    last = length
    if PAGE == 0:
        last = tl.minimum(length, capacity)
    low, high = span(lowest, highest, earliest, last, left, right, chunk, CAUSAL)
    all_low, all_high = span(highest, lowest, earliest, last, left, right, chunk, CAUSAL)
    if SPLIT:
        high = tl.minimum(high, start + size)
    start = tl.maximum(start, low // TILE_N * TILE_N)
    high = tl.maximum(high, start)

    row_ptr = table_ptr + request.to(tl.int64) * table_b
    mask_row = token * mask_q
    if PAGE == 0:
        place = tl.load(row_ptr).to(tl.int64)
        q_ptr += place * q_b
        k_ptr += place * k_p
        v_ptr += place * v_p
        mask_row += place * mask_b + head.to(tl.int64) * mask_h
        if DR > 0:
            r_ptr += place * r_b
    # Page ids are loaded one step before their keys, and the first ids before the query.
    page = pages_of(row_ptr, start, high, PAGE, TILE_N)
    q = load_keys(q_ptr, token * q_t + head.to(tl.int64) * q_h, live, D, BLOCK_D, True).to(COMPUTE)
    q_rest = q
    if DR > 0:
        q_rest = load_keys(
            r_ptr, token * r_t + head.to(tl.int64) * r_h, live, DR, BLOCK_DR, True
        ).to(COMPUTE)
    factor = scale
    if q_scale_ptr is not None:
        factor = factor * tl.load(q_scale_ptr + kv_head * q_scale_h)
    if k_scale_ptr is not None:
        factor = factor * tl.load(k_scale_ptr + kv_head * k_scale_h)
    temperature = None
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token, mask=live, other=0.0)
    k_ptr += kv_head.to(tl.int64) * k_h
    v_ptr += kv_head.to(tl.int64) * v_h
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    LATE: constexpr = TILE_M <= LATE_ROWS and not LATENT and BLOCK_DV <= 256
    if LATE:
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
    else:
        total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)
    middle = start
    stop = start
    if PEEL:
        # The tiles that every row sees, from the first that begins at or after all_low to the last
        # that ends by all_high.
        middle = tl.minimum(tl.maximum(start, tl.cdiv(all_low, TILE_N) * TILE_N), high)
        stop = tl.maximum(tl.minimum(all_high, high) // TILE_N * TILE_N, middle)
    bounds = (start, middle, stop, high)
    for part in tl.static_range(3):
        if part == 2 or (
            PEEL and (part == 1 or left is not None or chunk is not None or first_ptr is not None)
        ):
            for key in range(bounds[part], bounds[part + 1], TILE_N):
                acc, top, total, page = attend_tile(
                    acc,
                    top,
                    total,
                    page,
                    q,
                    q_rest,
                    key,
                    low,
                    high,
                    earliest if first_ptr is not None else None,
                    last,
                    position,
                    k_ptr,
                    v_ptr,
                    row_ptr,
                    mask_ptr,
                    mask_row,
                    live,
                    factor,
                    cap,
                    temperature,
                    left,
                    right,
                    chunk,
                    k_p,
                    k_n,
                    v_p,
                    v_n,
                    mask_k,
                    D,
                    DV,
                    DR,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_DR,
                    PAGE,
                    TILE_N,
                    COMPUTE,
                    CAUSAL,
                    MASK,
                    LATENT,
                    part != 1,
                )

    if LATE:
        total = tl.sum(total, 1)
    factor_v, z = closed(top, total)
    if not SPLIT and sinks_ptr is not None:
        sink = floats(sinks_ptr + head, live) * LOG2E
        factor_v, z = with_sink(factor_v, z, sink)
    if v_scale_ptr is not None:
        factor_v = factor_v * tl.load(v_scale_ptr + kv_head * v_scale_h)
    acc = acc * factor_v[:, None]
    store = live[:, None] & (dims_v < DV)[None, :]
    if SPLIT:
        part = ((request * width + i).to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(parts_ptr + part[:, None] * DV + dims_v[None, :], acc, mask=store)
        tl.store(parts_ptr + rows.to(tl.int64) * splits * DV + part, z, mask=live)
    else:
        out_at = out_ptr + (token * out_t + head.to(tl.int64) * out_h)[:, None] + out_dims[None, :]
        tl.store(out_at, acc, mask=store)
        if lse_ptr is not None:
            tl.store(lse_ptr + token * lse_t + head.to(tl.int64) * lse_h, z * LN2, mask=live)
