"""Launches of linear layers. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear as product
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.core.kernel import deterministic
from attnops.kernels.shared.launch.gpu import (
    computed_in,
    flat,
    gpu_of,
    launch,
    overlapped,
    overlaps,
    steady,
)
from attnops.kernels.shared.memory import address
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import linear as device
from attnops.kernels.triton.launch import linear_tiles as tiles

if TYPE_CHECKING:
    from attnops.ops.linear.norm import RmsNorm
    from attnops.ops.linear.record import Linear

ALIGNED = 16
"""Bytes. The tensor memory accelerator takes addresses and strides that are multiples of it."""
GATED = 1024
"""Results of a program of `gate_rows`."""
NARROW, WIDE = 512, 2048
"""Columns up to which a norm takes one warp, and from which it takes eight."""


def linear(call: Linear, choice: tiles.Tile | None = None) -> None:
    """One launch, whose tile follows from the number of rows; under a deterministic policy one tile
    serves every number of rows.

    choice: a tile to launch in place of the table's.
    """
    weight, output, fixed = call.weight, call.output, deterministic(call.policy)
    if output.numel() == 0:
        return
    x = steady(call.x) if fixed else call.x
    (rows, width), outs = x.shape, output.shape[1]
    gpu, size, gated, res = gpu_of(x), x.dtype.itemsize, call.activation != "", call.residual
    res_t, res_n = (0, 0) if res is None else res.stride()
    vectors = flat(call.bias), flat(call.norm_weight), res, output
    numbers = outs, call.norm_eps, call.norm_offset
    if rows == 1 and not fixed:
        tile = choice or tiles.one_row(outs, gated, gpu.multiprocessors)
        args: tuple[Any, ...] = (
            x,
            weight,
            *vectors,
            *numbers,
            weight.stride(0),
            res_n,
            output.stride(1),
        )
        given: dict[str, Any] = {}
        kernel, blocks = device.one_row, 1
    else:
        most = tiles.MOST_ROWS if fixed else rows
        tile = choice or tiles.few_rows(
            most, outs, size, gated, call.norm_weight is not None, gpu.multiprocessors, gpu.memory
        )
        block = tiles.block_of(most, tile)
        read: Any = weight
        if tile.described and gpu.warpgroups:
            read = _descriptor(weight, tile.outs, tile.bytes // size)
        strides = x.stride(0), weight.stride(0), res_t, res_n, *output.stride()
        args = (x, read, *vectors, rows, *numbers, *strides)
        given = {
            "BLOCK_T": block,
            "SPLIT": tile.split,
            "COMPUTE": computed_in(x),
            "DESCRIBED": read is not weight,
        }
        kernel, blocks = device.few_rows, -(-rows // block)
    launch(
        kernel,
        (blocks * -(-outs // tile.outs),),
        {
            "IN": width,
            "BLOCK_N": tile.outs,
            "BLOCK_K": tile.bytes // size,
            "STAGES": tile.stages,
            "ACT": call.activation,
            **given,
            **overlapped(tile.overlap and overlaps(output.device)),
        },
        args,
        tile.warps,
    )


def _descriptor(weight: Tensor, rows: int, columns: int) -> Any:
    """The weight itself where its rows have other addresses than the accelerator takes.

    Made anew for every launch, from the address that the weight has now; a captured launch holds
    its own copy, as it holds addresses.
    """
    row = weight.stride(0) * weight.dtype.itemsize
    if address(weight) % ALIGNED or row % ALIGNED or row <= 0:
        return weight
    return TensorDescriptor(weight, [*weight.shape], [*weight.stride()], [rows, columns])


def around_product(call: Linear) -> None:
    """torch's product, one launch for the norm before it, and one for the activation and the
    residual after it."""
    if call.output.numel() == 0:
        return
    x, gain, offset = call.x, call.norm_weight, call.norm_offset
    if gain is not None:
        x = torch.empty_like(x, memory_format=torch.contiguous_format)
        _norm(call.x, gain, None, x, call.norm_eps, offset, offset != 0)
    if call.activation:
        _gate(call, product(x, call.weight, call.bias))
        return
    weight, bias, residual, output = call.weight.t(), call.bias, call.residual, call.output
    if bias is not None and residual is not None:
        torch.add(torch.addmm(bias, x, weight), residual, out=output)
    elif bias is not None:
        torch.addmm(bias, x, weight, out=output)
    elif residual is not None:
        torch.addmm(residual, x, weight, out=output)
    else:
        torch.mm(x, weight, out=output)


def rms_norm(call: RmsNorm) -> None:
    """One launch. A row's program knows nothing of the others, so that its bits do not follow the
    batch."""
    if call.output.numel() == 0:
        return
    x = steady(call.x) if deterministic(call.policy) else call.x
    wide = call.wide_gain or call.offset != 0
    _norm(x, call.weight, call.residual, call.output, call.eps, call.offset, wide, call.gate)


def _norm(
    x: Tensor,
    gain: Tensor,
    residual: Tensor | None,
    output: Tensor,
    eps: float,
    offset: float,
    wide: bool,
    gate: Tensor | None = None,
) -> None:
    """Write the norms of the rows. wide: they are rounded after the gain alone."""
    rows, width = x.shape
    gate_strides, res_strides = ((0, 0) if y is None else y.stride() for y in (gate, residual))
    warps = 1 if width <= NARROW else 4 if width < WIDE else 8
    launch(
        device.norm_rows,
        (rows,),
        {
            "IN": width,
            "BLOCK": power(width),
            "WIDE": wide,
            **overlapped(overlaps(output.device)),
        },
        (
            x,
            flat(gain),
            gate,
            residual,
            output,
            eps,
            offset,
            x.stride(0),
            *gate_strides,
            *res_strides,
            *output.stride(),
        ),
        warps,
    )


def _gate(call: Linear, y: Tensor) -> None:
    output, res = call.output, call.residual
    rows, outs = output.shape
    res_strides = (0, 0) if res is None else res.stride()
    launch(
        device.gate_rows,
        (rows, -(-outs // GATED)),
        {"BLOCK": GATED, "ACT": call.activation, **overlapped(overlaps(output.device))},
        (y, res, output, outs, y.stride(0), *res_strides, *output.stride()),
    )
