"""Device function: a decode step of attention in one launch: norm, rotation, the write of the new
key and value, attention, the merge.

Every program rotates the queries of one request and key head, and attends over one split of the
request's keys. The program of the last split also has the new key and value in registers: it stores
them, and adds them to its own sums. No program reads the slot that another one writes, so programs
need not wait for each other. The last one to arrive at a counter merges the splits, in their order.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.attend import load_keys, pages_of, slots_of
from attnops.kernels.triton.device.memory import await_previous, floats
from attnops.kernels.triton.device.softmax import LOG2E, closed, raised, tanh, with_sink
from attnops.kernels.triton.device.store import place


@triton.jit
def turned(
    rows_ptr,
    real,
    dims,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    D: constexpr,
    BLOCK_D: constexpr,
    WIDTH: constexpr,
):
    """float32 `[rows, BLOCK_D]`: rows of one head each, normed and rotated. WIDTH: of the cosines
    and sines, D or D // 2."""
    inside = dims < D
    mask = real[:, None] & inside[None, :]
    x = floats(rows_ptr[:, None] + dims[None, :], mask)
    if norm_ptr is not None:
        shrink = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * shrink * floats(norm_ptr + dims, inside)[None, :]
    if cos_ptr is not None:
        # Each number's other half is read again, rather than moved between threads.
        HALF: constexpr = D // 2
        across = tl.where(dims < HALF, dims + HALF, dims - HALF)
        y = floats(rows_ptr[:, None] + across[None, :], mask)
        if norm_ptr is not None:
            y = y * shrink * floats(norm_ptr + across, inside)[None, :]
        cos = floats(cos_ptr + dims % WIDTH, inside)
        sin = floats(sin_ptr + dims % WIDTH, inside)
        x = x * cos[None, :] + y * tl.where(dims < HALF, -sin, sin)[None, :]
    return x


@triton.jit
def logits(products, scale, cap):
    """Logits in base 2."""
    if cap is not None:
        return tanh(products * scale) * cap
    else:
        return products * scale


@triton.jit
def finish(acc, top, total, head, real, dims, sinks_ptr, out_ptr, out_h, out_d, D: constexpr):
    """Write the output of `[rows]` heads of one request."""
    factor, z = closed(top, total)
    if sinks_ptr is not None:
        factor, z = with_sink(factor, z, floats(sinks_ptr + head, real) * LOG2E)
    at = out_ptr + (head.to(tl.int64) * out_h)[:, None] + dims.to(tl.int64)[None, :] * out_d
    tl.store(at, acc * factor[:, None], mask=real[:, None] & (dims < D)[None, :])


