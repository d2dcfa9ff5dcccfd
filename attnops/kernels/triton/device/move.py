"""Device functions: rows moved as integers: a copy between slots of all layers, and the fill of
padding rows."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.store import place, slots_at


@triton.jit
def inner(column, h, d, D: constexpr):
    """`[1, columns]` int64 offsets of columns of heads of D numbers."""
    return ((column // D).to(tl.int64) * h + (column % D).to(tl.int64) * d)[None, :]


@triton.jit
def copy_part(
    source,
    target,
    tile,
    pages_ptr,
    p,
    n,
    h,
    d,
    PAGE: constexpr,
    HEADS: constexpr,
    D: constexpr,
    BLOCK: constexpr,
):
    """Copy BLOCK columns of every entry. All are read before any is written, and no other program
    accesses these columns."""
    column = tile * BLOCK + tl.arange(0, BLOCK)
    real = ((source >= 0) & (target >= 0))[:, None] & (column < HEADS * D)[None, :]
    at = inner(column, h, d, D)
    x = tl.load(pages_ptr + place(source, p, n, PAGE)[:, None] + at, mask=real, other=0)
    # A thread may write a slot that another thread reads.
    tl.debug_barrier()
    tl.store(pages_ptr + place(target, p, n, PAGE)[:, None] + at, x, mask=real)


@triton.jit(do_not_specialize=["entries", "total", "group"])
def copy(
    source_ptr,
    target_ptr,
    source_t,
    target_t,
    entries,
    total,
    group,
    a_ptr,
    a_l,
    a_p,
    a_n,
    a_h,
    a_d,
    b_ptr,
    b_l,
    b_p,
    b_n,
    b_h,
    b_d,
    PAGE: constexpr,
    HEADS: constexpr,
    A_D: constexpr,
    B_D: constexpr,
    BLOCK_N: constexpr,
    BLOCK: constexpr,
):
    """Grid: (groups, tiles of a row of a + tiles of a row of b, layers). A program has all entries
    of its group, BLOCK_N at most: groups read nothing that others write."""
    first = tl.program_id(0).to(tl.int64) * group
    end = tl.minimum(first + group, entries)
    entry = first + tl.arange(0, BLOCK_N)
    source = slots_at(source_ptr, entry, source_t, end, total)
    target = slots_at(target_ptr, entry, target_t, end, total)
    A_TILES: constexpr = (HEADS * A_D + BLOCK - 1) // BLOCK
    tile = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    if tile < A_TILES:
        copy_part(
            source, target, tile, a_ptr + layer * a_l, a_p, a_n, a_h, a_d, PAGE, HEADS, A_D, BLOCK
        )
    elif b_ptr is not None:
        copy_part(
            source,
            target,
            tile - A_TILES,
            b_ptr + layer * b_l,
            b_p,
            b_n,
            b_h,
            b_d,
            PAGE,
            HEADS,
            B_D,
            BLOCK,
        )


@triton.jit(do_not_specialize=["entries", "total"])
def through(
    source_ptr,
    target_ptr,
    source_t,
    target_t,
    entries,
    total,
    pages_ptr,
    scratch_ptr,
    layer,
    p,
    n,
    h,
    d,
    PAGE: constexpr,
    HEADS: constexpr,
    D: constexpr,
    BLOCK_N: constexpr,
    BLOCK: constexpr,
    OUT: constexpr,
):
    """Grid: (cdiv(entries, BLOCK_N), tiles of a row, layers). OUT: from slots into scratch
    `[layers, entries, HEADS * D]`, else back."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = slots_at(source_ptr, entry, source_t, entries, total)
    target = slots_at(target_ptr, entry, target_t, entries, total)
    at_layer = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = ((source >= 0) & (target >= 0))[:, None]
    if HEADS * D % BLOCK != 0:
        real = real & (column < HEADS * D)[None, :]
    at = inner(column, h, d, D)
    kept_ptr = scratch_ptr + ((at_layer * entries + entry) * (HEADS * D))[:, None] + column[None, :]
    if OUT:
        tl.store(
            kept_ptr,
            tl.load(
                pages_ptr + at_layer * layer + place(source, p, n, PAGE)[:, None] + at,
                mask=real,
                other=0,
            ),
            mask=real,
        )
    else:
        tl.store(
            pages_ptr + at_layer * layer + place(target, p, n, PAGE)[:, None] + at,
            tl.load(kept_ptr, mask=real, other=0),
            mask=real,
        )
