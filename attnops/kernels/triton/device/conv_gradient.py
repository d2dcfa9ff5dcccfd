"""Device functions: the gradient of the convolution of each channel."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import floats


@triton.jit
def inputs_at(x_ptr, state_ptr, t, c, begin, here, x_t, x_c, KEPT: constexpr):
    """float32 `[tokens, channels]`; those before the request's first token are in the state."""
    at = t.to(tl.int64)[:, None] * x_t + c[None, :] * x_c
    value = floats(x_ptr + at, here & (t >= begin)[:, None])
    if state_ptr is not None:
        held = state_ptr + c[None, :] * KEPT + (t - begin + KEPT)[:, None]
        value += floats(held, here & (t < begin)[:, None])
    return value


@triton.jit
def slope_at(
    x_ptr,
    weight_ptr,
    bias_ptr,
    grad_ptr,
    state_ptr,
    t,
    c,
    here,
    begin,
    x_t,
    x_c,
    grad_t,
    grad_c,
    in_c,
    channels,
    WIDTH: constexpr,
    KEPT: constexpr,
    SILU: constexpr,
):
    """The gradient of what the convolution gives before the activation, float32 `[tokens,
    channels]`; 0 where there is no token."""
    slope = floats(grad_ptr + t.to(tl.int64)[:, None] * grad_t + c[None, :] * grad_c, here)
    if SILU:
        y = tl.zeros_like(slope)
        if bias_ptr is not None:
            y += floats(bias_ptr + c, in_c)[None, :]
        for w in tl.static_range(WIDTH):
            source = t + (w - (WIDTH - 1))
            value = inputs_at(x_ptr, state_ptr, source, c, begin, here, x_t, x_c, KEPT)
            y += value * floats(weight_ptr + w * channels + c, in_c)[None, :]
        share = tl.sigmoid(y)
        slope *= share * (1.0 + y * (1.0 - share))
    return slope


@triton.jit(do_not_specialize=["tiles"])
def gradient(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    grad_ptr,
    after_ptr,
    state_ptr,
    grad_x_ptr,
    grad_state_ptr,
    sums_ptr,
    tiles,
    channels,
    x_t,
    x_c,
    grad_t,
    grad_c,
    starts_b,
    WIDTH: constexpr,
    KEPT: constexpr,
    SILU: constexpr,
    BLOCK_T: constexpr,
    BLOCK_C: constexpr,
):
    """Grid: (requests * tiles, cdiv(channels, BLOCK_C)). A request's inputs are the KEPT of its
    state, then its tokens. A program has BLOCK_T of them.

    weight: `[WIDTH, C]`. The program writes the gradients of its inputs, and to a row of sums
    `[.., WIDTH + 1, C]` what its tokens add to the gradients of the weight and of the bias.
    """
    request, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    begin = tl.load(starts_ptr + request * starts_b)
    end = tl.load(starts_ptr + (request + 1) * starts_b)
    first = begin - KEPT + tile * BLOCK_T
    if first >= end:
        return
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < channels
    own = request * channels * KEPT
    if state_ptr is not None:
        state_ptr += own
    t = first + tl.arange(0, BLOCK_T)
    grads = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    slope = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    here = in_c[None, :] & (t < end)[:, None]
    # After the loop, `slope` is that of the tile's own tokens.
    for w in tl.static_range(WIDTH):
        target = t + (WIDTH - 1 - w)
        slope = slope_at(
            x_ptr,
            weight_ptr,
            bias_ptr,
            grad_ptr,
            state_ptr,
            target,
            c,
            in_c[None, :] & ((target >= begin) & (target < end))[:, None],
            begin,
            x_t,
            x_c,
            grad_t,
            grad_c,
            in_c,
            channels,
            WIDTH,
            KEPT,
            SILU,
        )
        grads += slope * floats(weight_ptr + w * channels + c, in_c)[None, :]
    left = t - (end - KEPT)
    at = own + c[None, :] * KEPT + left[:, None]
    grads += floats(after_ptr + at, here & (left >= 0)[:, None])
    at = t.to(tl.int64)[:, None] * channels + c[None, :]
    is_token = (t >= begin)[:, None]
    tl.store(grad_x_ptr + at, grads, mask=here & is_token)
    if state_ptr is None:
        grads = tl.where(begin < end, 0.0, grads)
    at = own + c[None, :] * KEPT + (t - begin + KEPT)[:, None]
    tl.store(grad_state_ptr + at, grads, mask=here & ~is_token)

    # Earlier requests write to earlier rows: each has at most inputs // BLOCK_T + 1 tiles.
    row = (begin + request * KEPT) // BLOCK_T + request + tile
    sums_ptr += row * (WIDTH + 1) * channels + c
    for w in tl.static_range(WIDTH):
        source = t + (w - (WIDTH - 1))
        value = inputs_at(x_ptr, state_ptr, source, c, begin, here & is_token, x_t, x_c, KEPT)
        tl.store(sums_ptr + w * channels, tl.sum(slope * value, 0), mask=in_c)
    tl.store(sums_ptr + WIDTH * channels, tl.sum(slope, 0), mask=in_c)