@triton.jit
def merge_splits(
    parts_ptr,
    lses_ptr,
    first,
    count,
    h,
    dims,
    sinks_ptr,
    out_ptr,
    out_h,
    out_d,
    GROUP: constexpr,
    ROWS: constexpr,
    D: constexpr,
    BLOCK_D: constexpr,
    AT_ONCE: constexpr,
):
    """Merge the splits `first` to `first + count` of a group, AT_ONCE at a time. What other
    programs wrote is read past the L1 cache."""
    row = tl.arange(0, ROWS)
    real = row < GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for at in range(0, count, AT_ONCE):
        n = at + tl.arange(0, AT_ONCE)
        part = (first + n)[:, None] * GROUP + row[None, :]
        there = (n < count)[:, None] & real[None, :]
        z = tl.load(lses_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        inside = there[:, :, None] & (dims < D)[None, None, :]
        x = tl.load(
            parts_ptr + part[:, :, None] * D + dims[None, None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg",
        )
        top, base, fade = raised(top, tl.max(z, 0))
        weights = tl.exp2(z - base[None, :])
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * x, 0)
        total = total * fade + tl.sum(weights, 0)
    finish(acc, top, total, h * GROUP + row, real, dims, sinks_ptr, out_ptr, out_h, out_d, D)


VARYING = ["left", "pages", "splits", "least", "numbers", "table_b"]


@triton.jit(do_not_specialize=VARYING)
def decode(
    q_ptr,
    q_b,
    q_h,
    key_ptr,
    key_b,
    key_h,
    value_ptr,
    value_b,
    value_h,
    k_ptr,
    k_p,
    k_n,
    k_h,
    v_ptr,
    v_p,
    v_n,
    v_h,
    table_ptr,
    table_b,
    lengths_ptr,
    lengths_b,
    slots_ptr,
    slots_b,
    cos_ptr,
    cos_b,
    sin_ptr,
    sin_b,
    out_ptr,
    out_b,
    out_h,
    out_d,
    q_norm_ptr,
    k_norm_ptr,
    sinks_ptr,
    parts_ptr,
    counters_ptr,
    scale,
    cap,
    left,
    eps,
    pages,
    splits,
    least,
    numbers,
    D: constexpr,
    BLOCK_D: constexpr,
    WIDTH: constexpr,
    PAGE: constexpr,
    KV_HEADS: constexpr,
    GROUP: constexpr,
    ROWS: constexpr,
    AT_ONCE: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
    COMPUTE: constexpr,
    HOLES: constexpr,
    SPLIT: constexpr,
    OVERLAP: constexpr,
):
    """Grid: (requests * KV_HEADS, splits). Of a request's keys, at least `least` are in a split;
    programs past the last split leave.

    cap: soft cap in base 2; `scale` then holds scale / cap. parts: float32
    `[requests * KV_HEADS, splits, GROUP, D]` of `numbers` numbers, then base-2 lse without the last
    dim. counters: a zero for each of axis 0, and zero again at the end. HOLES: an id may be of no
    page. OVERLAP: this kernel is launched while the one before it runs.
    """
    await_previous(OVERLAP)
    at = tl.program_id(0)
    split = tl.program_id(1)
    request = (at // KV_HEADS).to(tl.int64)
    h = at % KV_HEADS
    slot = tl.load(slots_ptr + request * slots_b).to(tl.int64)
    length = tl.load(lengths_ptr + request * lengths_b)
    dims = tl.arange(0, BLOCK_D)
    row = tl.arange(0, TILE_M)
    live = row < GROUP
    head = h * GROUP + row
    out_ptr += request * out_b
    if (slot < 0) | (slot >= pages.to(tl.int64) * PAGE) | (length <= 0):
        if split == 0:
            out_at = (
                out_ptr + (head.to(tl.int64) * out_h)[:, None] + dims.to(tl.int64)[None, :] * out_d
            )
            tl.store(out_at, 0.0, mask=live[:, None] & (dims < D)[None, :])
        return
    # Keys before the new one, and the first of them that is seen.
    past = length - 1
    low = 0
    if left is not None:
        low = tl.maximum(past - left, 0)
    first = low // TILE_N * TILE_N
    size = tl.cdiv(tl.maximum(tl.cdiv(past - first, splits), least), TILE_N) * TILE_N
    count = tl.maximum(tl.cdiv(past - first, size), 1)
    if split >= count:
        return
    start = first + split * size
    high = tl.minimum(start + size, past)

    row_ptr = table_ptr + request * table_b
    # Page ids are loaded one step before their keys, and the first ids before the query.
    page = pages_of(row_ptr, start, high, PAGE, TILE_N)
    cos_at = cos_ptr
    sin_at = sin_ptr
    if cos_ptr is not None:
        cos_at = cos_ptr + request * cos_b
        sin_at = sin_ptr + request * sin_b
    q_rows = q_ptr + request * q_b + head.to(tl.int64) * q_h
    q = turned(q_rows, live, dims, q_norm_ptr, eps, cos_at, sin_at, D, BLOCK_D, WIDTH).to(COMPUTE)
    one = tl.arange(0, 1)
    key_row = key_ptr + request * key_b + (h + one).to(tl.int64) * key_h
    new_key = turned(
        key_row, one == 0, dims, k_norm_ptr, eps, cos_at, sin_at, D, BLOCK_D, WIDTH
    ).to(k_ptr.dtype.element_ty)
    inside = (dims < D)[None, :]
    new_value = tl.load(
        value_ptr + request * value_b + (h + one).to(tl.int64)[:, None] * value_h + dims[None, :],
        mask=inside,
        other=0.0,
    )
    k_ptr += h.to(tl.int64) * k_h
    v_ptr += h.to(tl.int64) * v_h
    last = split == count - 1
    if last:
        tl.store(k_ptr + place(slot, k_p, k_n, PAGE) + dims[None, :], new_key, mask=inside)
        tl.store(v_ptr + place(slot, v_p, v_n, PAGE) + dims[None, :], new_value, mask=inside)

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    # Warps share the keys. A sum over keys waits for all of them, so it is computed once, at the
    # end.
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    acc = tl.zeros([TILE_M, BLOCK_D], tl.float32)
    for begin in range(start, high, TILE_N):
        keys = begin + tl.arange(0, TILE_N)
        seen = (keys >= low) & (keys < high)
        if HOLES:
            named = (page >= 0) & (page < pages)
            seen = seen & named
            page = tl.where(named, page, 0)
        k = load_keys(
            k_ptr, slots_of(page, begin, keys, k_p, k_n, PAGE, TILE_N), seen, D, BLOCK_D, True
        ).to(COMPUTE)
        s = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap)
        s = tl.where(seen[None, :], s, float("-inf"))
        top, base, fade = raised(top, tl.max(s, 1))
        weights = tl.exp2(s - base[:, None])
        sums = sums * fade[:, None] + weights
        v = load_keys(
            v_ptr, slots_of(page, begin, keys, v_p, v_n, PAGE, TILE_N), seen, D, BLOCK_D, True
        ).to(COMPUTE)
        acc = tl.dot(weights.to(COMPUTE), v, acc * fade[:, None], input_precision="ieee")
        page = pages_of(row_ptr, begin + TILE_N, high, PAGE, TILE_N)

    # The new key, as it is stored. To all but the last split it is -inf.
    products = q.to(tl.float32) * new_key.to(tl.float32)
    if BLOCK_D <= 32:
        # A thread that holds one product fuses it into the first step of the sum. Those that hold
        # copies of a sum then differ.
        products = products.to(tl.float64)
    s = logits(tl.sum(products, 1).to(tl.float32), scale, cap)
    s = tl.where(last, s, float("-inf"))
    top, base, fade = raised(top, s)
    weight = tl.exp2(s - base)
    total = tl.sum(sums, 1) * fade + weight
    acc = acc * fade[:, None] + weight[:, None] * new_value.to(tl.float32)

    if SPLIT:
        if count > 1:
            factor, z = closed(top, total)
            lses_ptr = parts_ptr + numbers.to(tl.int64)
            begun = at.to(tl.int64) * splits
            part = (begun + split) * GROUP + row
            tl.store(
                parts_ptr + part[:, None] * D + dims[None, :],
                acc * factor[:, None],
                mask=live[:, None] & inside,
            )
            tl.store(lses_ptr + part, z, mask=live)
            # All threads' writes come before the one thread's arrival, which other programs see no
            # earlier than the writes.
            tl.debug_barrier()
            if tl.atomic_add(counters_ptr + at, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                tl.store(counters_ptr + at, 0)
                merge_splits(
                    parts_ptr,
                    lses_ptr,
                    begun,
                    count,
                    h,
                    dims,
                    sinks_ptr,
                    out_ptr,
                    out_h,
                    out_d,
                    GROUP,
                    ROWS,
                    D,
                    BLOCK_D,
                    AT_ONCE,
                )
        else:
            finish(acc, top, total, head, live, dims, sinks_ptr, out_ptr, out_h, out_d, D)
    else:
        finish(acc, top, total, head, live, dims, sinks_ptr, out_ptr, out_h, out_d, D)
