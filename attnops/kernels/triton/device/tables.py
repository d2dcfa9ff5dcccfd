"""Device functions: a batch's tables, each in one launch."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["batch", "width"])
def kv_indices(
    table_ptr,
    lengths_ptr,
    indptr_ptr,
    indices_ptr,
    last_ptr,
    batch,
    width,
    table_b,
    table_m,
    lengths_b,
    PAGE: constexpr,
    BLOCK_B: constexpr,
    BLOCK: constexpr,
):
    """Grid: (max(batch, 1), max(cdiv(width, BLOCK), 1)): a program writes a row of the table, and
    as many of the zeros at the end.

    Every program adds up all lengths, which are few and in the cache.
    """
    request = tl.program_id(0)
    before = tl.zeros([BLOCK_B], tl.int32)
    own = tl.zeros([BLOCK_B], tl.int32)
    total = tl.zeros([BLOCK_B], tl.int32)
    for at in range(0, batch, BLOCK_B):
        b = at + tl.arange(0, BLOCK_B)
        pages = (
            (
                tl.load(lengths_ptr + b.to(tl.int64) * lengths_b, mask=b < batch, other=0)
                + (PAGE - 1)
            )
            // PAGE
        ).to(tl.int32)
        before += tl.where(b < request, pages, 0)
        own += tl.where(b == request, pages, 0)
        total += pages
    start, count, end = tl.sum(before, 0), tl.sum(own, 0), tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(indptr_ptr + request, start)
        if request + 1 >= batch:
            tl.store(indptr_ptr + batch, end)
        if request < batch:
            length = tl.load(lengths_ptr + request.to(tl.int64) * lengths_b)
            tl.store(
                last_ptr + request, tl.where(length > 0, (length - 1) % PAGE + 1, 0).to(tl.int32)
            )
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < tl.where(request < batch, width, 0)
    real = inside & (column < count)
    page = tl.load(
        table_ptr + request.to(tl.int64) * table_b + column.to(tl.int64) * table_m,
        mask=real,
        other=0,
    )
    # The zeros of earlier rows come first.
    rows = tl.full([], 0, tl.int64) + width
    at = tl.where(column < count, start + column, end + request * rows - start + column - count)
    tl.store(indices_ptr + at, page, mask=inside & (at < batch * rows))


@triton.jit(do_not_specialize=["tokens", "batch", "width"])
def by_token(
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    tokens,
    batch,
    width,
    table_b,
    table_m,
    lengths_b,
    starts_b,
    CAUSAL: constexpr,
    BLOCK_B: constexpr,
    BLOCK: constexpr,
):
    """Grid: (tokens, max(cdiv(width, BLOCK), 1)). out: int32 `[T]`, the keys that each token sees,
    then its row of the table.

    Every program counts the requests that end at or before its token.
    """
    token = tl.program_id(0)
    ended = tl.zeros([BLOCK_B], tl.int32)
    for at in range(0, batch, BLOCK_B):
        b = at + tl.arange(0, BLOCK_B)
        end = tl.load(
            starts_ptr + (b + 1).to(tl.int64) * starts_b, mask=b < batch, other=2147483647
        )
        ended += (end <= token).to(tl.int32)
    row = tl.sum(ended, 0)
    real = row < batch
    row = tl.minimum(row, batch - 1).to(tl.int64)
    if tl.program_id(1) == 0:
        keys = tl.load(lengths_ptr + row * lengths_b)
        if CAUSAL:
            keys = tl.maximum(keys - (tl.load(starts_ptr + (row + 1) * starts_b) - 1 - token), 0)
        tl.store(out_ptr + token, tl.where(real, keys, 0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(
        table_ptr + row * table_b + column.to(tl.int64) * table_m, mask=column < width, other=0
    )
    tl.store(
        out_ptr + tokens + token.to(tl.int64) * width + column,
        tl.maximum(page, 0),
        mask=column < width,
    )


@triton.jit
def pages_at(row_ptr, at, width, length, pages, table_m, PAGE: constexpr, BLOCK: constexpr):
    """(columns, their page ids, is each a page of the pool within the length, is it a hole)."""
    column = at + tl.arange(0, BLOCK)
    used = (column < width) & (column < (length + (PAGE - 1)) // PAGE)
    page = tl.load(row_ptr + column.to(tl.int64) * table_m, mask=used, other=-1)
    kept = (page >= 0) & (page < pages)
    return column, page, kept, used & (kept == 0)


@triton.jit(do_not_specialize=["width", "pages", "left"])
def named_pages(
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    out_lengths_ptr,
    width,
    pages,
    left,
    table_b,
    table_m,
    lengths_b,
    starts_b,
    PAGE: constexpr,
    SQUEEZE: constexpr,
    BLOCK: constexpr,
):
    """Grid: (batch,). out: int32 `[batch, width]`, contiguous. See `attnops.ops.named_pages`."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + request * lengths_b)
    new = tl.load(starts_ptr + (request + 1) * starts_b) - tl.load(starts_ptr + request * starts_b)
    begin = length - new
    if not SQUEEZE:
        begin = tl.where(left >= 0, begin - left, -2147483647)
    row_ptr = table_ptr + request * table_b
    own_at = tl.zeros([BLOCK], tl.int32) + width
    harm = tl.zeros([BLOCK], tl.int32)
    lost = tl.zeros([BLOCK], tl.int32)
    for at in range(0, width, BLOCK):
        column, page, kept, hole = pages_at(row_ptr, at, width, length, pages, table_m, PAGE, BLOCK)
        own_at = tl.minimum(own_at, tl.where(kept, column, width))
        seen = (column + 1) * PAGE > begin
        if SQUEEZE:
            seen = seen & (new > 1)
            lost += tl.where(hole, tl.minimum(length - column * PAGE, PAGE), 0)
        harm = harm | (hole & seen).to(tl.int32)
    first = tl.min(own_at, 0)
    own = tl.load(row_ptr + first.to(tl.int64) * table_m, mask=first < width, other=0)
    shorter = tl.where(tl.max(harm, 0) > 0, 0, length - tl.sum(lost, 0))
    tl.store(
        out_lengths_ptr + request, tl.where(length > width * PAGE, length, shorter).to(tl.int32)
    )
    done = 0
    for at in range(0, width, BLOCK):
        column, page, kept, hole = pages_at(row_ptr, at, width, length, pages, table_m, PAGE, BLOCK)
        if SQUEEZE:
            here = kept.to(tl.int32)
            tl.store(out_ptr + request * width + done + tl.cumsum(here, 0) - here, page, mask=kept)
            done += tl.sum(here, 0)
        else:
            tl.store(
                out_ptr + request * width + column, tl.where(kept, page, own), mask=column < width
            )
    if SQUEEZE:
        for at in range(0, width, BLOCK):
            column = at + tl.arange(0, BLOCK)
            tl.store(
                out_ptr + request * width + column,
                tl.zeros([BLOCK], tl.int32) + own,
                mask=(column >= done) & (column < width),
            )
