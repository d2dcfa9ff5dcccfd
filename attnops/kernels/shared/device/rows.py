"""Device functions that clear rows, and that write lists of slots."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def clear_part(
    starts_ptr, end_at, ptr, rows, fill, COLUMNS: constexpr, BLOCK_R: constexpr, BLOCK: constexpr
):
    """Set the padding rows among the program's rows of `[rows, COLUMNS]` to `fill`."""
    end = tl.load(starts_ptr + end_at)
    first = tl.program_id(0) * BLOCK_R
    if first + BLOCK_R > end:
        row = first.to(tl.int64) + tl.arange(0, BLOCK_R)
        here = ((row >= end) & (row < rows))[:, None]
        for start in range(0, COLUMNS, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            value = tl.full([BLOCK_R, BLOCK], 0.0, tl.float32) + fill
            tl.store(ptr + (row * COLUMNS)[:, None] + column, value, mask=here & (column < COLUMNS))


@triton.jit(do_not_specialize=["a_end", "b_end", "c_end", "a_rows", "b_rows", "c_rows"])
def clear(
    a_starts_ptr,
    a_end,
    a_ptr,
    a_rows,
    a_fill,
    b_starts_ptr,
    b_end,
    b_ptr,
    b_rows,
    b_fill,
    c_starts_ptr,
    c_end,
    c_ptr,
    c_rows,
    c_fill,
    A_COLUMNS: constexpr,
    B_COLUMNS: constexpr,
    C_COLUMNS: constexpr,
    BLOCK_R: constexpr,
    BLOCK: constexpr,
):
    """Grid: (cdiv(most rows, BLOCK_R), 1 to 3 for a, b and c)."""
    if tl.program_id(1) == 0:
        clear_part(a_starts_ptr, a_end, a_ptr, a_rows, a_fill, A_COLUMNS, BLOCK_R, BLOCK)
    elif tl.program_id(1) == 1:
        clear_part(b_starts_ptr, b_end, b_ptr, b_rows, b_fill, B_COLUMNS, BLOCK_R, BLOCK)
    else:
        clear_part(c_starts_ptr, c_end, c_ptr, c_rows, c_fill, C_COLUMNS, BLOCK_R, BLOCK)


@triton.jit(do_not_specialize=["topk", "width", "slots", "page", "apart"])
def lists(
    indices_ptr,
    lengths_ptr,
    out_ptr,
    topk,
    width,
    slots,
    page,
    apart,
    indices_t,
    indices_k,
    lengths_t,
    LENGTHS: constexpr,
    APART: constexpr,
    BLOCK: constexpr,
):
    """Grid: (tokens, cdiv(width, BLOCK)). out: int32 `[T, width]`, contiguous: the slots of a list,
    and -1 elsewhere.

    APART: pages of `page` slots are `apart` slots apart in what is written.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(
        indices_ptr + token * indices_t + column.to(tl.int64) * indices_k,
        mask=column < topk,
        other=-1,
    )
    real = (at >= 0) & (at < slots)
    if LENGTHS:
        real = real & (column < tl.load(lengths_ptr + token * lengths_t))
    if APART:
        at = at + at // page * (apart - page)
    tl.store(out_ptr + token * width + column, tl.where(real, at, -1), mask=column < width)
