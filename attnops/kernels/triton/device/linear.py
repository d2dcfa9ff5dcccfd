"""Device functions: a linear layer of few rows, with the RMS norm before it, and the gated
activation and the residual after it. And these parts alone, around torch's product of many rows,
or of a norm that feeds no linear.

The norm is linear in its factor: `(x * gain) @ weight.T * rsqrt(mean(x**2) + eps)`. The sum of
squares is taken along the product's loop.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import await_previous, floats, streamed

ROOT_HALF = constexpr(0.7071067811865476)
# Of the tanh approximation, twice the factor, because 1 + tanh(z) = 2 sigmoid(2 z).
TANH, CUBIC = constexpr(1.5957691216057308), constexpr(0.044715)


@triton.jit
def gated(gate, up, ACT: constexpr):
    """`act(gate) * up`, in float32."""
    if ACT == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * ROOT_HALF)) * up
    else:
        return gate * tl.sigmoid((gate + gate * gate * gate * CUBIC) * TANH) * up


@triton.jit
def tile_of(rows_ptr, k, real, IN: constexpr, BLOCK_K: constexpr):
    """Columns `k` of a weight's rows, which need not stay in the cache; 0 past the ends."""
    if IN % BLOCK_K == 0:
        inside = real[:, None]
    else:
        inside = real[:, None] & (k < IN)[None, :]
    return streamed(rows_ptr[:, None] + k[None, :], inside)


@triton.jit
def add_product(sums, rows, columns, SPLIT: constexpr):
    """`sums` plus `rows @ columns`. SPLIT: parts of the inner dim with sums of their own,
    `[SPLIT, N, T]`, which warps share.

    A sum is a chain of matrix instructions, each of which waits for the one before it. Warps that
    have all of a step's columns compute one chain, or the same chain; warps that have some of them
    compute as many chains at once.
    """
    if SPLIT > 1:
        N: constexpr = rows.shape[0]
        K: constexpr = rows.shape[1] // SPLIT
        T: constexpr = columns.shape[1]
        rows = tl.permute(tl.reshape(rows, [N, SPLIT, K]), [1, 0, 2])
        columns = tl.reshape(columns, [SPLIT, K, T])
    return tl.dot(rows, columns, sums, input_precision="ieee")


@triton.jit
def finish(
    y, up, factor, bias_ptr, gain_ptr, residual, out_ptr, n, outs, real, inside, ACT: constexpr
):
    """Write products: with the norm's factor, the bias, the activation and the residual.

    n: which results they are, `real` of the `outs`. out_ptr: where they are in the output, whose
    rows are `inside`, too.
    """
    if gain_ptr is not None:
        y *= factor
        up *= factor
    if bias_ptr is not None:
        y += floats(bias_ptr + n, real)
        if ACT != "":
            up += floats(bias_ptr + outs + n, real)
    if ACT != "":
        y = gated(y, up, ACT)
    if residual is not None:
        y += residual.to(tl.float32)
    tl.store(out_ptr, y, mask=inside)


