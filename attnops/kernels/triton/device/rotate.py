"""Device function: norm and rotation of the queries and keys of new tokens, and the write of keys
and values into pages, in one launch."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats
from attnops.kernels.triton.device.store import place, slots_at


@triton.jit
def turned_tokens(
    rows_ptr,
    here,
    dims,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    D: constexpr,
    BLOCK_D: constexpr,
    WIDTH: constexpr,
):
    """float32 `[tokens, BLOCK_D]`: one head of each token, normed and rotated.

    rows, cos, sin: of each token. WIDTH: of the cosines and sines, D or D // 2.
    """
    inside = dims < D
    mask = here[:, None] & inside[None, :]
    HALF: constexpr = D // 2
    # Each number's other half is read again, rather than moved between threads.
    across = tl.where(dims < HALF, dims + HALF, dims - HALF)
    x = floats(rows_ptr[:, None] + dims[None, :], mask)
    y = floats(rows_ptr[:, None] + across[None, :], mask)
    if norm_ptr is not None:
        shrink = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * shrink * floats(norm_ptr + dims, inside)[None, :]
        y = y * shrink * floats(norm_ptr + across, inside)[None, :]
    angle = (dims % WIDTH)[None, :]
    cos = floats(cos_ptr[:, None] + angle, mask)
    sin = floats(sin_ptr[:, None] + angle, mask)
    return x * cos + y * tl.where((dims < HALF)[None, :], -sin, sin)


@triton.jit(do_not_specialize=["tokens", "total"])
def rotate(
    q_ptr,
    q_t,
    q_h,
    key_ptr,
    key_t,
    key_h,
    value_ptr,
    value_t,
    value_h,
    k_ptr,
    k_p,
    k_n,
    k_h,
    v_ptr,
    v_p,
    v_n,
    v_h,
    slots_ptr,
    slots_t,
    cos_ptr,
    cos_t,
    sin_ptr,
    sin_t,
    q_out_ptr,
    q_out_t,
    q_out_h,
    k_out_ptr,
    k_out_t,
    k_out_h,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    tokens,
    total,
    D: constexpr,
    BLOCK_D: constexpr,
    VALUE_D: constexpr,
    VALUE_BLOCK: constexpr,
    WIDTH: constexpr,
    PAGE: constexpr,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    BLOCK_T: constexpr,
):
    """Grid: (cdiv(tokens, BLOCK_T), HEADS + 2 * KV_HEADS): one head of query, key or value a
    program.

    Slots outside of `[0, total)` are skipped, but for the rotation.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < tokens
    at = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    if at < HEADS + KV_HEADS:
        cos_at = cos_ptr + token * cos_t
        sin_at = sin_ptr + token * sin_t
        mask = here[:, None] & (dims < D)[None, :]
        if at < HEADS:
            h = at.to(tl.int64)
            rows = q_ptr + token * q_t + h * q_h
            x = turned_tokens(
                rows, here, dims, q_norm_ptr, eps, cos_at, sin_at, D, BLOCK_D, WIDTH
            ).to(q_ptr.dtype.element_ty)
            out = q_out_ptr + (token * q_out_t + h * q_out_h)[:, None] + dims[None, :]
            tl.store(out, x, mask=mask)
        else:
            h = (at - HEADS).to(tl.int64)
            rows = key_ptr + token * key_t + h * key_h
            x = turned_tokens(
                rows, here, dims, k_norm_ptr, eps, cos_at, sin_at, D, BLOCK_D, WIDTH
            ).to(q_ptr.dtype.element_ty)
            out = k_out_ptr + (token * k_out_t + h * k_out_h)[:, None] + dims[None, :]
            tl.store(out, x, mask=mask)
            slot = slots_at(slots_ptr, token, slots_t, tokens, total)
            stored = k_ptr + (place(slot, k_p, k_n, PAGE) + h * k_h)[:, None] + dims[None, :]
            tl.store(stored, x, mask=mask & (slot >= 0)[:, None])
    else:
        h = (at - HEADS - KV_HEADS).to(tl.int64)
        columns = tl.arange(0, VALUE_BLOCK)
        inside = here[:, None] & (columns < VALUE_D)[None, :]
        rows = value_ptr + token * value_t + h * value_h
        value = tl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0)
        slot = slots_at(slots_ptr, token, slots_t, tokens, total)
        stored = v_ptr + (place(slot, v_p, v_n, PAGE) + h * v_h)[:, None] + columns[None, :]
        tl.store(stored, value, mask=inside & (slot >= 0)[:, None])
