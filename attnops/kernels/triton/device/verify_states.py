"""Device functions: layers that carry a state over tokens that may be taken back. The state goes on
over the accepted ones of those before, and is read with the new ones."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats
from attnops.kernels.triton.device.recurrent import to_one
from attnops.kernels.triton.device.scan import steps


@triton.jit
def accepted_of(accepted_ptr, request, SLOTS: constexpr):
    """(the slot of the first accepted token, how many there are), within the slots."""
    first = tl.load(accepted_ptr + request * 2)
    count = tl.load(accepted_ptr + request * 2 + 1)
    return (first % SLOTS + SLOTS) % SLOTS, tl.minimum(tl.maximum(count, 0), SLOTS)


@triton.jit
def rule(
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    starts_ptr,
    output_ptr,
    state_ptr,
    kept_key_ptr,
    kept_value_ptr,
    kept_decay_ptr,
    kept_beta_ptr,
    accepted_ptr,
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
    SLOTS: constexpr,
    NORMALIZE: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
):
    """Grid: (requests, heads, cdiv(DV, BLOCK_V)). A program holds its columns of the state over all
    tokens. It loads a token while it works on the one before."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first, count = accepted_of(accepted_ptr, request, SLOTS)
    if (begin >= end) & (count == 0):
        return
    d, n = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = d < DK, n < DV
    GROUPS: constexpr = HEADS // GROUP
    group = head // GROUP
    query_ptr += group * query_h + d
    key_ptr += group * key_h + d
    value_ptr += head * value_h + n
    decay_ptr += head * decay_h
    beta_ptr += head * beta_h
    kept_key_ptr += (request * SLOTS * GROUPS + group) * DK + d
    kept_value_ptr += (request * SLOTS * HEADS + head) * DV + n
    kept_decay_ptr += request * SLOTS * HEADS + head
    kept_beta_ptr += request * SLOTS * HEADS + head
    state_ptr += (request * HEADS + head) * DK * DV + d[:, None] * DV + n[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.load(state_ptr, mask=in_state, other=0.0)

    there = count > 0
    next_k = floats(kept_key_ptr + first * GROUPS * DK, in_key & there)
    next_v = floats(kept_value_ptr + first * HEADS * DV, in_value & there)
    next_decay = tl.load(kept_decay_ptr + first * HEADS, mask=there, other=0.0)
    next_beta = floats(kept_beta_ptr + first * HEADS, there)
    for i in range(count):
        k, v, decay, beta = next_k, next_v, next_decay, next_beta
        slot, there = (first + i + 1) % SLOTS, i + 1 < count
        next_k = floats(kept_key_ptr + slot * GROUPS * DK, in_key & there)
        next_v = floats(kept_value_ptr + slot * HEADS * DV, in_value & there)
        next_decay = tl.load(kept_decay_ptr + slot * HEADS, mask=there, other=0.0)
        next_beta = floats(kept_beta_ptr + slot * HEADS, there)
        if NORMALIZE:
            k *= to_one(k, 0)
        state *= tl.exp(decay)
        delta = (v - tl.sum(k[:, None] * state, 0)) * beta
        state += k[:, None] * delta[None, :]
    if count > 0:
        tl.store(state_ptr, state, mask=in_state)

    here = begin < end
    t = tl.cast(begin, tl.int64)
    next_q = floats(query_ptr + t * query_t, in_key & here)
    raw_k = tl.load(key_ptr + t * key_t, mask=in_key & here, other=0.0)
    raw_v = tl.load(value_ptr + t * value_t, mask=in_value & here, other=0.0)
    next_decay = tl.load(decay_ptr + t * decay_t, mask=here, other=0.0)
    raw_beta = tl.load(beta_ptr + t * beta_t, mask=here, other=0.0)
    for token in range(begin, end):
        t = tl.cast(token, tl.int64)
        q, decay = next_q, next_decay
        k, v, beta = raw_k.to(tl.float32), raw_v.to(tl.float32), raw_beta.to(tl.float32)
        slot = (first + count + (token - begin)) % SLOTS
        tl.store(kept_value_ptr + slot * HEADS * DV, raw_v, mask=in_value)
        if tl.program_id(2) == 0:
            tl.store(kept_decay_ptr + slot * HEADS, decay)
            tl.store(kept_beta_ptr + slot * HEADS, raw_beta)
            if head % GROUP == 0:
                tl.store(kept_key_ptr + slot * GROUPS * DK, raw_k, mask=in_key)
        here = token + 1 < end
        next_q = floats(query_ptr + (t + 1) * query_t, in_key & here)
        raw_k = tl.load(key_ptr + (t + 1) * key_t, mask=in_key & here, other=0.0)
        raw_v = tl.load(value_ptr + (t + 1) * value_t, mask=in_value & here, other=0.0)
        next_decay = tl.load(decay_ptr + (t + 1) * decay_t, mask=here, other=0.0)
        raw_beta = tl.load(beta_ptr + (t + 1) * beta_t, mask=here, other=0.0)
        if NORMALIZE:
            q *= to_one(q, 0)
            k *= to_one(k, 0)
        state *= tl.exp(decay)
        # Both read the state before the token: two sums at once, and not one after the other.
        delta = (v - tl.sum(k[:, None] * state, 0)) * beta
        out = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * delta
        state += k[:, None] * delta[None, :]
        tl.store(output_ptr + (t * HEADS + head) * DV + n, out * scale, mask=in_value)


@triton.jit
def scan(
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
    kept_x_ptr,
    kept_dt_ptr,
    kept_b_ptr,
    accepted_ptr,
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
    SLOTS: constexpr,
    SOFTPLUS: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
):
    """Grid: (requests, heads, cdiv(DV, BLOCK_V)). As `rule`, of rows of the state."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first, count = accepted_of(accepted_ptr, request, SLOTS)
    if (begin >= end) & (count == 0):
        return
    k, n = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = k < DK, n < DV
    GROUPS: constexpr = HEADS // GROUP
    group = head // GROUP
    x_ptr += head * x_h + n
    dt_ptr += head * dt_h
    b_ptr += group * b_h + k
    c_ptr += group * c_h + k
    if bias_ptr is not None:
        bias_ptr += head
    a, skip = tl.load(a_ptr + head), 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    kept_x_ptr += (request * SLOTS * HEADS + head) * DV + n
    kept_dt_ptr += request * SLOTS * HEADS + head
    kept_b_ptr += (request * SLOTS * GROUPS + group) * DK + k
    state_ptr += (request * HEADS + head) * DK * DV + n[:, None] * DK + k[None, :]
    in_state = in_value[:, None] & in_key[None, :]
    state = tl.load(state_ptr, mask=in_state, other=0.0)

    there = count > 0
    next_x = floats(kept_x_ptr + first * HEADS * DV, in_value & there)
    next_dt = floats(kept_dt_ptr + first * HEADS, there)
    next_b = floats(kept_b_ptr + first * GROUPS * DK, in_key & there)
    for i in range(count):
        x, dt, b = next_x, steps(next_dt, bias_ptr, shortest, longest, SOFTPLUS), next_b
        slot, there = (first + i + 1) % SLOTS, i + 1 < count
        next_x = floats(kept_x_ptr + slot * HEADS * DV, in_value & there)
        next_dt = floats(kept_dt_ptr + slot * HEADS, there)
        next_b = floats(kept_b_ptr + slot * GROUPS * DK, in_key & there)
        state = state * tl.exp(dt * a) + (x * dt)[:, None] * b[None, :]
    if count > 0:
        tl.store(state_ptr, state, mask=in_state)

    here = begin < end
    t = tl.cast(begin, tl.int64)
    raw_x = tl.load(x_ptr + t * x_t, mask=in_value & here, other=0.0)
    raw_dt = tl.load(dt_ptr + t * dt_t, mask=here, other=0.0)
    raw_b = tl.load(b_ptr + t * b_t, mask=in_key & here, other=0.0)
    next_c = floats(c_ptr + t * c_t, in_key & here)
    for token in range(begin, end):
        t = tl.cast(token, tl.int64)
        x, b, c = raw_x.to(tl.float32), raw_b.to(tl.float32), next_c
        dt = steps(raw_dt.to(tl.float32), bias_ptr, shortest, longest, SOFTPLUS)
        slot = (first + count + (token - begin)) % SLOTS
        tl.store(kept_x_ptr + slot * HEADS * DV, raw_x, mask=in_value)
        if tl.program_id(2) == 0:
            tl.store(kept_dt_ptr + slot * HEADS, raw_dt)
            if head % GROUP == 0:
                tl.store(kept_b_ptr + slot * GROUPS * DK, raw_b, mask=in_key)
        here = token + 1 < end
        raw_x = tl.load(x_ptr + (t + 1) * x_t, mask=in_value & here, other=0.0)
        raw_dt = tl.load(dt_ptr + (t + 1) * dt_t, mask=here, other=0.0)
        raw_b = tl.load(b_ptr + (t + 1) * b_t, mask=in_key & here, other=0.0)
        next_c = floats(c_ptr + (t + 1) * c_t, in_key & here)
        state = state * tl.exp(dt * a) + (x * dt)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], 1) + x * skip
        tl.store(output_ptr + (t * HEADS + head) * DV + n, out, mask=in_value)


@triton.jit
def conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    output_ptr,
    state_ptr,
    kept_ptr,
    accepted_ptr,
    channels,
    x_t,
    x_c,
    weight_c,
    weight_w,
    starts_b,
    WIDTH: constexpr,
    HELD: constexpr,
    HELD_P: constexpr,
    SLOTS: constexpr,
    SILU: constexpr,
    BLOCK_T: constexpr,
    BLOCK_C: constexpr,
):
    """Grid: (requests, cdiv(channels, BLOCK_C)). HELD: inputs of a state."""
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first, count = accepted_of(accepted_ptr, request, SLOTS)
    if (begin >= end) & (count == 0):
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < channels
    wide_c = c.to(tl.int64)
    state_ptr += (request * channels + wide_c) * HELD
    kept_ptr += request * SLOTS * channels + wide_c
    behind = first + count
    for tile in range(begin, end, BLOCK_T):
        t = tile + tl.arange(0, BLOCK_T)
        here = (t < end)[:, None] & in_c[None, :]
        y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if bias_ptr is not None:
            y += floats(bias_ptr + wide_c, in_c)[None, :]
        for w in tl.static_range(WIDTH):
            # Of the new tokens, of the accepted ones before them, or of those before these.
            source = t - begin + (w - (WIDTH - 1))
            at = (begin + source).to(tl.int64)[:, None] * x_t + wide_c[None, :] * x_c
            value = floats(x_ptr + at, here & (source >= 0)[:, None])
            of_kept = (source < 0) & (source >= -count)
            slot = (behind + source + SLOTS) % SLOTS
            at = slot[:, None] * channels
            value += floats(kept_ptr[None, :] + at, here & of_kept[:, None])
            at = (HELD + count + source)[:, None]
            value += floats(state_ptr[None, :] + at, here & (source < -count)[:, None])
            column = tl.full([BLOCK_C], w, tl.int64) * weight_w
            y += value * floats(weight_ptr + wide_c * weight_c + column, in_c)[None, :]
        if SILU:
            y *= tl.sigmoid(y)
        at = t.to(tl.int64)[:, None] * channels + wide_c[None, :]
        tl.store(output_ptr + at, y, mask=here)
    s = tl.arange(0, HELD_P)
    held = (s < HELD)[None, :] & in_c[:, None]
    source = s - HELD
    of_kept = source >= -count
    slot = (behind + source + SLOTS) % SLOTS
    newer = tl.load(
        kept_ptr[:, None] + slot[None, :] * channels, mask=held & of_kept[None, :], other=0.0
    )
    older = tl.load(
        state_ptr[:, None] + (s + count)[None, :], mask=held & ~of_kept[None, :], other=0.0
    )
    # Threads of the program read what others write.
    tl.debug_barrier()
    if count > 0:
        tl.store(
            state_ptr[:, None] + s[None, :], tl.where(of_kept[None, :], newer, older), mask=held
        )
    for tile in range(begin, end, BLOCK_T):
        t = tile + tl.arange(0, BLOCK_T)
        here = (t < end)[:, None] & in_c[None, :]
        x = tl.load(
            x_ptr + t.to(tl.int64)[:, None] * x_t + wide_c[None, :] * x_c, mask=here, other=0.0
        )
        into = (behind + (t - begin)) % SLOTS
        tl.store(kept_ptr[None, :] + into[:, None] * channels, x, mask=here)
