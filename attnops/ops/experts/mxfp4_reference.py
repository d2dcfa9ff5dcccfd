"""MXFP4: numbers of four bits that share a scale by 32, the order in which attnops' kernels read
them, and back.

The format: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf. A
number is e2m1, a sign and a magnitude of VALUES; a scale is e8m0: byte s is the factor
`2**(s - 127)`.

A kernel's matrix units take tiles of 16 rows and 16 columns, whose numbers are spread over 32
lanes. `arranged` puts the 32 numbers that a lane has of a tile of 16 rows and 64 columns next to
each other, in eight halfwords, so that a lane reads its operand with one load:

    blocks  as int16 [E, N // 16, K // 64, 32, 8]: of lane 4 g + c, halfword 4 i + 2 h + p has row g
        + 8 h and columns
            32 i + 8 c + p + (0, 2, 4, 6)
    scales  as uint8 [E, N // 16, K // 64, 8, 4]: of row g, byte 2 i + h has that of row g + 8 h and
        columns 32 i to 32 i + 31

Both keep the shapes that they have in a checkpoint, `[E, N, K // 2]` and `[E, N, K // 32]`.

A halfword has four numbers, a sign and a magnitude each: bits (15, 8 to 6), (12, 5 to 3), (9, 2 to
0) and (14, 13 and 11 to 10). Shifted left by 0, 3 and 6 the first three are bfloat16 of `2**-126`
times the number. A stored scale is s + 126, the exponent of a bfloat16 that makes up for it, so
that s is at most 128.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.record import values
from attnops.ops.experts.reference import experts as plain

if TYPE_CHECKING:
    from attnops.ops.experts.mxfp4 import Mxfp4Experts

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, ROWS, COLUMNS = 32, 16, 64
MOST_SCALE = 128


def decoded(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., K]` of dtype, of uint8 blocks `[..., K // 2]`, even columns in the low halves of
    bytes, and uint8 scales `[..., K // 32]`."""
    # Filled on the device: a copy from the host cannot be captured.
    table = torch.stack(
        [blocks.new_full((), v, dtype=torch.float32) for v in (*VALUES, *(-v for v in VALUES))]
    )
    numbers = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()].unflatten(
        -1, (-1, GROUP)
    )
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """The nearest numbers of MXFP4 to `weight` `[..., K]`, in its dtype. The largest of a group is
    4 or 6 times its scale; K % 32 == 0."""
    numbers = weight.float().unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(numbers.abs().amax(-1, keepdim=True))[1] - 3
    magnitude = torch.ldexp(numbers.abs(), -exponent)
    steps = torch.tensor(VALUES, device=weight.device)
    nearest = steps[torch.bucketize(magnitude.contiguous(), (steps[1:] + steps[:-1]) / 2)]
    return torch.ldexp(nearest.copysign(numbers), exponent).flatten(-2).to(weight.dtype)


def encoded(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """(blocks, scales) that decode to `weight` `[..., K]` exactly, zeros with their signs; None if
    there are none."""
    if weight.shape[-1] % GROUP:
        return None
    numbers = weight.float().unflatten(-1, (-1, GROUP))
    largest = numbers.abs().amax(-1)
    # The largest of a group is 4 or 6 times its scale.
    exponent = torch.where(largest > 0, torch.frexp(largest)[1] - 3, 0)
    scales = (exponent + 127).clamp(0, 254)
    magnitude = torch.ldexp(numbers.abs(), 127 - scales[..., None]).contiguous()
    codes = torch.bucketize(
        magnitude, torch.tensor(VALUES, device=weight.device), out_int32=True
    ).clamp(max=7)
    codes = (codes + 8 * torch.signbit(numbers)).to(torch.uint8).flatten(-2)
    blocks, scales = codes[..., ::2] | (codes[..., 1::2] << 4), scales.to(torch.uint8)
    return (blocks, scales) if torch.equal(decoded(blocks, scales, weight.dtype), weight) else None


def arranged(blocks: Tensor, scales: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(blocks, scales) in the order of the module's docstring, of those `[E, N, K // 2]` and
    `[E, N, K // 32]`; N % 16 == K % 64 == 0.

    interleaved: rows 2 i and 2 i + 1 are a gate and its factor. They become rows g and g + 8 of a
    tile, which one lane has.
    """
    tiles = (*blocks.shape[:1], blocks.shape[1] // ROWS, *((8, 2) if interleaved else (2, 8)))
    g, h = (2, 3) if interleaved else (3, 2)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(
        *tiles, -1, 2, 4, 4, 2
    )  # E tile (g h) chunk i c number p
    codes = codes.permute(0, 1, 4, g, 6, 5, h, 8, 7).to(torch.int32)
    sign, size = (codes >> 3).unbind(-1), (codes & 7).unbind(-1)
    words = (sign[0] << 15) | (sign[1] << 12) | (sign[2] << 9) | (sign[3] << 14)
    words |= (
        (size[0] << 6) | (size[1] << 3) | size[2] | ((size[3] >> 2) << 13) | ((size[3] & 3) << 10)
    )
    moved = (scales + (MOST_SCALE - 2)).view(*tiles, -1, 2).permute(0, 1, 4, g, 5, h)
    return words.to(torch.int16).contiguous().view(torch.uint8).view(blocks.shape), moved.reshape(
        scales.shape
    )


def restored(words: Tensor, scales: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(blocks, scales), of which `arranged` made these."""
    experts, rows, groups = scales.shape
    w = words.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    places = (
        (15, (w >> 6) & 7),
        (12, (w >> 3) & 7),
        (9, w & 7),
        (14, ((w >> 11) & 4) | ((w >> 10) & 3)),
    )
    codes = torch.stack([(((w >> sign) & 1) << 3) | size for sign, size in places], -1).to(
        torch.uint8
    )
    codes = codes.view(
        experts, rows // ROWS, groups // 2, 8, 4, 2, 2, 2, 4
    )  # E tile chunk g c i h p number
    order = (0, 1, 3, 6, 2, 5, 4, 8, 7) if interleaved else (0, 1, 6, 3, 2, 5, 4, 8, 7)
    codes = codes.permute(order).reshape(*words.shape, 2)
    back = scales.reshape(experts, rows // ROWS, groups // 2, 8, 2, 2)  # E tile chunk g i h
    back = back.permute((0, 1, 3, 5, 2, 4) if interleaved else (0, 1, 5, 3, 2, 4)).reshape(
        scales.shape
    )
    return codes[..., 0] | (codes[..., 1] << 4), back - (MOST_SCALE - 2)


class Decoded(SimpleNamespace):
    """A call of `attnops.ops.mxfp4_experts` as one of `attnops.ops.experts`, whose arguments these
    are."""

    @classmethod
    def of(cls, call: Mxfp4Experts, gate_up: Tensor, down: Tensor) -> Any:
        """The call with these weights."""
        given = dict(zip(call.spec.names, values(call), strict=True))
        return cls(
            **given | {"gate_up": gate_up, "down": down, "activation": "silu", "interleaved": True}
        )


def decoded_call(call: Mxfp4Experts) -> Any:
    """The call with all weights in the dtype of `x`, which holds them exactly."""
    weights = (call.gate_up, call.gate_up_scales, True), (call.down, call.down_scales, False)
    return Decoded.of(call, *(decoded(*restored(*weight), call.x.dtype) for weight in weights))


def experts(call: Mxfp4Experts) -> None:
    """The reference of `attnops.ops.mxfp4_experts`."""
    plain(decoded_call(call))
