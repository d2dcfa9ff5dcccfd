"""The packed format of latents in pages: float8 with a scale a group of 128, the rotated key in
bfloat16.

    bytes 0 .. Dc                        the latent, float8_e4m3fn
    then 4 bytes a group of 128          its scale, float32, little-endian
    then 2 Dr bytes                      the rotated key, bfloat16, little-endian

656 bytes for DeepSeek's 512 + 64. The layout is FlashMLA's for DeepSeek-V3.2
(https://github.com/deepseek-ai/FlashMLA, README, "FP8 KV Cache"). Any float32 is a scale; `pack`
makes powers of two, so that a number read back needs no more bits than bfloat16
has: kernels multiply in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
"""Numbers of a latent that share a scale."""

TOP = 448.0
"""The largest float8_e4m3fn."""

LEAST = -13
"""The least exponent of a scale that `pack` makes: a group of zeros needs one too."""

_BIAS, _WIDTH, _INF, _NAN = 127, 23, 0x7F800000, 0x7FC00000  # of float32
_TOP_EXPONENT, _TOP_MANTISSA = 8, 0x600000  # 448 = 1.75 * 2^8


def packed_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of one token. latent_dim: a multiple of GROUP."""
    return latent_dim + latent_dim // GROUP * 4 + rope_dim * 2


def pack(latent: Tensor, k_pe: Tensor) -> Tensor:
    """`[T, Dc]`, `[T, Dr]` float -> `[T, packed_bytes]` uint8.

    A group's scale is the least power of two, 2^LEAST or more, that brings the group's largest
    magnitude to TOP or less. A NaN or an infinity makes NaN of its whole group. Plain torch ops
    without a change of width, which compilers fuse.
    """
    groups = latent.float().unflatten(-1, (-1, GROUP))
    # By the bits: log2 may be off by one on an edge, and so may a compiler's division. amax lets
    # NaN through.
    most = groups.abs().amax(-1).view(torch.int32)
    above = ((most & ((1 << _WIDTH) - 1)) > _TOP_MANTISSA).to(torch.int32)
    exponent = ((most >> _WIDTH) - _TOP_EXPONENT + above).clamp(min=_BIAS + LEAST)
    finite = (most >= 0) & (most < _INF)
    scale, inverse = (
        torch.where(finite, e << _WIDTH, _NAN) for e in (exponent, 2 * _BIAS - exponent)
    )
    stored = (
        (groups * inverse.view(torch.float32)[..., None]).clamp(-TOP, TOP).to(torch.float8_e4m3fn)
    )
    rope = k_pe.to(torch.bfloat16).view(torch.int16)
    return torch.cat([stored.view(torch.uint8).flatten(-2), _bytes(scale, 4), _bytes(rope, 2)], -1)


def unpack(
    packed: Tensor, latent_dim: int, rope_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[..., packed_bytes]` uint8 -> `[..., Dc + Dr]` of `dtype`, the latent multiplied by its
    scales in it."""
    parts = packed.split([latent_dim, latent_dim // GROUP * 4, rope_dim * 2], -1)
    # A view of wider numbers asks for alignment, which a slice of a row need not have.
    nope, scale, rope = (p.clone(memory_format=torch.contiguous_format) for p in parts)
    latent = (
        nope.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, GROUP))
        * scale.view(torch.float32).to(dtype)[..., None]
    )
    return torch.cat([latent.flatten(-2), rope.view(torch.bfloat16).to(dtype)], -1)


def _bytes(words: Tensor, count: int) -> Tensor:
    """`[T, n]` ints -> `[T, n * count]` uint8, the low byte first."""
    shift = torch.arange(count, device=words.device, dtype=torch.int32) * 8
    return ((words[..., None].to(torch.int32) >> shift) & 0xFF).to(torch.uint8).flatten(-2)
