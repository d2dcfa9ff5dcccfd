"""Device function: stage two. One row's partial results over the splits of its request, merged by their log-sum-exps."""

import triton
import triton.language as tl

from attnops.kernels.triton.device.softmax import LN2, LOG2E, await_previous, finite, share, with_sink

VARYING = ["left", "chunk", "width", "splits", "split_keys", "rows", "fewest", "most", "tile"]


@triton.jit(do_not_specialize=VARYING)
def combine(
    parts_ptr, lengths_ptr, starts_ptr, sinks_ptr, out_ptr, lse_ptr,
    left, chunk, width, splits, split_keys, rows, fewest, most, tile,
    out_t, out_h, out_d, lse_t, lse_h,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr,
    LEFT: tl.constexpr, CHUNKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: requests * width * HEADS * cdiv(DV, BLOCK_DV). parts: float32 `[rows, splits, DV]`, then `[rows, splits]` base-2 lse.

    tile: keys of a step of stage one. AT_ONCE: parts that are read at once. OVERLAP: it is launched while stage one runs.
    """
    at = tl.program_id(0)
    DV_TILES: tl.constexpr = (DV + BLOCK_DV - 1) // BLOCK_DV
    row = at // DV_TILES
    head = row % HEADS
    slot = row // HEADS
    request = slot // width
    i = slot % width
    begin = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - begin
    length = tl.load(lengths_ptr + request)
    if OVERLAP:
        await_previous()
    if i >= queries:
        return
    if (queries < fewest) | (queries > most):
        return
    first, size = share(length, queries, left, chunk, splits, split_keys, tile, LEFT, CHUNKED)
    count = tl.minimum(tl.cdiv(length - first, size), splits)

    dims = (at % DV_TILES) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    inside = dims < DV
    origin = row.to(tl.int64) * splits
    lses_ptr = parts_ptr + rows.to(tl.int64) * splits * DV
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    # In chunks: where their size is the same for every batch, the order of summation follows from the request alone.
    for at_split in range(0, count, AT_ONCE):
        n = at_split + tl.arange(0, AT_ONCE)
        real = n < count
        z = tl.load(lses_ptr + origin + n, mask=real, other=float("-inf"))
        part = tl.load(parts_ptr + (origin + n)[:, None] * DV + dims[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(z, 0))
        weights = tl.exp2(z - finite(higher))
        fade = tl.exp2(top - finite(higher))
        acc = acc * fade + tl.sum(weights[:, None] * part, 0)
        total = total * fade + tl.sum(weights, 0)
        top = higher

    factor = tl.where(total > 0, 1.0 / total, 0.0)
    z = finite(top) + tl.log2(total)
    if sinks_ptr is not None:
        factor, z = with_sink(factor, z, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    token = (begin + i).to(tl.int64)
    tl.store(out_ptr + token * out_t + head.to(tl.int64) * out_h + dims * out_d, (acc * factor).to(out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        if at % DV_TILES == 0:
            tl.store(lse_ptr + token * lse_t + head * lse_h, z * LN2)