@triton.jit
def one_row(
    x_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
    res_ptr,
    out_ptr,
    outs,
    eps,
    offset,
    w_n,
    res_n,
    out_n,
    IN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    ACT: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(outs, BLOCK_N). A product of a weight `[outs or 2 outs, IN]` and one row, as sums
    of products in float32.

    OVERLAP: this kernel is launched while the one before it runs.
    """
    await_previous(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < outs
    rows = w_ptr + n.to(tl.int64) * w_n
    ups = rows + tl.cast(outs, tl.int64) * w_n
    column = n.to(tl.int64)
    residual = None
    if res_ptr is not None:
        # Ahead of the weight, so that the end of a program does not wait for it.
        residual = tl.load(res_ptr + column * res_n, mask=real, other=0.0)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = sums
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        x = floats(x_ptr + k, k < IN)
        if gain_ptr is not None:
            squares += x * x
            x *= offset + floats(gain_ptr + k, k < IN)
        sums += tile_of(rows, k, real, IN, BLOCK_K).to(tl.float32) * x[None, :]
        if ACT != "":
            up_sums += tile_of(ups, k, real, IN, BLOCK_K).to(tl.float32) * x[None, :]
    y, up = tl.sum(sums, 1), tl.sum(up_sums, 1)
    factor = tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    finish(
        y,
        up,
        factor,
        bias_ptr,
        gain_ptr,
        residual,
        out_ptr + column * out_n,
        n,
        outs,
        real,
        real,
        ACT,
    )


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
    res_ptr,
    out_ptr,
    rows,
    outs,
    eps,
    offset,
    x_t,
    w_n,
    res_t,
    res_n,
    out_t,
    out_n,
    IN: constexpr,
    BLOCK_T: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    SPLIT: constexpr,
    STAGES: constexpr,
    ACT: constexpr,
    COMPUTE: constexpr,
    DESCRIBED: constexpr,
    OVERLAP: constexpr,
):
    """Grid: cdiv(rows, BLOCK_T) * cdiv(outs, BLOCK_N). The weight's rows are the left operand of
    the matrix units.

    SPLIT: parts of a step's columns, as in `add_product`. DESCRIBED: `w_ptr` is a descriptor of the
    weight, by which the tensor memory accelerator reads tiles; it reads 0 past the ends. OVERLAP:
    as in `one_row`.
    """
    await_previous(OVERLAP)
    blocks = tl.cdiv(rows, BLOCK_T)
    # Neighbours share a tile of the weight.
    t = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = (tl.program_id(0) // blocks) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    here = t < rows
    real = n < outs
    x_rows = x_ptr + t.to(tl.int64) * x_t
    if not DESCRIBED:
        w_rows = w_ptr + n.to(tl.int64) * w_n
        up_rows = w_rows + tl.cast(outs, tl.int64) * w_n
    at, column, both = (
        t.to(tl.int64)[None, :],
        n.to(tl.int64)[:, None],
        real[:, None] & here[None, :],
    )
    residual = None
    if res_ptr is not None:
        residual = tl.load(res_ptr + at * res_t + column * res_n, mask=both, other=0.0)
    if SPLIT > 1:
        y = tl.zeros([SPLIT, BLOCK_N, BLOCK_T], tl.float32)
    else:
        y = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = y
    squares = tl.zeros([BLOCK_T], tl.float32)
    for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        if IN % BLOCK_K == 0:
            inside = here[:, None]
        else:
            inside = here[:, None] & (k < IN)[None, :]
        x = tl.load(x_rows[:, None] + k[None, :], mask=inside, other=0.0)
        if gain_ptr is not None:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            gain = offset + floats(gain_ptr + k, k < IN)
            x = (wide * gain[None, :]).to(x.dtype)
        columns = tl.trans(x.to(COMPUTE))
        if DESCRIBED:
            w = w_ptr.load([first, begin])
        else:
            w = tile_of(w_rows, k, real, IN, BLOCK_K)
        y = add_product(y, w.to(COMPUTE), columns, SPLIT)
        if ACT != "":
            if DESCRIBED:
                w = w_ptr.load([first + outs, begin])
            else:
                w = tile_of(up_rows, k, real, IN, BLOCK_K)
            up = add_product(up, w.to(COMPUTE), columns, SPLIT)
    if SPLIT > 1:
        y = tl.sum(y, 0)
        up = tl.sum(up, 0)
    factor = tl.rsqrt(squares / IN + eps)[None, :]
    out_ptr += at * out_t + column * out_n
    finish(
        y,
        up,
        factor,
        bias_ptr,
        gain_ptr,
        residual,
        out_ptr,
        n[:, None],
        outs,
        real[:, None],
        both,
        ACT,
    )


@triton.jit
def norm_rows(
    x_ptr,
    gain_ptr,
    gate_ptr,
    res_ptr,
    out_ptr,
    eps,
    offset,
    x_t,
    gate_t,
    gate_n,
    res_t,
    res_n,
    out_t,
    out_n,
    IN: constexpr,
    BLOCK: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
):
    """Grid: rows. The RMS norm of a row, its gate and the residual, rounded where transformers
    rounds them: the norm before its gain and after it, or after it alone (WIDE)."""
    await_previous(OVERLAP)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, column = k < IN, k.to(tl.int64)
    dtype: constexpr = out_ptr.dtype.element_ty
    x = floats(x_ptr + row * x_t + k, inside)
    # Ahead of the sum, so that the end of a program does not wait for them.
    gain = floats(gain_ptr + k, inside)
    if gate_ptr is not None:
        gate = floats(gate_ptr + row * gate_t + column * gate_n, inside)
    if res_ptr is not None:
        residual = floats(res_ptr + row * res_t + column * res_n, inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / IN + eps)
    if WIDE:
        y *= offset + gain
    else:
        y = y.to(dtype).to(tl.float32) * gain
    if gate_ptr is not None:
        y = y.to(dtype).to(tl.float32) * (gate * tl.sigmoid(gate))
    if res_ptr is not None:
        y = y.to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + row * out_t + column * out_n, y, mask=inside)


@triton.jit
def gate_rows(
    y_ptr,
    res_ptr,
    out_ptr,
    outs,
    y_t,
    res_t,
    res_n,
    out_t,
    out_n,
    BLOCK: constexpr,
    ACT: constexpr,
    OVERLAP: constexpr,
):
    """Grid: (rows, cdiv(outs, BLOCK)). The gated activation of a row of a product `[2 outs]`, and
    the residual."""
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, column = n < outs, n.to(tl.int64)
    y = y_ptr + row * y_t + column
    out = gated(floats(y, inside), floats(y + outs, inside), ACT)
    if res_ptr is not None:
        out += floats(res_ptr + row * res_t + column * res_n, inside)
    tl.store(out_ptr + row * out_t + column * out_n, out, mask=inside)
