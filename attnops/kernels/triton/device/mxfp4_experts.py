"""Device functions: the experts of a mixture for few tokens, with weights of MXFP4.

The weights are in the order of `attnops.ops.experts.mxfp4_reference.arranged`. A lane's 16
bytes are its operand of the matrix units: 32 values of rows r and r + 8 of a tile of 16 rows, and
of eight columns in each half of a chunk of 64. They go from memory through registers into the
product; neither they nor the input pass through shared memory. The warps of a program share the
columns of its rows. Weights are loaded a step ahead of their product.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.experts import choices, glu
from attnops.kernels.triton.device.memory import await_previous, floats

# Of two halfwords of four values each. $4: the halfwords; $5, $6: the scales of the lane, four
# bytes; $7, $8: where theirs is. {15, 8 7 6} of a halfword, the sign and the magnitude, is bfloat16
# of 2^-126 times the value, subnormals included. A stored scale is the exponent of a bfloat16, so
# that the product is exact. fma and not mul, which bfloat16 has from SM90 on.
VALUES = constexpr("""{
.reg .b32 f, a, b, c, d, e, z;
mov.b32 z, 0x80008000;
prmt.b32 f, $5, 0, $7;
shl.b32 f, f, 7;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
shl.b32 c, $4, 6;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 1;
and.b32 d, d, 0x80008000;
shr.u32 e, $4, 4;
lop3.b32 d, e, 0x00C000C0, d, 0xEA;
shr.u32 e, $4, 5;
lop3.b32 d, e, 0x01000100, d, 0xEA;
fma.rn.bf16x2 $0, a, f, z;
fma.rn.bf16x2 $1, b, f, z;
fma.rn.bf16x2 $2, c, f, z;
fma.rn.bf16x2 $3, d, f, z;
}""")


@triton.jit
def wide(bits, factor):
    return (bits << 16).to(tl.float32, bitcast=True) * factor


@triton.jit
def values(words, scales, LANES: constexpr, COMPUTE: constexpr):
    """Halfwords [LANES, 8] and the bytes of four scales [LANES] -> four tensors [LANES, 8] of
    COMPUTE."""
    byte = tl.arange(0, 8)[None, :] // 2
    if COMPUTE == tl.bfloat16:
        given = tl.broadcast_to(scales[:, None], (LANES, 8))
        place = tl.broadcast_to(0x4040 + byte * 0x0101, (LANES, 8))
        return tl.inline_asm_elementwise(
            VALUES,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, given, place],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w = words.to(tl.int32) & 0xFFFF
        factor = (((scales[:, None] >> (8 * byte)) & 255) << 23).to(tl.float32, bitcast=True)
        last = ((w << 1) & 0x8000) | ((w >> 4) & 0xC0) | ((w >> 5) & 0x100)
        return (
            wide(w & 0x81C0, factor),
            wide((w << 3) & 0x81C0, factor),
            wide((w << 6) & 0x81C0, factor),
            wide(last, factor),
        )


@triton.jit
def step(
    sums,
    x,
    words,
    scales,
    TURNS: constexpr,
    TILES: constexpr,
    WARPS: constexpr,
    BLOCK_T: constexpr,
    COMPUTE: constexpr,
):
    """`sums` [WARPS, TILES * 16, BLOCK_T] and the products of TURNS chunks a warp. Columns come in
    the order that lanes hold them."""
    a, b, c, d = values(words, scales, TURNS * TILES * WARPS * 32, COMPUTE)
    # turn, tile, warp, row, lane's columns, half of the chunk, row + 8, pair, then the bits of the
    # value's number
    w = tl.join(tl.join(a, b), tl.join(c, d)).reshape(TURNS, TILES, WARPS, 8, 4, 2, 2, 2, 2, 2)
    w = w.permute(2, 1, 6, 3, 0, 5, 9, 4, 8, 7).reshape(WARPS, TILES * 16, TURNS * 64)
    x = x.to(COMPUTE).reshape(BLOCK_T // 8, TURNS, 2, WARPS, 8, 4, 2, 2, 2)
    x = x.permute(3, 1, 2, 6, 5, 7, 8, 0, 4).reshape(WARPS, TURNS * 64, BLOCK_T)
    return tl.dot(w, x, sums, input_precision="ieee")


@triton.jit
def stored(w, s, begin, inside):
    """(words, scales) of a step's chunks from `begin` on. inside: the lanes whose chunk exists, or
    None for all."""
    at, scales = (w + begin * 256)[:, None] + tl.arange(0, 8)[None, :], s + begin * 8
    if inside is None:
        return tl.load(at), tl.load(scales)
    else:
        return tl.load(at, mask=inside[:, None], other=0), tl.load(scales, mask=inside, other=0)


@triton.jit
def product(
    w,
    s,
    x,
    COLUMNS: constexpr,
    TILES: constexpr,
    WARPS: constexpr,
    PARTS: constexpr,
    BLOCK_T: constexpr,
    TURNS: constexpr,
    COMPUTE: constexpr,
):
    """[WARPS, TILES * 16, BLOCK_T]: the products of each warp's columns. A step takes TURNS chunks
    of each of PARTS warps.

    w: pointers [TURNS * TILES * WARPS * 32], s: as many, as `weights` gives them; x: as `inputs`
    does.
    """
    CHUNKS: constexpr = COLUMNS // 64
    STEP: constexpr = PARTS * TURNS
    WHOLE: constexpr = CHUNKS // STEP * STEP
    eight = tl.arange(0, 8)[None, :]
    sums = tl.zeros([WARPS, TILES * 16, BLOCK_T], tl.float32)
    # The last step may be a part of one.
    i = tl.arange(0, TURNS * TILES * WARPS * 32)
    inside = WHOLE + i // (TILES * WARPS * 32) * PARTS + i // 32 % PARTS < CHUNKS
    words, scales = stored(w, s, 0, None if WHOLE > 0 else inside)
    # In a loop that loads the weights of its own product, ptxas gives all chunks the same
    # registers, so that a load waits for a product.
    for begin in tl.range(0, WHOLE - STEP, STEP, num_stages=1):
        given = tl.load((x + begin * 64)[:, None] + eight)
        following = stored(w, s, begin + STEP, None)
        sums = step(sums, given, words, scales, TURNS, TILES, WARPS, BLOCK_T, COMPUTE)
        words, scales = following
    if WHOLE > 0:
        given = tl.load((x + (WHOLE - STEP) * 64)[:, None] + eight)
        following = stored(w, s, WHOLE, inside) if WHOLE < CHUNKS else (words, scales)
        sums = step(sums, given, words, scales, TURNS, TILES, WARPS, BLOCK_T, COMPUTE)
        words, scales = following
    if WHOLE < CHUNKS:
        j = tl.arange(0, BLOCK_T * TURNS * WARPS * 8)
        inside_x = WHOLE + j // (64 * WARPS) % TURNS * PARTS + j // 32 % PARTS < CHUNKS
        given = tl.load((x + WHOLE * 64)[:, None] + eight, mask=inside_x[:, None], other=0.0)
        sums = step(sums, given, words, scales, TURNS, TILES, WARPS, BLOCK_T, COMPUTE)
    return sums


@triton.jit
def weights(
    w_ptr,
    s_ptr,
    e,
    rows,
    first,
    COLUMNS: constexpr,
    TILES: constexpr,
    WARPS: constexpr,
    PARTS: constexpr,
    TURNS: constexpr,
    SPREAD: constexpr,
):
    """Pointers to the first weights and scales of the tiles from `first` on, as `product` takes
    them.

    e: the expert, a number or one a lane. SPREAD: every PARTS warps have tiles of their own.
    """
    CHUNKS: constexpr = COLUMNS // 64
    i = tl.arange(0, TURNS * TILES * WARPS * 32)
    tile = first + i // (WARPS * 32) % TILES
    if SPREAD:
        tile += i // (PARTS * 32) % (WARPS // PARTS) * TILES
    at = tl.minimum(tile, rows // 16 - 1) * CHUNKS + i // 32 % PARTS
    turn = i // (TILES * WARPS * 32) * PARTS
    e = e.to(tl.int64) * (rows // 16) * CHUNKS
    words = w_ptr + e * 256 + at * 256 + i % 32 * 8
    scales = s_ptr + e * 8 + at * 8 + i % 32 // 4
    return words + turn * 256, scales + turn * 8


@triton.jit
def inputs(rows, WARPS: constexpr, PARTS: constexpr, TURNS: constexpr):
    """Pointers to the inputs, as `product` takes them. rows: pointers to the row of every lane, [8
    BLOCK_T TURNS WARPS]."""
    i = tl.arange(0, rows.shape[0])
    turn = i // (WARPS * 64) % TURNS * PARTS
    at = i // 32 % PARTS * 64 + i // (WARPS * 32) % 2 * 32 + i % 4 * 8
    return rows + at + turn * 64


@triton.jit
def merged(sums, TILES: constexpr, WARPS: constexpr, PARTS: constexpr):
    """[WARPS // PARTS * TILES * 16, T]: the parts' sums, and tiles in order."""
    if PARTS == 1:
        return sums.reshape(WARPS * TILES * 16, sums.shape[2])
    else:
        return tl.sum(sums.reshape(WARPS // PARTS, PARTS, TILES * 16, sums.shape[2]), 1).reshape(
            WARPS // PARTS * TILES * 16, sums.shape[2]
        )


@triton.jit
def activated(
    y,
    bias_ptr,
    e,
    n,
    outs,
    alpha,
    limit,
    offset,
    TILES: constexpr,
    ACT: constexpr,
    SHAPED: constexpr,
):
    """Results `n` [TILES * 8, T] of the `outs` of expert e, from products `y` [TILES * 16, T]; of a
    tile's rows, the gates come first."""
    gate, up = y.reshape(TILES, 2, 8, y.shape[1]).permute(0, 2, 3, 1).split()
    gate, up = gate.reshape(TILES * 8, y.shape[1]), up.reshape(TILES * 8, y.shape[1])
    if bias_ptr is not None:
        bias = bias_ptr + (e.to(tl.int64) * outs + n) * 2
        gate += floats(bias, n < outs)[:, None]
        up += floats(bias + 1, n < outs)[:, None]
    return glu(gate, up, alpha, limit, offset, ACT, SHAPED)


@triton.jit
def one_token_up(
    x_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    index_ptr,
    act_ptr,
    inner,
    experts,
    alpha,
    limit,
    offset,
    IN: constexpr,
    TILES: constexpr,
    WARPS: constexpr,
    PARTS: constexpr,
    TURNS: constexpr,
    ACT: constexpr,
    SHAPED: constexpr,
    COMPUTE: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(inner, WARPS // PARTS * TILES * 8), K. `act` `[K, inner]`; rows of choices that
    are no expert keep what they hold.

    OVERLAP, here and below: as in `device.linear.one_row`.
    """
    await_previous(OVERLAP)
    e = tl.load(index_ptr + tl.program_id(1))
    if (e >= 0) & (e < experts):
        ALL: constexpr = WARPS // PARTS * TILES
        first = tl.program_id(0) * ALL
        w, s = weights(w_ptr, s_ptr, e, 2 * inner, first, IN, TILES, WARPS, PARTS, TURNS, True)
        x = inputs(x_ptr + tl.arange(0, 64 * TURNS * WARPS) * 0, WARPS, PARTS, TURNS)
        y = merged(
            product(w, s, x, IN, TILES, WARPS, PARTS, 8, TURNS, COMPUTE), TILES, WARPS, PARTS
        )
        n = first * 8 + tl.arange(0, ALL * 8)
        act = activated(y, bias_ptr, e, n, inner, alpha, limit, offset, ALL, ACT, SHAPED)
        # The columns are the token eight times.
        t = tl.arange(0, 8)[None, :]
        tl.store(
            act_ptr + tl.program_id(1) * inner + n[:, None] + t,
            act,
            mask=(n < inner)[:, None] & (t == 0),
        )


@triton.jit
def one_token_down(
    act_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    outs,
    experts,
    out_n,
    IN: constexpr,
    K: constexpr,
    KP: constexpr,
    TILES: constexpr,
    PARTS: constexpr,
    TURNS: constexpr,
    COMPUTE: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(outs, TILES * 16). PARTS warps of each of KP experts; a choice that is no expert
    reads the first one, and counts 0."""
    await_previous(OVERLAP)
    WARPS: constexpr = KP * PARTS
    place = tl.arange(0, TURNS * TILES * WARPS * 32) // 32 % WARPS // PARTS
    e = tl.load(index_ptr + place, mask=place < K, other=0)
    e = tl.where((e >= 0) & (e < experts), e, 0)
    first = tl.program_id(0) * TILES
    w, s = weights(w_ptr, s_ptr, e, outs, first, IN, TILES, WARPS, PARTS, TURNS, False)
    place = tl.arange(0, 64 * TURNS * WARPS) // 32 % WARPS // PARTS
    x = inputs(act_ptr + tl.minimum(place, K - 1) * IN, WARPS, PARTS, TURNS)
    y = product(w, s, x, IN, TILES, WARPS, PARTS, 8, TURNS, COMPUTE)
    place = tl.arange(0, WARPS) // PARTS
    e = tl.load(index_ptr + place, mask=place < K, other=-1)
    here = (e >= 0) & (e < experts)
    n = first * 16 + tl.arange(0, TILES * 16)
    if bias_ptr is not None:
        at = bias_ptr + e.to(tl.int64)[:, None] * outs + n[None, :]
        once = here & (tl.arange(0, WARPS) % PARTS == 0)
        y += floats(at, once[:, None] & (n < outs)[None, :])[:, :, None]
    weight = floats(weights_ptr + place, here)
    # Rows that no launch wrote may hold NaN.
    total = tl.sum(tl.where(here[:, None, None], y * weight[:, None, None], 0.0), 0)
    t = tl.arange(0, 8)[None, :]
    tl.store(
        out_ptr + (n.to(tl.int64) * out_n)[:, None] + t, total, mask=(n < outs)[:, None] & (t == 0)
    )


@triton.jit(do_not_specialize=["tokens", "by_expert"])
def few_tokens(
    x_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    tokens,
    by_expert,
    outs,
    experts,
    alpha,
    limit,
    offset,
    x_t,
    IN: constexpr,
    K: constexpr,
    KP: constexpr,
    BLOCK_T: constexpr,
    MATES: constexpr,
    TILES: constexpr,
    WARPS: constexpr,
    PARTS: constexpr,
    TURNS: constexpr,
    UP: constexpr,
    ACT: constexpr,
    SHAPED: constexpr,
    COMPUTE: constexpr,
    OVERLAP: constexpr,
):
    """Grid: blocks of tiles (WARPS // PARTS * TILES each), experts or choices of a block of tokens,
    cdiv(tokens, BLOCK_T).

    As `device.experts.few_tokens`. Of the block's tokens, those that chose the program's expert are
    multiplied, MATES at once.
    """
    ALL: constexpr = WARPS // PARTS * TILES
    ROWS: constexpr = 8 if UP else 16
    await_previous(OVERLAP)
    t, at, given, index, e, chosen, own = choices(
        index_ptr, tokens, by_expert, experts, K, KP, BLOCK_T
    )
    here = chosen < KP
    number = tl.cumsum(here.to(tl.int32), 0)  # of a token among its mates, from 1 on
    count = tl.max(number, 0)
    if own:
        tile = tl.program_id(0) * ALL
        n = tile * ROWS + tl.arange(0, ALL * ROWS)
        real = n < outs
        w, s = weights(
            w_ptr, s_ptr, e, 2 * outs if UP else outs, tile, IN, TILES, WARPS, PARTS, TURNS, True
        )
        result = t * K + chosen
        for begin in tl.range(0, count, MATES, num_stages=1):
            mate = begin + tl.arange(0, MATES)
            mine = here[:, None] & (number[:, None] == 1 + mate[None, :])
            row = tl.sum(tl.where(mine, result[:, None], 0), 0).to(tl.int64)  # 0 past the last mate
            i = tl.arange(0, MATES * TURNS * WARPS * 8)
            lane = tl.gather(row, i // (64 * TURNS * WARPS) * 8 + i % 32 // 4, 0)
            x = inputs(x_ptr + (lane // K * x_t if UP else lane * IN), WARPS, PARTS, TURNS)
            y = merged(
                product(w, s, x, IN, TILES, WARPS, PARTS, MATES, TURNS, COMPUTE),
                TILES,
                WARPS,
                PARTS,
            )
            if UP:
                y = activated(y, bias_ptr, e, n, outs, alpha, limit, offset, ALL, ACT, SHAPED)
            else:
                if bias_ptr is not None:
                    y += floats(bias_ptr + e.to(tl.int64) * outs + n, real)[:, None]
                every = floats(weights_ptr + at, given & (index == e))
                y *= tl.sum(tl.where(mine, tl.sum(every, 1)[:, None], 0.0), 0)[None, :]
            out = out_ptr + row[None, :] * outs + n[:, None]
            tl.store(out, y, mask=(mate < count)[None, :] & real[:, None])


@triton.jit
def decode(
    w_ptr,
    s_ptr,
    out_ptr,
    COLUMNS: constexpr,
    PAIRS: constexpr,
    BLOCK: constexpr,
    COMPUTE: constexpr,
):
    """Grid: tiles of all experts, cdiv(COLUMNS, 64 * BLOCK). All weights, rows and columns in
    order."""
    CHUNKS: constexpr = COLUMNS // 64
    tile, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    i = tl.arange(0, BLOCK * 32)
    inside = first + i // 32 < CHUNKS
    at = tile * CHUNKS + first + i // 32
    words = tl.load(
        w_ptr + (at * 256 + i % 32 * 8)[:, None] + tl.arange(0, 8)[None, :],
        mask=inside[:, None],
        other=0,
    )
    scales = tl.load(s_ptr + at * 8 + i % 32 // 4, mask=inside, other=0)
    a, b, c, d = values(words, scales, BLOCK * 32, COMPUTE)
    w = tl.join(tl.join(a, b), tl.join(c, d)).reshape(
        BLOCK, 8, 4, 2, 2, 2, 2, 2
    )  # chunk, row, lane's columns, half, row + 8, pair, number
    if PAIRS:
        w = w.permute(1, 4, 0, 3, 2, 7, 6, 5).reshape(16, BLOCK * 64)
    else:
        w = w.permute(4, 1, 0, 3, 2, 7, 6, 5).reshape(16, BLOCK * 64)
    column = first * 64 + tl.arange(0, BLOCK * 64)
    out = out_ptr + (tile * 16 + tl.arange(0, 16))[:, None] * COLUMNS + column[None, :]
    tl.store(out, w, mask=(column < COLUMNS)[None, :])
