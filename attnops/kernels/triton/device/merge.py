"""Device functions: partial results merged by their log-sum-exps, two or any number. A program row is a token's head."""

import triton
import triton.language as tl

from attnops.kernels.triton.device.softmax import LN2, LOG2E, finite


@triton.jit(do_not_specialize=["rows"])
def merge(
    a_ptr, za_ptr, b_ptr, zb_ptr, out_ptr, z_ptr, rows,
    a_t, a_h, a_d, za_t, za_h, b_t, b_h, b_d, zb_t, zb_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(rows, BLOCK_R). a, b: `[T, HEADS, D]`, za, zb: natural lse `[T, HEADS]`; out and z contiguous."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    za = tl.load(za_ptr + token * za_t + head * za_h, mask=real, other=float("-inf"))
    zb = tl.load(zb_ptr + token * zb_t + head * zb_h, mask=real, other=float("-inf"))
    top = finite(tl.maximum(za, zb))
    wa = tl.exp2((za - top) * LOG2E)
    wb = tl.exp2((zb - top) * LOG2E)
    total = wa + wb
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    dims = tl.arange(0, BLOCK_D)
    inside = (dims < D)[None, :]
    # An empty side is not even read: it may hold anything.
    a_at = a_ptr + (token * a_t + head.to(tl.int64) * a_h)[:, None] + dims[None, :] * a_d
    b_at = b_ptr + (token * b_t + head.to(tl.int64) * b_h)[:, None] + dims[None, :] * b_d
    a = tl.load(a_at, mask=(wa > 0)[:, None] & inside, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=(wb > 0)[:, None] & inside, other=0.0).to(tl.float32)
    merged = a * (wa * inverse)[:, None] + b * (wb * inverse)[:, None]
    out_at = out_ptr + row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=real[:, None] & inside)
    tl.store(z_ptr + row, top + tl.log2(total) * LN2, mask=real)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_all(
    a_ptr, za_ptr, out_ptr, z_ptr, rows, parts,
    a_t, a_n, a_h, a_d, za_t, za_n, za_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(rows, BLOCK_R). a: `[T, parts, HEADS, D]`, za: natural lse `[T, parts, HEADS]`; out and z contiguous."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    dims = tl.arange(0, BLOCK_D)
    inside = (dims < D)[None, :]
    a_at = a_ptr + (token * a_t + head.to(tl.int64) * a_h)[:, None] + dims[None, :] * a_d
    za_at = za_ptr + token * za_t + head * za_h
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for _ in range(parts):
        z = tl.load(za_at, mask=real, other=float("-inf")) * LOG2E
        higher = tl.maximum(top, z)
        weight = tl.exp2(z - finite(higher))
        fade = tl.exp2(top - finite(higher))
        a = tl.load(a_at, mask=(weight > 0)[:, None] & inside, other=0.0).to(tl.float32)
        acc = acc * fade[:, None] + a * weight[:, None]
        total = total * fade + weight
        top = higher
        a_at += a_n
        za_at += za_n
    merged = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    out_at = out_ptr + row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=real[:, None] & inside)
    tl.store(z_ptr + row, (finite(top) + tl.log2(total)) * LN2, mask=real)
