"""Device functions: float32 numbers rounded to the dtype of pages, with the bits of
`attnops.ops.metadata.reference`.

Numbers saturate, and round to the nearest, ties to even. The functions return bits, because pages
are written as integers. HARDWARE: the GPU rounds to float8 itself (from SM89 on). Elsewhere, and in
the interpreter, which truncates, integers do it.
"""

import triton
import triton.language as tl
from triton.language import constexpr

INF_BITS = constexpr(0x7F800000)
EVEN = constexpr(12582912.0)
"""1.5 * 2^23: a float32 within 2^22 of 0 loses its fraction when this is added to it."""


@triton.jit
def saturated(x, TOP: constexpr):
    """Between -TOP and TOP; NaN stays."""
    x = tl.where(x > TOP, TOP, x)
    return tl.where(x < -TOP, -TOP, x)


@triton.jit
def float8_bits(x, MANTISSA: constexpr, BIAS: constexpr):
    """uint8 bits of a saturated float32 as a float8 of MANTISSA bits."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    SHIFT: constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - (
        (127 - BIAS) << MANTISSA
    )
    # Subnormal numbers have one step size, that of a float32 that is large enough.
    LARGE: constexpr = (127 + 1 - BIAS + 23 - MANTISSA) << 23
    large = tl.full(x.shape, LARGE, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + large).to(tl.int32, bitcast=True) - LARGE
    code = tl.where(size < ((127 - BIAS + 1) << 23), small, normal)
    code = tl.where(size > INF_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def bfloat16_bits(x):
    """int16 bits of float32 as bfloat16. An infinity stays, a NaN becomes quiet."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > INF_BITS, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def stored_bits(x, AS: constexpr, HARDWARE: constexpr):
    """float32 `x` as the bits of dtype AS: "float8_e4m3fn", "float8_e5m2", "int8", "bfloat16",
    "float16" or "float32"."""
    if AS == "int8":
        # Saturation comes first, because EVEN wants numbers near 0. It gives whole numbers, so the
        # order makes no difference.
        return ((saturated(x, 127.0) + EVEN) - EVEN).to(tl.int8)
    elif AS == "float8_e4m3fn":
        if HARDWARE:
            return saturated(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return float8_bits(saturated(x, 448.0), 3, 7)
    elif AS == "float8_e5m2":
        if HARDWARE:
            return saturated(x, 57344.0).to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return float8_bits(saturated(x, 57344.0), 2, 15)
    elif AS == "bfloat16":
        return bfloat16_bits(x)
    elif AS == "float16":
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)
