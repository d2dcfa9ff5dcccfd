"""Device functions: the gated delta rule, token after token or by chunks, and the convolution of
each channel."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats

EPS = constexpr(1e-6)
"""`attnops.ops.recurrent.reference.EPS`"""
CHUNK = constexpr(64)
BLOCK = constexpr(16)
"""Rows of a chunk that are solved one after the other."""
BLOCKS = constexpr(4)


@triton.jit
def to_one(x, AXIS: constexpr):
    """What makes vectors along the axis one long, float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, AXIS) + EPS)


@triton.jit
def after_token(state, q, k, v, decay, beta, NORMALIZE: constexpr):
    """(the state after a token, what its query reads of it)."""
    if NORMALIZE:
        q *= to_one(q, 0)
        k *= to_one(k, 0)
    state *= tl.exp(decay)
    delta = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * delta[None, :]
    return state, tl.sum(q[:, None] * state, 0)


@triton.jit
def in_turn(
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    starts_ptr,
    output_ptr,
    state_ptr,
    scale,
    query_t,
    query_h,
    key_t,
    key_h,
    value_t,
    value_h,
    decay_t,
    decay_h,
    beta_t,
    beta_h,
    starts_b,
    HEADS: constexpr,
    GROUP: constexpr,
    DK: constexpr,
    DV: constexpr,
    NORMALIZE: constexpr,
    FRESH: constexpr,
    ONE: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
):
    """Grid: requests * heads * cdiv(DV, BLOCK_V). One token after the other. ONE: no request has
    more than one."""
    tiles: constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    # Programs that run at once read memory that lies together: parts of the same rows.
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    request, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    d, n = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = d < DK, n < DV
    state_ptr += (request * HEADS + head) * DK * DV + d[:, None] * DV + n[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if not FRESH:
        # Before it is known whether there is a token: both loads are under way at once.
        state = tl.load(state_ptr, mask=in_state, other=0.0)
    if begin >= end:
        return
    query_ptr += head // GROUP * query_h + d
    key_ptr += head // GROUP * key_h + d
    value_ptr += head * value_h + n
    decay_ptr += head * decay_h
    beta_ptr += head * beta_h
    output_ptr += head * DV + n
    # A loop makes a step of one token wait for all of the state before it reads the token.
    t = begin.to(tl.int64)
    state, out = after_token(
        state,
        floats(query_ptr + t * query_t, in_key),
        floats(key_ptr + t * key_t, in_key),
        floats(value_ptr + t * value_t, in_value),
        tl.load(decay_ptr + t * decay_t),
        tl.load(beta_ptr + t * beta_t).to(tl.float32),
        NORMALIZE,
    )
    tl.store(output_ptr + t * HEADS * DV, out * scale, mask=in_value)
    if not ONE:
        for token in range(begin + 1, end):
            t = tl.cast(token, tl.int64)
            state, out = after_token(
                state,
                floats(query_ptr + t * query_t, in_key),
                floats(key_ptr + t * key_t, in_key),
                floats(value_ptr + t * value_t, in_value),
                tl.load(decay_ptr + t * decay_t),
                tl.load(beta_ptr + t * beta_t).to(tl.float32),
                NORMALIZE,
            )
            tl.store(output_ptr + t * HEADS * DV, out * scale, mask=in_value)
    tl.store(state_ptr, state, mask=in_state)


@triton.jit
def inverted(a):
    """The inverse of 1 + a, of a strictly lower triangular `[CHUNK, CHUNK]`, float32.

    Rows of the four blocks on the diagonal are solved in turn, all blocks at once. With D the
    inverse of these blocks and N = D times the rest, whose fourth power is 0, the whole is
    (1 - N) (1 + N @ N) D. Powers of `a` itself may be huge where the inverse is small.
    """
    i = tl.arange(0, CHUNK)
    same = i[:, None] // BLOCK == i[None, :] // BLOCK
    blocks = tl.sum(tl.reshape(tl.where(same, a, 0.0), [BLOCKS, BLOCK, BLOCKS, BLOCK]), 2)
    by_column = tl.permute(blocks, [0, 2, 1])
    r = tl.arange(0, BLOCK)
    row, column = r[None, :, None], r[None, None, :]
    found = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32)
    for at in range(1, BLOCK):
        of_row = tl.sum(tl.where(column == at, by_column, 0.0), 2)
        before = tl.sum(of_row[:, :, None] * found, 1)
        found = tl.where(row == at, found - before[:, None, :], found)
    spread = tl.broadcast_to(found[:, :, None, :], [BLOCKS, BLOCK, BLOCKS, BLOCK])
    inverse = tl.where(same, tl.reshape(spread, [CHUNK, CHUNK]), 0.0)
    rest = tl.dot(inverse, tl.where(same, 0.0, a), input_precision="tf32")
    twice = tl.dot(rest, rest, input_precision="tf32")
    inverse += tl.dot(twice, inverse, input_precision="tf32")
    return inverse - tl.dot(rest, inverse, input_precision="tf32")


