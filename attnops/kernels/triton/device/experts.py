"""Device functions: the experts of a mixture for few tokens. Only the weights of experts that a
token chose are read.

One token takes two launches: its experts' gates and factors, then the rows of `down`, each program
with all of the token's experts. More take three: programs of an expert and a block of its rows,
twice, then the sum. Such a program finds its tokens in the table of choices; tokens that did not
choose its expert are columns of zeros.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.linear import gated
from attnops.kernels.triton.device.memory import await_previous, floats, streamed
from attnops.kernels.triton.device.quantise import saturated


@triton.jit
def glu(gate, up, alpha, limit, offset, ACT: constexpr, SHAPED: constexpr):
    """`act(gate) * (up + offset)`, in float32. SHAPED: alpha, limit and offset are given; ACT is a
    name otherwise."""
    if SHAPED:
        if limit > 0.0:
            # As torch: NaN stays NaN.
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up += offset
        if ACT == "silu":
            return gate * tl.sigmoid(gate * alpha) * up
    return gated(gate, up, ACT)


@triton.jit
def ranged(x, DTYPE: constexpr):
    """float32 `x` within the range of DTYPE, where that is float16: see
    `attnops.ops.experts.reference`."""
    if DTYPE == tl.float16:
        return saturated(x, 65504.0)
    else:
        return x


@triton.jit
def halves(y, BLOCK_N: constexpr):
    """(even, odd) rows of `[2 BLOCK_N, ...]`."""
    if len(y.shape) == 1:
        return tl.split(tl.reshape(y, [BLOCK_N, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(y, [BLOCK_N, 2, y.shape[1]]), [0, 2, 1]))


@triton.jit
def one_token_up(
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    act_ptr,
    inner,
    experts,
    alpha,
    limit,
    offset,
    w_e,
    w_n,
    w_k,
    IN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    ACT: constexpr,
    SHAPED: constexpr,
    INTERLEAVED: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(inner, BLOCK_N), K. `act` `[K, inner]`; rows of choices that are no expert keep
    what they hold.

    OVERLAP, here and below: as in `device.linear.one_row`.
    """
    await_previous(OVERLAP)
    e = tl.load(index_ptr + tl.program_id(1)).to(tl.int64)
    if (e >= 0) & (e < experts):
        ROWS: constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        real = n < (2 * inner if INTERLEAVED else inner)
        rows = w_ptr + e * w_e + n.to(tl.int64) * w_n
        sums = tl.zeros([ROWS, BLOCK_K], tl.float32)
        up_sums = sums
        for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
            k = begin + tl.arange(0, BLOCK_K)
            x = floats(x_ptr + k, k < IN)
            at = rows[:, None] + k.to(tl.int64)[None, :] * w_k
            inside = real[:, None] & (k < IN)[None, :]
            sums += streamed(at, inside).to(tl.float32) * x[None, :]
            if not INTERLEAVED:
                up = streamed(at + tl.cast(inner, tl.int64) * w_n, inside)
                up_sums += up.to(tl.float32) * x[None, :]
        y = tl.sum(sums, 1)
        up = tl.sum(up_sums, 1)
        if bias_ptr is not None:
            bias = bias_ptr + e * inner * 2 + n
            y += floats(bias, real)
            if not INTERLEAVED:
                up += floats(bias + inner, real)
        if INTERLEAVED:
            y, up = halves(y, BLOCK_N)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        DTYPE: constexpr = act_ptr.dtype.element_ty
        act = ranged(
            glu(ranged(y, DTYPE), ranged(up, DTYPE), alpha, limit, offset, ACT, SHAPED), DTYPE
        )
        tl.store(act_ptr + tl.program_id(1) * inner + n, act, mask=n < inner)


