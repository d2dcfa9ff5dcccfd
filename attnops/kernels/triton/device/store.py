"""Device functions: rows of tokens into slots of pages: keys and values, or the two parts of a
latent, plain or in packed pages."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.quantise import bfloat16_bits, stored_bits


@triton.jit
def place(slot, stride_p, stride_n, PAGE: constexpr):
    """int64 offsets of slots."""
    return (slot // PAGE) * stride_p + (slot % PAGE) * stride_n


@triton.jit
def slots_at(slots_ptr, entry, stride, entries, total):
    """int64 slots of entries; -1 for numbers that are no slot."""
    slot = tl.load(slots_ptr + entry.to(tl.int64) * stride, mask=entry < entries, other=-1).to(
        tl.int64
    )
    return tl.where(slot < total, slot, -1)


@triton.jit
def store_part(
    token,
    here,
    slot,
    tile,
    rows_ptr,
    pages_ptr,
    scale_ptr,
    t,
    h,
    d,
    p,
    n,
    ph,
    pd,
    scale_h,
    PAGE: constexpr,
    HEADS: constexpr,
    D: constexpr,
    BLOCK: constexpr,
    AS: constexpr,
    HARDWARE: constexpr,
):
    """BLOCK columns of HEADS * D of each token."""
    column = tile * BLOCK + tl.arange(0, BLOCK)
    # Strides may be as wide as a pool of all layers.
    head = (column // D).to(tl.int64)
    dim = (column % D).to(tl.int64)
    # The load does not wait for the slot: only the store skips tokens without one.
    read, write = here[:, None], (slot >= 0)[:, None]
    if HEADS * D % BLOCK != 0:
        inside = (column < HEADS * D)[None, :]
        read, write = read & inside, write & inside
    x = tl.load(rows_ptr + (token * t)[:, None] + (head * h + dim * d)[None, :], mask=read, other=0)
    if AS != "same":
        x = x.to(tl.float32)
        if scale_ptr is not None:
            # IEEE 754 division: the approximate quotient may be off by one ulp, which changes the
            # stored number.
            x = tl.div_rn(
                x,
                tl.broadcast_to(
                    tl.load(scale_ptr + head * scale_h, mask=column < HEADS * D, other=1.0)[
                        None, :
                    ],
                    x.shape,
                ),
            )
        x = stored_bits(x, AS, HARDWARE)
    tl.store(
        pages_ptr + place(slot, p, n, PAGE)[:, None] + (head * ph + dim * pd)[None, :],
        x,
        mask=write,
    )


@triton.jit(do_not_specialize=["tokens", "total"])
def store(
    slots_ptr,
    slots_t,
    tokens,
    total,
    a_ptr,
    a_pages_ptr,
    a_scale_ptr,
    a_t,
    a_h,
    a_d,
    a_p,
    a_n,
    a_ph,
    a_pd,
    a_scale_h,
    b_ptr,
    b_pages_ptr,
    b_scale_ptr,
    b_t,
    b_h,
    b_d,
    b_p,
    b_n,
    b_ph,
    b_pd,
    b_scale_h,
    PAGE: constexpr,
    HEADS: constexpr,
    A_D: constexpr,
    B_D: constexpr,
    BLOCK_T: constexpr,
    A_BLOCK: constexpr,
    B_BLOCK: constexpr,
    A_AS: constexpr,
    B_AS: constexpr,
    HARDWARE: constexpr,
):
    """Grid: (cdiv(tokens, BLOCK_T), tiles of a row of a + tiles of a row of b).

    a, b: `[tokens, HEADS, D]` by their strides; their pages `[P, PAGE, HEADS, D]`, as integers
    unless AS is "same". Slots outside of `[0, total)` are skipped.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < tokens
    slot = slots_at(slots_ptr, token, slots_t, tokens, total)
    A_TILES: constexpr = (HEADS * A_D + A_BLOCK - 1) // A_BLOCK
    tile = tl.program_id(1)
    if tile < A_TILES:
        store_part(
            token,
            here,
            slot,
            tile,
            a_ptr,
            a_pages_ptr,
            a_scale_ptr,
            a_t,
            a_h,
            a_d,
            a_p,
            a_n,
            a_ph,
            a_pd,
            a_scale_h,
            PAGE,
            HEADS,
            A_D,
            A_BLOCK,
            A_AS,
            HARDWARE,
        )
    else:
        store_part(
            token,
            here,
            slot,
            tile - A_TILES,
            b_ptr,
            b_pages_ptr,
            b_scale_ptr,
            b_t,
            b_h,
            b_d,
            b_p,
            b_n,
            b_ph,
            b_pd,
            b_scale_h,
            PAGE,
            HEADS,
            B_D,
            B_BLOCK,
            B_AS,
            HARDWARE,
        )