@triton.jit(do_not_specialize=["chunks"])
def solve(
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    starts_ptr,
    keys_ptr,
    values_ptr,
    seen_ptr,
    factors_ptr,
    scale,
    chunks,
    query_t,
    query_h,
    key_t,
    key_h,
    value_t,
    value_h,
    decay_t,
    decay_h,
    beta_t,
    beta_h,
    starts_b,
    HEADS: constexpr,
    GROUP: constexpr,
    DK: constexpr,
    DV: constexpr,
    NORMALIZE: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    COMPUTE: constexpr,
):
    """Grid: (requests * chunks, heads). What a chunk's tokens are, whatever its first state S is.

    Written, of each token and head: keys `[T, Hv, Dk]` and values `[T, Hv, Dv]`, so that values -
    keys S are the new values; seen `[T, Hv, CHUNK]`, the weights of new values in the output; and
    factors `[T, Hv, 2]` of the query that reads S, and of the key by which a new value stays.
    """
    request, head = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(1).to(tl.int64)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first = tl.load(starts_ptr + request * starts_b) + tl.program_id(0) % chunks * CHUNK
    if first >= end:
        return
    i = tl.arange(0, CHUNK)
    t = first.to(tl.int64) + i
    here = t < end
    d, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key = here[:, None] & (d < DK)[None, :]
    at = t[:, None] * query_t + head // GROUP * query_h + d[None, :]
    q = tl.load(query_ptr + at, mask=in_key, other=0.0)
    at = t[:, None] * key_t + head // GROUP * key_h + d[None, :]
    k = tl.load(key_ptr + at, mask=in_key, other=0.0)
    decay = floats(decay_ptr + t * decay_t + head * decay_h, here)
    beta = floats(beta_ptr + t * beta_t + head * beta_h, here)
    of_q = tl.zeros([CHUNK], tl.float32) + scale
    of_k = tl.zeros([CHUNK], tl.float32) + 1.0
    if NORMALIZE:
        of_q *= to_one(q, 1)
        of_k *= to_one(k, 1)
    passed = tl.cumsum(decay, 0)
    q, k = q.to(COMPUTE), k.to(COMPUTE)

    up_to = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(up_to, passed[:, None] - passed[None, :], float("-inf")))
    weights = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    weights *= of_q[:, None] * of_k[None, :]
    row = t * HEADS + head
    at = row[:, None] * CHUNK + i[None, :]
    tl.store(seen_ptr + at, weights, mask=here[:, None])

    system = tl.dot(k, tl.trans(k), input_precision="ieee") * between
    system *= (of_k * beta)[:, None] * of_k[None, :]
    inverse = inverted(tl.where(i[:, None] > i[None, :], system, 0.0))
    of_keys = (inverse * (of_k * beta * tl.exp(passed))[None, :]).to(COMPUTE)
    keys = tl.dot(of_keys, k, input_precision="ieee")
    tl.store(keys_ptr + row[:, None] * DK + d[None, :], keys, mask=in_key)
    in_value = here[:, None] & (n < DV)[None, :]
    at = t[:, None] * value_t + head * value_h + n[None, :]
    v = tl.load(value_ptr + at, mask=in_value, other=0.0).to(COMPUTE)
    values = tl.dot((inverse * beta[None, :]).to(COMPUTE), v, input_precision="ieee")
    tl.store(values_ptr + row[:, None] * DV + n[None, :], values, mask=in_value)
    tl.store(factors_ptr + row * 2, of_q * tl.exp(passed), mask=here)
    tl.store(factors_ptr + row * 2 + 1, of_k * tl.exp(tl.sum(decay, 0) - passed), mask=here)


