"""Device function: rows of tokens into slots of pages, two sets of rows in one launch: keys and values, or the two parts of a latent."""

import triton
import triton.language as tl

from attnops.kernels.triton.device.quantise import stored_bits


@triton.jit
def place(slot, stride_p, stride_n, PAGE: tl.constexpr):
    """Offsets of slots; int64."""
    return (slot // PAGE) * stride_p + (slot % PAGE) * stride_n


@triton.jit
def store_part(
    token, here, slot, tile, rows_ptr, pages_ptr, scale_ptr, t, h, d, p, n, ph, pd, scale_h,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, AS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of HEADS * D of each token."""
    column = tile * BLOCK + tl.arange(0, BLOCK)
    # Strides may be as wide as a pool of all layers.
    head = (column // D).to(tl.int64)
    dim = (column % D).to(tl.int64)
    # What is read does not wait for the slot: a skipped token's row may hold anything, and is not stored.
    read, write = here[:, None], (slot >= 0)[:, None]
    if HEADS * D % BLOCK != 0:
        inside = (column < HEADS * D)[None, :]
        read, write = read & inside, write & inside
    x = tl.load(rows_ptr + (token * t)[:, None] + (head * h + dim * d)[None, :], mask=read, other=0)
    if AS != "same":
        x = x.to(tl.float32)
        if scale_ptr is not None:
            # As IEEE 754 divides: the usual quotient may be off by one, and with it what is stored.
            x = tl.div_rn(x, tl.broadcast_to(tl.load(scale_ptr + head * scale_h, mask=column < HEADS * D, other=1.0)[None, :], x.shape))
        x = stored_bits(x, AS, HARDWARE)
    tl.store(pages_ptr + place(slot, p, n, PAGE)[:, None] + (head * ph + dim * pd)[None, :], x, mask=write)


@triton.jit(do_not_specialize=["tokens", "total"])
def store(
    slots_ptr, slots_t, tokens, total,
    a_ptr, a_pages_ptr, a_scale_ptr, a_t, a_h, a_d, a_p, a_n, a_ph, a_pd, a_scale_h,
    b_ptr, b_pages_ptr, b_scale_ptr, b_t, b_h, b_d, b_p, b_n, b_ph, b_pd, b_scale_h,
    PAGE: tl.constexpr, HEADS: tl.constexpr, A_D: tl.constexpr, B_D: tl.constexpr, BLOCK_T: tl.constexpr,
    A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_AS: tl.constexpr, B_AS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(tokens, BLOCK_T), tiles of a row of a + tiles of a row of b).

    a, b: `[tokens, HEADS, D]` by their strides; their pages `[P, PAGE, HEADS, D]`, as integers unless AS is "same". Slots outside
    of `[0, total)` are skipped.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < tokens
    slot = tl.load(slots_ptr + token * slots_t, mask=here, other=-1).to(tl.int64)
    slot = tl.where(slot < total, slot, -1)
    A_TILES: tl.constexpr = (HEADS * A_D + A_BLOCK - 1) // A_BLOCK
    tile = tl.program_id(1)
    if tile < A_TILES:
        store_part(
            token, here, slot, tile, a_ptr, a_pages_ptr, a_scale_ptr, a_t, a_h, a_d, a_p, a_n, a_ph, a_pd, a_scale_h,
            PAGE, HEADS, A_D, A_BLOCK, A_AS, HARDWARE,
        )  # fmt: skip
    else:
        store_part(
            token, here, slot, tile - A_TILES, b_ptr, b_pages_ptr, b_scale_ptr, b_t, b_h, b_d, b_p, b_n, b_ph, b_pd, b_scale_h,
            PAGE, HEADS, B_D, B_BLOCK, B_AS, HARDWARE,
        )  # fmt: skip
