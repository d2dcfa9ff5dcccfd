"""Device functions: latents into slots of packed pages; the format is told in `attnops.reference.latent_format`."""

import triton
import triton.language as tl

from attnops.kernels.triton.device.quantise import bfloat16_bits, stored_bits
from attnops.kernels.triton.device.store import place


@triton.jit
def pack_group(
    row_ptr, real, here, latent_ptr, token_at, group, latent_d, d,
    DC: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The numbers of a group, and its scale."""
    dims = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(latent_ptr + token_at + (dims * latent_d)[None, :], mask=here, other=0).to(tl.float32)
    # By the bits: log2 may be off by one on an edge. The bits of a NaN are larger than any number's.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    above = ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum((most >> 23) - 8 + above, 127 + LEAST)
    finite = most < 0x7F800000
    scale = tl.where(finite, exponent << 23, 0x7FC00000)
    inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(row_ptr + (dims * d)[None, :], stored_bits(x * inverse[:, None], "float8_e4m3fn", HARDWARE), mask=real)
    byte = tl.arange(0, 4)
    word = (scale[:, None] >> (byte * 8)[None, :]) & 0xFF
    tl.store(row_ptr + ((DC + group * 4 + byte) * d)[None, :], word.to(tl.uint8), mask=real)


@triton.jit
def pack_rope(row_ptr, real, here, rope_ptr, token_at, rope_d, d, BEGIN: tl.constexpr, DR: tl.constexpr, BLOCK: tl.constexpr):
    """The rotated key, byte by byte: a row need not begin where a number of two bytes may."""
    at = tl.arange(0, BLOCK)
    inside = (at < 2 * DR)[None, :]
    x = tl.load(rope_ptr + token_at + ((at // 2) * rope_d)[None, :], mask=here & inside, other=0)
    bits = bfloat16_bits(x.to(tl.float32)).to(tl.int32)
    byte = (bits >> ((at % 2) * 8)[None, :]) & 0xFF
    tl.store(row_ptr + ((BEGIN + at) * d)[None, :], byte.to(tl.uint8), mask=real & inside)


@triton.jit(do_not_specialize=["tokens", "total"])
def pack(
    slots_ptr, slots_t, tokens, total, latent_ptr, rope_ptr, pages_ptr, latent_t, latent_d, rope_t, rope_d, p, n, d,
    PAGE: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(tokens, BLOCK_T), DC // GROUP + 1): a group of the latent a program, and the rotated key. pages: uint8."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = (token < tokens)[:, None]
    slot = tl.load(slots_ptr + token * slots_t, mask=token < tokens, other=-1).to(tl.int64)
    real = ((slot >= 0) & (slot < total))[:, None]
    row_ptr = pages_ptr + place(slot, p, n, PAGE)[:, None]
    GROUPS: tl.constexpr = DC // GROUP
    group = tl.program_id(1)
    if group < GROUPS:
        pack_group(row_ptr, real, here, latent_ptr, (token * latent_t)[:, None], group, latent_d, d, DC, GROUP, LEAST, HARDWARE)
    else:
        pack_rope(row_ptr, real, here, rope_ptr, (token * rope_t)[:, None], rope_d, d, DC + GROUPS * 4, DR, BLOCK_R)
