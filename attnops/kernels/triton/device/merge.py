"""Device functions: partial results merged by their log-sum-exps: the splits of stage one, two
results, or any number of them."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import await_previous, floats
from attnops.kernels.triton.device.softmax import (
    LN2,
    LOG2E,
    closed,
    finite,
    occupied,
    raised,
    share,
    with_sink,
)

VARYING = ["left", "chunk", "width", "splits", "split_keys", "rows", "fewest", "most", "tile"]


@triton.jit(do_not_specialize=VARYING)
def combine(
    parts_ptr,
    lengths_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    left,
    chunk,
    width,
    splits,
    split_keys,
    rows,
    fewest,
    most,
    tile,
    out_t,
    out_h,
    out_d,
    lse_t,
    lse_h,
    HEADS: constexpr,
    DV: constexpr,
    BLOCK_DV: constexpr,
    AT_ONCE: constexpr,
    OVERLAP: constexpr,
):
    """Grid: requests * width * HEADS * cdiv(DV, BLOCK_DV). parts: float32 `[rows, splits, DV]`,
    then `[rows, splits]` base-2 lse.

    tile: keys of a step of stage one. AT_ONCE: parts that are read at once. OVERLAP: this kernel is
    launched while stage one runs.
    """
    at = tl.program_id(0)
    DV_TILES: constexpr = (DV + BLOCK_DV - 1) // BLOCK_DV
    row = at // DV_TILES
    head = row % HEADS
    slot = row // HEADS
    request = slot // width
    i = slot % width
    begin = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - begin
    length = tl.load(lengths_ptr + request)
    await_previous(OVERLAP)
    if i >= queries:
        return
    if (queries < fewest) | (queries > most):
        return
    first, size = share(length, queries, left, chunk, splits, split_keys, tile)
    count = tl.minimum(tl.cdiv(length - first, size), splits)

    dims = (at % DV_TILES) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    inside = dims < DV
    origin = row.to(tl.int64) * splits
    lses_ptr = parts_ptr + rows.to(tl.int64) * splits * DV
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    # Where AT_ONCE is the same for every batch, the order of summation follows from the request
    # alone.
    for at_split in range(0, count, AT_ONCE):
        n = at_split + tl.arange(0, AT_ONCE)
        real = n < count
        z = tl.load(lses_ptr + origin + n, mask=real, other=float("-inf"))
        part = tl.load(
            parts_ptr + (origin + n)[:, None] * DV + dims[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        top, base, fade = raised(top, tl.max(z, 0))
        weights = tl.exp2(z - base)
        acc = acc * fade + tl.sum(weights[:, None] * part, 0)
        total = total * fade + tl.sum(weights, 0)

    factor, z = closed(top, total)
    if sinks_ptr is not None:
        factor, z = with_sink(factor, z, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    token = (begin + i).to(tl.int64)
    head = head.to(tl.int64)
    out_at = out_ptr + token * out_t + head * out_h + dims.to(tl.int64) * out_d
    tl.store(out_at, acc * factor, mask=inside)
    if lse_ptr is not None:
        if at % DV_TILES == 0:
            tl.store(lse_ptr + token * lse_t + head * lse_h, z * LN2)


@triton.jit(do_not_specialize=["rows"])
def merge(
    a_ptr,
    za_ptr,
    b_ptr,
    zb_ptr,
    out_ptr,
    z_ptr,
    rows,
    a_t,
    a_h,
    a_d,
    za_t,
    za_h,
    b_t,
    b_h,
    b_d,
    zb_t,
    zb_h,
    HEADS: constexpr,
    D: constexpr,
    BLOCK_D: constexpr,
    BLOCK_R: constexpr,
):
    """Grid: cdiv(rows, BLOCK_R). a, b: `[T, HEADS, D]`, za, zb: natural lse `[T, HEADS]`; out and z
    contiguous."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    za = occupied(tl.load(za_ptr + token * za_t + head * za_h, mask=real, other=float("-inf")))
    zb = occupied(tl.load(zb_ptr + token * zb_t + head * zb_h, mask=real, other=float("-inf")))
    top = finite(tl.maximum(za, zb))
    wa = tl.exp2((za - top) * LOG2E)
    wb = tl.exp2((zb - top) * LOG2E)
    total = wa + wb
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    dims = tl.arange(0, BLOCK_D)
    inside = (dims < D)[None, :]
    # An empty side is not read, because it may hold anything.
    wide = dims.to(tl.int64)[None, :]
    a_at = a_ptr + (token * a_t + head * a_h)[:, None] + wide * a_d
    b_at = b_ptr + (token * b_t + head * b_h)[:, None] + wide * b_d
    a = floats(a_at, (wa > 0)[:, None] & inside)
    b = floats(b_at, (wb > 0)[:, None] & inside)
    merged = a * (wa * inverse)[:, None] + b * (wb * inverse)[:, None]
    out_at = out_ptr + row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_at, merged, mask=real[:, None] & inside)
    tl.store(z_ptr + row, top + tl.log2(total) * LN2, mask=real)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_all(
    a_ptr,
    za_ptr,
    out_ptr,
    z_ptr,
    rows,
    parts,
    a_t,
    a_n,
    a_h,
    a_d,
    za_t,
    za_n,
    za_h,
    HEADS: constexpr,
    D: constexpr,
    BLOCK_D: constexpr,
    BLOCK_R: constexpr,
):
    """Grid: cdiv(rows, BLOCK_R). a: `[T, parts, HEADS, D]`, za: natural lse `[T, parts, HEADS]`;
    out and z contiguous."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = (dims < D)[None, :]
    a_at = a_ptr + (token * a_t + head * a_h)[:, None] + dims.to(tl.int64)[None, :] * a_d
    za_at = za_ptr + token * za_t + head * za_h
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for _ in range(parts):
        # Subtracted before the factor, which would make the lse of a faint row infinite.
        z = occupied(tl.load(za_at, mask=real, other=float("-inf")))
        higher = tl.maximum(top, z)
        weight = tl.exp2((z - finite(higher)) * LOG2E)
        fade = tl.exp2((top - finite(higher)) * LOG2E)
        a = floats(a_at, (weight > 0)[:, None] & inside)
        acc = acc * fade[:, None] + a * weight[:, None]
        total = total * fade + weight
        top = higher
        a_at += a_n
        za_at += za_n
    factor, _ = closed(top, total)
    out_at = out_ptr + row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_at, acc * factor[:, None], mask=real[:, None] & inside)
    tl.store(z_ptr + row, finite(top) + tl.log2(total) * LN2, mask=real)
