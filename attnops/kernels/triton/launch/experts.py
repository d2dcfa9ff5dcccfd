"""Launches of the experts of a mixture. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.core.kernel import deterministic
from attnops.kernels.shared.experts import experts as composed
from attnops.kernels.shared.launch.gpu import (
    computed_in,
    flat,
    gpu_of,
    launch,
    overlapped,
    overlaps,
)
from attnops.kernels.shared.memory import address
from attnops.kernels.shared.parts import GRID, turns_of
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import experts as device
from attnops.kernels.triton.launch import experts_tiles as tiles
from attnops.kernels.triton.launch.experts_tiles import Shape, Tile
from attnops.kernels.triton.launch.linear import ALIGNED

if TYPE_CHECKING:
    from attnops.ops.experts.mxfp4 import Mxfp4Experts
    from attnops.ops.experts.record import Experts

BLOCK = 1024
"""Numbers of a program of the last launch, the sum."""


def experts(call: Experts, choice: tuple[Tile, Tile] | None = None) -> None:
    """Two launches for one token, three for more; under a deterministic policy one way serves every
    number of tokens.

    A token whose weights have their rows next to each other takes three as well: sums of products
    read such weights at half of the rate.

    A compiled graph of any number of tokens calls this: more tokens than a program has are left to
    torch's products.
    choice: the tiles of the two products, in place of the table's.
    """
    tokens, fixed = call.x.shape[0], deterministic(call.policy)
    if tokens == 0:
        return
    if tokens > tiles.MOST_TOKENS and not fixed:
        composed(call)
    elif tokens == 1 and not (fixed or _along(call.gate_up) or _along(call.down)):
        _one_token(call, choice)
    else:
        block = tiles.MOST_TOKENS if fixed else tiles.block_of(tokens)
        for _, part in turns_of(call, "T", GRID * block):
            _few_tokens(part, choice, block)


def shapes(call: Experts) -> tuple[Shape, Shape]:
    """Of the two products."""
    (_, outs, inner), size = call.down.shape, call.x.dtype.itemsize
    up = Shape(
        inner, call.x.shape[1], size, call.interleaved, not call.interleaved, _along(call.gate_up)
    )
    return up, Shape(outs, inner, size, along=_along(call.down))


def _along(weight: Tensor) -> bool:
    return weight.stride(2) != 1 and weight.stride(1) == 1


def activation(
    call: Experts | Mxfp4Experts, name: str
) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """The numbers and the constants of an activation, as the device functions take them."""
    shaped = bool(call.alpha != 1 or call.limit or call.offset)
    return (call.alpha, call.limit, call.offset), {"ACT": name, "SHAPED": shaped}


def _one_token(call: Experts, choice: tuple[Tile, Tile] | None) -> None:
    x, index, output = call.x, call.top_k_index.contiguous(), call.output
    (experts, outs, inner), k = call.down.shape, index.shape[1]
    first, second = choice or tuple(tiles.one_token(shape, power(k)) for shape in shapes(call))
    act, overlap = x.new_empty((k, inner)), overlaps(output.device)
    numbers, given = activation(call, call.activation)
    block = first.rows // 2 if call.interleaved else first.rows
    launch(
        device.one_token_up,
        (-(-inner // block), k),
        {
            "IN": x.shape[1],
            "BLOCK_N": block,
            "BLOCK_K": first.columns,
            "STAGES": first.stages,
            "INTERLEAVED": call.interleaved,
            **given,
            **overlapped(first.overlap and overlap),
        },
        (
            x,
            call.gate_up,
            flat(call.gate_up_bias),
            index,
            act,
            inner,
            experts,
            *numbers,
            *call.gate_up.stride(),
        ),
        first.warps,
    )
    launch(
        device.one_token_down,
        (-(-outs // second.rows),),
        {
            "IN": inner,
            "K": k,
            "KP": power(k),
            "BLOCK_N": second.rows,
            "BLOCK_K": second.columns,
            "STAGES": second.stages,
            **overlapped(second.overlap and overlap),
        },
        (
            act,
            call.down,
            flat(call.down_bias),
            index,
            call.top_k_weights.contiguous(),
            output,
            outs,
            experts,
            *call.down.stride(),
            output.stride(1),
        ),
        second.warps,
    )


def _few_tokens(call: Experts, choice: tuple[Tile, Tile] | None, block: int) -> None:
    x, index, weights, output = (
        call.x,
        call.top_k_index.contiguous(),
        call.top_k_weights.contiguous(),
        call.output,
    )
    tokens, (experts, outs, inner), k = x.shape[0], call.down.shape, index.shape[1]
    memory, overlap = gpu_of(x).memory, overlaps(output.device)
    chosen = choice or tuple(tiles.few_tokens(shape, block, memory) for shape in shapes(call))
    act = x.new_empty((tokens * k, inner))
    y = x.new_empty((tokens * k, outs), dtype=torch.float32)
    numbers, given = activation(call, call.activation)
    programs = min(experts, min(tokens, block) * k)
    for up, tile, source, weight, bias, result in (
        (True, chosen[0], x, call.gate_up, call.gate_up_bias, act),
        (False, chosen[1], act, call.down, call.down_bias, y),
    ):
        pairs, along = up and call.interleaved, _along(weight)
        read: Any = weight
        if tile.described and gpu_of(x).warpgroups:
            read = _descriptor(weight, tile, along)
        n = tile.rows // 2 if pairs else tile.rows
        args = (
            source,
            read,
            flat(bias),
            index,
            weights,
            result,
            tokens,
            int(programs == experts),
            result.shape[1],
            experts,
            *numbers,
            source.stride(0),
            *weight.stride(),
        )
        launch(
            device.few_tokens,
            (-(-result.shape[1] // n), programs, -(-tokens // block)),
            {
                "IN": source.shape[1],
                "K": k,
                "KP": power(k),
                "BLOCK_T": block,
                "BLOCK_N": n,
                "BLOCK_K": tile.columns,
                "STAGES": tile.stages,
                "UP": up,
                **given,
                "INTERLEAVED": pairs,
                "COMPUTE": computed_in(x),
                "DESCRIBED": read is not weight,
                "ALONG_N": along,
                **overlapped(tile.overlap and overlap),
            },
            args,
            tile.warps,
        )
    launch(
        device.combine,
        (tokens, -(-outs // BLOCK)),
        {
            "K": k,
            "KP": power(k),
            "BLOCK": min(BLOCK, power(outs)),
            **overlapped(chosen[1].overlap and overlap),
        },
        (
            y,
            index,
            output,
            outs,
            experts,
            *output.stride(),
        ),
    )


def _descriptor(weight: Tensor, tile: Tile, along: bool) -> Any:
    """As that of a linear's weight."""
    strides = [n * weight.dtype.itemsize for n in weight.stride() if n != 1]
    along_one = 1 in weight.stride()[1:] and len(strides) == 2
    if not along_one or any(n % ALIGNED or n <= 0 for n in strides) or address(weight) % ALIGNED:
        return weight
    memory = weight.transpose(1, 2) if along else weight
    block = (tile.columns, tile.rows) if along else (tile.rows, tile.columns)
    return TensorDescriptor(memory, [*memory.shape], [*memory.stride()], [1, *block])