# Packed pages of latents. `attnops.ops.sparse.packed_format` describes them.


@triton.jit
def pack_group(
    row_ptr,
    real,
    here,
    latent_ptr,
    token_at,
    group,
    latent_d,
    d,
    DC: constexpr,
    GROUP: constexpr,
    LEAST: constexpr,
    HARDWARE: constexpr,
):
    """Store the numbers of a group, and its scale."""
    dims = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)
    x = tl.load(latent_ptr + token_at + (dims * latent_d)[None, :], mask=here, other=0).to(
        tl.float32
    )
    # The exponent comes from the bits, because log2 may be off by one at a power of two. The bits
    # of a NaN exceed those of any number.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    above = ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum((most >> 23) - 8 + above, 127 + LEAST)
    finite = most < 0x7F800000
    scale = tl.where(finite, exponent << 23, 0x7FC00000)
    inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(
        row_ptr + (dims * d)[None, :],
        stored_bits(x * inverse[:, None], "float8_e4m3fn", HARDWARE),
        mask=real,
    )
    byte = tl.arange(0, 4)
    word = (scale[:, None] >> (byte * 8)[None, :]) & 0xFF
    tl.store(
        row_ptr + ((DC + group * 4 + byte).to(tl.int64) * d)[None, :], word.to(tl.uint8), mask=real
    )


@triton.jit
def pack_rope(
    row_ptr,
    real,
    here,
    rope_ptr,
    token_at,
    rope_d,
    d,
    BEGIN: constexpr,
    DR: constexpr,
    BLOCK: constexpr,
):
    """Store the rotated key byte by byte, because a row may begin at an odd address."""
    at = tl.arange(0, BLOCK)
    inside = (at < 2 * DR)[None, :]
    x = tl.load(
        rope_ptr + token_at + ((at // 2).to(tl.int64) * rope_d)[None, :],
        mask=here & inside,
        other=0,
    )
    bits = bfloat16_bits(x.to(tl.float32)).to(tl.int32)
    byte = (bits >> ((at % 2) * 8)[None, :]) & 0xFF
    tl.store(
        row_ptr + ((BEGIN + at).to(tl.int64) * d)[None, :], byte.to(tl.uint8), mask=real & inside
    )


@triton.jit(do_not_specialize=["tokens", "total"])
def pack(
    slots_ptr,
    slots_t,
    tokens,
    total,
    latent_ptr,
    rope_ptr,
    pages_ptr,
    latent_t,
    latent_d,
    rope_t,
    rope_d,
    p,
    n,
    d,
    PAGE: constexpr,
    DC: constexpr,
    DR: constexpr,
    BLOCK_T: constexpr,
    BLOCK_R: constexpr,
    GROUP: constexpr,
    LEAST: constexpr,
    HARDWARE: constexpr,
):
    """Grid: (cdiv(tokens, BLOCK_T), DC // GROUP + 1): a group of the latent a program, and the
    rotated key. pages: uint8."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = (token < tokens)[:, None]
    slot = slots_at(slots_ptr, token, slots_t, tokens, total)
    real = (slot >= 0)[:, None]
    row_ptr = pages_ptr + place(slot, p, n, PAGE)[:, None]
    GROUPS: constexpr = DC // GROUP
    group = tl.program_id(1)
    if group < GROUPS:
        pack_group(
            row_ptr,
            real,
            here,
            latent_ptr,
            (token * latent_t)[:, None],
            group,
            latent_d,
            d,
            DC,
            GROUP,
            LEAST,
            HARDWARE,
        )
    else:
        pack_rope(
            row_ptr,
            real,
            here,
            rope_ptr,
            (token * rope_t)[:, None],
            rope_d,
            d,
            DC + GROUPS * 4,
            DR,
            BLOCK_R,
        )