@triton.jit
def one_token_down(
    act_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    outs,
    experts,
    w_e,
    w_n,
    w_k,
    out_n,
    IN: constexpr,
    K: constexpr,
    KP: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(outs, BLOCK_N). Every program reads its rows of all K experts."""
    await_previous(OVERLAP)
    place = tl.arange(0, KP)
    e = tl.load(index_ptr + place, mask=place < K, other=-1).to(tl.int64)
    here = (e >= 0) & (e < experts)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = here[:, None] & (n < outs)[None, :]
    rows = w_ptr + e[:, None] * w_e + n.to(tl.int64)[None, :] * w_n
    sums = tl.zeros([KP, BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        x = tl.load(
            act_ptr + place[:, None] * IN + k[None, :],
            mask=here[:, None] & (k < IN)[None, :],
            other=0.0,
        )
        w = streamed(
            rows[:, :, None] + k.to(tl.int64)[None, None, :] * w_k,
            real[:, :, None] & (k < IN)[None, None, :],
        )
        sums += w.to(tl.float32) * x.to(tl.float32)[:, None, :]
    y = tl.sum(sums, 2)
    if bias_ptr is not None:
        y += floats(bias_ptr + e[:, None] * outs + n[None, :], real)
    y = ranged(y, act_ptr.dtype.element_ty)
    weight = floats(weights_ptr + place, here)
    total = tl.sum(y * weight[:, None], 0)
    tl.store(out_ptr + n.to(tl.int64) * out_n, total, mask=n < outs)


@triton.jit
def choices(index_ptr, tokens, by_expert, experts, K: constexpr, KP: constexpr, BLOCK_T: constexpr):
    """The part of the table of choices that a program of an expert and a block of tokens reads.

    Returns the tokens `[BLOCK_T]`; of their choices `[BLOCK_T, KP]` the places in the table, which
    of them there are, and the experts; the program's expert; the first place of it among each
    token's, KP for none; and whether the expert is this program's to take.
    """
    first = tl.program_id(2) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    place = tl.arange(0, KP)
    at = t[:, None] * K + place[None, :]
    given = (t < tokens)[:, None] & (place < K)[None, :]
    index = tl.load(index_ptr + at, mask=given, other=-1)
    slot = first * K + tl.program_id(1)
    e = tl.load(index_ptr + slot, mask=(by_expert == 0) & (slot < tokens * K), other=-1)
    e = tl.where(by_expert != 0, tl.program_id(1).to(e.dtype), e)
    earlier = tl.sum(
        tl.sum(((index == e) & (at < slot)).to(tl.int32), 1), 0
    )  # another program's, unless programs are experts
    chosen = tl.min(tl.where(index == e, place[None, :], KP), 1)
    return (
        t,
        at,
        given,
        index,
        e,
        chosen,
        (e >= 0) & (e < experts) & ((earlier == 0) | (by_expert != 0)),
    )


@triton.jit
def described_tile(w_ptr, e, row, column, ROWS: constexpr, COLUMNS: constexpr, ALONG_N: constexpr):
    """`[ROWS, COLUMNS]` of an expert's weight, by its descriptor. ALONG_N: as in `few_tokens`."""
    if ALONG_N:
        return tl.trans(tl.reshape(w_ptr.load([e.to(tl.int32), column, row]), [COLUMNS, ROWS]))
    else:
        return tl.reshape(w_ptr.load([e.to(tl.int32), row, column]), [ROWS, COLUMNS])


@triton.jit(do_not_specialize=["tokens", "by_expert"])
def few_tokens(
    x_ptr,
    w_ptr,
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
    w_e,
    w_n,
    w_k,
    IN: constexpr,
    K: constexpr,
    KP: constexpr,
    BLOCK_T: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    UP: constexpr,
    ACT: constexpr,
    SHAPED: constexpr,
    INTERLEAVED: constexpr,
    COMPUTE: constexpr,
    DESCRIBED: constexpr,
    ALONG_N: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(outs, BLOCK_N), experts or choices of a block of tokens, cdiv(tokens, BLOCK_T).

    Row `t * K + place` of `out` `[T * K, outs]` is token t's, at the first place of the expert
    among the token's. UP: the input is `x` `[T, IN]`, and the result act(gate) * up. Otherwise the
    input is that result, and the result is float32 and has the token's weight.
    by_expert: programs of the grid's second axis are experts, not choices. DESCRIBED: `w_ptr` is a
    descriptor, by which the tensor memory accelerator reads tiles; it reads 0 past the ends.
    ALONG_N: of the weight's last two dims, rows are next to each other.
    """
    await_previous(OVERLAP)
    t, at, given, index, e, chosen, mine = choices(
        index_ptr, tokens, by_expert, experts, K, KP, BLOCK_T
    )
    here = chosen < KP
    if mine & (tl.min(chosen, 0) < KP):
        ROWS: constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
        start = tl.program_id(0) * ROWS
        n = start + tl.arange(0, ROWS)
        real = n < (2 * outs if INTERLEAVED else outs)
        result = (t * K + chosen).to(tl.int64)
        x_rows = x_ptr + (t.to(tl.int64) * x_t if UP else result * IN)
        if not DESCRIBED:
            rows = w_ptr + e.to(tl.int64) * w_e + n.to(tl.int64) * w_n
            ups = rows + tl.cast(outs, tl.int64) * w_n
        y = tl.zeros([ROWS, BLOCK_T], tl.float32)
        up = y
        for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_rows[:, None] + k[None, :], mask=here[:, None] & (k < IN)[None, :], other=0.0
            )
            columns = tl.trans(x.to(COMPUTE))
            if DESCRIBED:
                w = described_tile(w_ptr, e, start, begin, ROWS, BLOCK_K, ALONG_N)
            else:
                inside = real[:, None] & (k < IN)[None, :]
                w = streamed(rows[:, None] + k.to(tl.int64)[None, :] * w_k, inside)
            y = tl.dot(w.to(COMPUTE), columns, y, input_precision="ieee")
            if UP and not INTERLEAVED:
                if DESCRIBED:
                    w = described_tile(w_ptr, e, start + outs, begin, ROWS, BLOCK_K, ALONG_N)
                else:
                    w = streamed(ups[:, None] + k.to(tl.int64)[None, :] * w_k, inside)
                up = tl.dot(w.to(COMPUTE), columns, up, input_precision="ieee")
        if bias_ptr is not None:
            bias = bias_ptr + e.to(tl.int64) * outs * (2 if UP else 1) + n
            y += floats(bias, real)[:, None]
            if UP and not INTERLEAVED:
                up += floats(bias + outs, real)[:, None]
        DTYPE: constexpr = x_ptr.dtype.element_ty
        if UP:
            if INTERLEAVED:
                y, up = halves(y, BLOCK_N)
            y = ranged(
                glu(ranged(y, DTYPE), ranged(up, DTYPE), alpha, limit, offset, ACT, SHAPED), DTYPE
            )
        else:
            y = ranged(y, DTYPE)
            weights = floats(weights_ptr + at, given & (index == e))
            y *= tl.sum(weights, 1)[None, :]
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        out = out_ptr + result[None, :] * outs + n[:, None]
        tl.store(out, y, mask=here[None, :] & (n < outs)[:, None])


@triton.jit
def combine(
    y_ptr,
    index_ptr,
    out_ptr,
    outs,
    experts,
    out_t,
    out_n,
    K: constexpr,
    KP: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
):
    """Grid: tokens, cdiv(outs, BLOCK). The sum of each token's results `[T * K, outs]`; an expert
    that comes twice has one."""
    await_previous(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    place, other = tl.arange(0, KP), tl.arange(0, KP)
    e = tl.load(index_ptr + t * K + place, mask=place < K, other=-1)
    mate = tl.load(index_ptr + t * K + other, mask=other < K, other=-1)
    earlier = tl.sum(
        ((e[:, None] == mate[None, :]) & (other[None, :] < place[:, None])).to(tl.int32), 1
    )
    here = (e >= 0) & (e < experts) & (earlier == 0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(
        y_ptr + (t * K + place.to(tl.int64))[:, None] * outs + n[None, :],
        mask=here[:, None] & (n < outs)[None, :],
        other=0.0,
    )
    tl.store(out_ptr + t * out_t + n.to(tl.int64) * out_n, tl.sum(y, 0), mask=n < outs)
