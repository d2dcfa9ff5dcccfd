"""Device functions: the scan of Mamba-2, token after token or by chunks."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats
from attnops.kernels.triton.device.recurrent import CHUNK

TERMS = constexpr(8)
"""Of a series whose rest is below float32's rounding."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with few wrong bits even where it is almost 0.

    With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) = 2 artanh(e / (2 + e)).
    """
    e = tl.exp(-tl.abs(x))
    ratio = e / (2.0 + e)
    square = ratio * ratio
    series = square * 0.0
    for term in tl.static_range(TERMS):
        series = series * square + 1.0 / (2 * TERMS - 1 - 2 * term)
    # A NaN stays one.
    return tl.where(x < 0.0, 0.0, x) + 2.0 * ratio * series


@triton.jit
def steps(dt, bias_ptr, shortest, longest, SOFTPLUS: constexpr):
    """How far the state goes with tokens of these dt, float32."""
    if bias_ptr is not None:
        dt += tl.load(bias_ptr).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.where(dt < shortest, shortest, dt)
    return tl.where(dt > longest, longest, dt)


@triton.jit
def in_turn(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    starts_ptr,
    d_ptr,
    bias_ptr,
    output_ptr,
    state_ptr,
    shortest,
    longest,
    x_t,
    x_h,
    dt_t,
    dt_h,
    b_t,
    b_h,
    c_t,
    c_h,
    starts_b,
    HEADS: constexpr,
    GROUP: constexpr,
    DK: constexpr,
    DV: constexpr,
    SOFTPLUS: constexpr,
    FRESH: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
):
    """Grid: requests * heads * cdiv(DV, BLOCK_V). One token after the other."""
    tiles: constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    # Programs that run at once read memory that lies together.
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    request, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    k, n = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = k < DK, n < DV
    state_ptr += (request * HEADS + head) * DK * DV + n[:, None] * DK + k[None, :]
    in_state = in_value[:, None] & in_key[None, :]
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if not FRESH:
        # Before it is known whether there is a token: both loads are under way at once.
        state = tl.load(state_ptr, mask=in_state, other=0.0)
    if begin >= end:
        return
    x_ptr += head * x_h + n
    b_ptr += head // GROUP * b_h + k
    c_ptr += head // GROUP * c_h + k
    if bias_ptr is not None:
        bias_ptr += head
    a, skip = tl.load(a_ptr + head), 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    for token in range(begin, end):
        t = tl.cast(token, tl.int64)
        x = floats(x_ptr + t * x_t, in_value)
        b, c = floats(b_ptr + t * b_t, in_key), floats(c_ptr + t * c_t, in_key)
        dt = tl.load(dt_ptr + t * dt_t + head * dt_h).to(tl.float32)
        dt = steps(dt, bias_ptr, shortest, longest, SOFTPLUS)
        state = state * tl.exp(dt * a) + (x * dt)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], 1) + x * skip
        tl.store(output_ptr + (t * HEADS + head) * DV + n, out, mask=in_value)
    tl.store(state_ptr, state, mask=in_state)


@triton.jit
def by_chunks(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    starts_ptr,
    d_ptr,
    bias_ptr,
    output_ptr,
    state_ptr,
    shortest,
    longest,
    x_t,
    x_h,
    dt_t,
    dt_h,
    b_t,
    b_h,
    c_t,
    c_h,
    starts_b,
    HEADS: constexpr,
    GROUP: constexpr,
    DK: constexpr,
    DV: constexpr,
    SOFTPLUS: constexpr,
    FRESH: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    COMPUTE: constexpr,
):
    """Grid: (requests, heads, cdiv(DV, BLOCK_V)). The tokens of a chunk see each other by a product
    of c and b, and those before it by the state, which is `[DK, DV]` here. Where DK is more than
    BLOCK_K, a second tile has the rest of its rows."""
    MORE: constexpr = DK > BLOCK_K
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    if begin >= end:
        return
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    n = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    x_ptr += head * x_h + n[None, :]
    b_ptr += head // GROUP * b_h + k[None, :]
    c_ptr += head // GROUP * c_h + k[None, :]
    if bias_ptr is not None:
        bias_ptr += head
    a, skip = tl.load(a_ptr + head), 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    state_ptr += (request * HEADS + head) * DK * DV + n[None, :] * DK + k[:, None]
    in_state = (k < DK)[:, None] & (n < DV)[None, :]
    in_more = (k < DK - BLOCK_K)[:, None] & (n < DV)[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    more = state
    if not FRESH:
        state = tl.load(state_ptr, mask=in_state, other=0.0)
        if MORE:
            more = tl.load(state_ptr + BLOCK_K, mask=in_more, other=0.0)
    up_to = i[:, None] >= i[None, :]
    for first in range(begin, end, CHUNK):
        t = tl.cast(first, tl.int64) + i
        here = t < end
        in_key, in_value = here[:, None] & (k < DK)[None, :], here[:, None] & (n < DV)[None, :]
        x = floats(x_ptr + t[:, None] * x_t, in_value)
        b = tl.load(b_ptr + t[:, None] * b_t, mask=in_key, other=0.0).to(COMPUTE)
        c = tl.load(c_ptr + t[:, None] * c_t, mask=in_key, other=0.0).to(COMPUTE)
        dt = floats(dt_ptr + t * dt_t + head * dt_h, here)
        dt = tl.where(here, steps(dt, bias_ptr, shortest, longest, SOFTPLUS), 0.0)
        passed, whole = tl.cumsum(dt * a, 0), tl.sum(dt * a, 0)
        between = tl.exp(tl.where(up_to, passed[:, None] - passed[None, :], float("-inf")))
        weights = tl.dot(c, tl.trans(b), input_precision="ieee")
        out = tl.dot(c, state.to(COMPUTE), input_precision="ieee")
        if MORE:
            in_key = here[:, None] & (k < DK - BLOCK_K)[None, :]
            at = t[:, None] * b_t + BLOCK_K
            more_b = tl.load(b_ptr + at, mask=in_key, other=0.0).to(COMPUTE)
            at = t[:, None] * c_t + BLOCK_K
            more_c = tl.load(c_ptr + at, mask=in_key, other=0.0).to(COMPUTE)
            weights = tl.dot(more_c, tl.trans(more_b), weights, input_precision="ieee")
            out = tl.dot(more_c, more.to(COMPUTE), out, input_precision="ieee")
        weights, out = weights * between, out * tl.exp(passed)[:, None]
        values = x * dt[:, None]
        out = tl.dot(weights.to(COMPUTE), values.to(COMPUTE), out, input_precision="ieee")
        at = (t[:, None] * HEADS + head) * DV + n[None, :]
        tl.store(output_ptr + at, out + x * skip, mask=in_value)
        stays = (values * tl.exp(whole - passed)[:, None]).to(COMPUTE)
        left = state * tl.exp(whole)
        state = tl.dot(tl.trans(b), stays, left, input_precision="ieee")
        if MORE:
            left = more * tl.exp(whole)
            more = tl.dot(tl.trans(more_b), stays, left, input_precision="ieee")
    tl.store(state_ptr, state, mask=in_state)
    if MORE:
        tl.store(state_ptr + BLOCK_K, more, mask=in_more)