@triton.jit
def carry(
    query_ptr,
    key_ptr,
    decay_ptr,
    starts_ptr,
    keys_ptr,
    values_ptr,
    seen_ptr,
    factors_ptr,
    output_ptr,
    state_ptr,
    query_t,
    query_h,
    key_t,
    key_h,
    decay_t,
    decay_h,
    starts_b,
    HEADS: constexpr,
    GROUP: constexpr,
    DK: constexpr,
    DV: constexpr,
    FRESH: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    COMPUTE: constexpr,
):
    """Grid: (requests, heads, cdiv(DV, BLOCK_V)). The state goes on from chunk to chunk, by what
    `solve` has written of them."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    if begin >= end:
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    n = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    query_ptr += head // GROUP * query_h + d[None, :]
    key_ptr += head // GROUP * key_h + d[None, :]
    state_ptr += (request * HEADS + head) * DK * DV + d[:, None] * DV + n[None, :]
    in_state = (d < DK)[:, None] & (n < DV)[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if not FRESH:
        state = tl.load(state_ptr, mask=in_state, other=0.0)
    for first in range(begin, end, CHUNK):
        t = tl.cast(first, tl.int64) + i
        here = t < end
        row = t * HEADS + head
        in_key, in_value = here[:, None] & (d < DK)[None, :], here[:, None] & (n < DV)[None, :]
        q = tl.load(query_ptr + t[:, None] * query_t, mask=in_key, other=0.0).to(COMPUTE)
        k = tl.load(key_ptr + t[:, None] * key_t, mask=in_key, other=0.0).to(COMPUTE)
        at = row[:, None] * DK + d[None, :]
        keys = tl.load(keys_ptr + at, mask=in_key, other=0.0).to(COMPUTE)
        of_value = row[:, None] * DV + n[None, :]
        values = floats(values_ptr + of_value, in_value)
        at = row[:, None] * CHUNK + i[None, :]
        seen = tl.load(seen_ptr + at, mask=here[:, None], other=0.0).to(COMPUTE)
        of_q, of_k = floats(factors_ptr + row * 2, here), floats(factors_ptr + row * 2 + 1, here)
        left = tl.exp(tl.sum(floats(decay_ptr + t * decay_t + head * decay_h, here), 0))
        before = state.to(COMPUTE)
        new = values - tl.dot(keys, before, input_precision="ieee")
        out = tl.dot(q, before, input_precision="ieee") * of_q[:, None]
        out = tl.dot(seen, new.to(COMPUTE), out, input_precision="ieee")
        tl.store(output_ptr + of_value, out, mask=in_value)
        stays = (new * of_k[:, None]).to(COMPUTE)
        state = tl.dot(tl.trans(k), stays, state * left, input_precision="ieee")
    tl.store(state_ptr, state, mask=in_state)


@triton.jit(do_not_specialize=["tiles"])
def conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    output_ptr,
    state_ptr,
    tiles,
    channels,
    x_t,
    x_c,
    weight_c,
    weight_w,
    starts_b,
    WIDTH: constexpr,
    KEPT: constexpr,
    KEPT_P: constexpr,
    SILU: constexpr,
    FRESH: constexpr,
    BLOCK_T: constexpr,
    BLOCK_C: constexpr,
):
    """Grid: (requests * tiles, cdiv(channels, BLOCK_C)). The first tile of a request, which alone
    reads the inputs before it, writes those that come after it."""
    request, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first = begin + tile * BLOCK_T
    if first >= end:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < channels
    wide_c = c.to(tl.int64)
    state_ptr += (request * channels + wide_c) * KEPT
    t = first + tl.arange(0, BLOCK_T)
    here = (t < end)[:, None] & in_c[None, :]
    y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        y += floats(bias_ptr + wide_c, in_c)[None, :]
    for w in tl.static_range(WIDTH):
        source = t + (w - (WIDTH - 1))
        inside = source >= begin
        at = source.to(tl.int64)[:, None] * x_t + wide_c[None, :] * x_c
        value = floats(x_ptr + at, here & inside[:, None])
        if not FRESH:
            if tile == 0:
                before = state_ptr[None, :] + (source - begin + KEPT)[:, None]
                value += floats(before, here & (source < begin)[:, None])
        column = tl.full([BLOCK_C], w, tl.int64) * weight_w
        y += value * floats(weight_ptr + wide_c * weight_c + column, in_c)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    at = t.to(tl.int64)[:, None] * channels + wide_c[None, :]
    tl.store(output_ptr + at, y, mask=here)
    if tile == 0:
        s = tl.arange(0, KEPT_P)
        last_t = end - KEPT + s
        kept, is_new = (s < KEPT)[None, :] & in_c[:, None], (last_t >= begin)[None, :]
        inputs = x_ptr + last_t.to(tl.int64)[None, :] * x_t + wide_c[:, None] * x_c
        newer = tl.load(inputs, mask=kept & is_new, other=0.0)
        older = tl.zeros([BLOCK_C, KEPT_P], state_ptr.dtype.element_ty)
        if not FRESH:
            held = state_ptr[:, None] + (last_t - begin + KEPT)[None, :]
            older = tl.load(held, mask=kept & ~is_new, other=0.0)
        # Threads of the program read what others write.
        tl.debug_barrier()
        tl.store(state_ptr[:, None] + s[None, :], tl.where(is_new, newer, older), mask=kept)
