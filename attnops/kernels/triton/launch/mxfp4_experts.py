"""Launches of the experts of a mixture with weights of MXFP4. Importing this module imports
triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.kernel import deterministic
from attnops.kernels.shared.experts import experts as composed
from attnops.kernels.shared.launch.gpu import computed_in, flat, launch, overlapped, overlaps
from attnops.kernels.shared.parts import GRID, turns_of
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import experts as plain, mxfp4_experts as device
from attnops.kernels.triton.launch.experts import BLOCK, activation
from attnops.kernels.triton.launch.experts_tiles import LEAST_TOKENS, MOST_TOKENS, block_of
from attnops.ops.experts.mxfp4_reference import Decoded

if TYPE_CHECKING:
    from attnops.ops.experts.mxfp4 import Mxfp4Experts


class Tile(NamedTuple):
    """tiles: of 16 rows, of a warp. warps: of a program; each `parts` of them share rows. turns:
    chunks of 64 columns of a warp's step.

    overlap: the launch begins while the kernel before it ends, where the GPU can.
    """

    tiles: int
    warps: int
    parts: int
    turns: int
    overlap: bool = True

    @property
    def given(self) -> dict[str, int]:
        """As arguments of a device function."""
        return {"TILES": self.tiles, "PARTS": self.parts, "TURNS": self.turns}


TILE = Tile(1, 2, 2, 4)
"""Of every product but the next. A program of the second product of one token has as many warps for
each of the token's experts."""
ONE_TOKEN_UP = Tile(1, 4, 2, 2)
"""Of the first product of one token."""
MATES = 8
"""Columns of the right operand: tokens of an expert that are multiplied at once."""
MOST_WARPS = 16
CHUNKS = 8
"""Of 64 columns that a program decodes for torch's products."""


def mxfp4_experts(call: Mxfp4Experts, choice: tuple[Tile, Tile] | None = None) -> None:
    """Two launches for one token, three for more; under a deterministic policy one way serves every
    number of tokens.

    For more tokens than a program has, one more launch decodes all weights for torch's products.
    choice: the tiles of the two products, in place of the table's.
    """
    tokens, fixed = call.x.shape[0], deterministic(call.policy)
    if tokens == 0:
        return
    if tokens > MOST_TOKENS and not fixed:
        composed(decoded(call))
    elif tokens == 1 and not fixed and power(call.top_k_index.shape[1]) * TILE.parts <= MOST_WARPS:
        _one_token(call, *(choice or (ONE_TOKEN_UP, TILE)))
    else:
        block = LEAST_TOKENS if fixed else block_of(tokens)
        for _, part in turns_of(call, "T", GRID * block):
            _few_tokens(part, choice or (TILE, TILE), block)


def _words(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """As the device functions read them."""
    return _viewed(weight, torch.int16), _viewed(scales, torch.int32)


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous().view(-1)
    return (x if x.storage_offset() % dtype.itemsize == 0 else x.clone()).view(dtype)


def decoded(call: Mxfp4Experts) -> Any:
    """The call with its weights in the dtype of `x`."""

    def whole(weight: Tensor, scales: Tensor, pairs: bool) -> Tensor:
        experts, rows, half = weight.shape
        out = call.x.new_empty((experts, rows, 2 * half))
        launch(
            device.decode,
            (experts * rows // 16, -(-2 * half // (64 * CHUNKS))),
            {
                "COLUMNS": 2 * half,
                "PAIRS": pairs,
                "BLOCK": CHUNKS,
                "COMPUTE": computed_in(call.x),
            },
            (*_words(weight, scales), out),
        )
        return out

    return Decoded.of(
        call,
        whole(call.gate_up, call.gate_up_scales, True),
        whole(call.down, call.down_scales, False),
    )


def _one_token(call: Mxfp4Experts, first: Tile, second: Tile) -> None:
    x, index, output, computed = (
        call.x,
        call.top_k_index.contiguous(),
        call.output,
        computed_in(call.x),
    )
    (experts, outs, half), k = call.down.shape, index.shape[1]
    inner, act, overlap = 2 * half, x.new_empty((k, 2 * half)), overlaps(output.device)
    numbers, given = activation(call, "silu")
    launch(
        device.one_token_up,
        (-(-inner // (8 * first.tiles * first.warps // first.parts)), k),
        {
            "IN": x.shape[1],
            "WARPS": first.warps,
            **first.given,
            **given,
            "COMPUTE": computed,
            **overlapped(first.overlap and overlap),
        },
        (
            x,
            *_words(call.gate_up, call.gate_up_scales),
            flat(call.gate_up_bias),
            index,
            act,
            inner,
            experts,
            *numbers,
        ),
        first.warps,
    )
    launch(
        device.one_token_down,
        (-(-outs // (16 * second.tiles)),),
        {
            "IN": inner,
            "K": k,
            "KP": power(k),
            **second.given,
            "COMPUTE": computed,
            **overlapped(second.overlap and overlap),
        },
        (
            act,
            *_words(call.down, call.down_scales),
            flat(call.down_bias),
            index,
            call.top_k_weights.contiguous(),
            output,
            outs,
            experts,
            output.stride(1),
        ),
        power(k) * second.parts,
    )


def _few_tokens(call: Mxfp4Experts, choice: tuple[Tile, Tile], block: int) -> None:
    x, index, weights, output = (
        call.x,
        call.top_k_index.contiguous(),
        call.top_k_weights.contiguous(),
        call.output,
    )
    tokens, (experts, outs, half), k = x.shape[0], call.down.shape, index.shape[1]
    act, y = (
        x.new_empty((tokens * k, 2 * half)),
        x.new_empty((tokens * k, outs), dtype=torch.float32),
    )
    numbers, given = activation(call, "silu")
    overlap = overlaps(output.device)
    programs = min(experts, min(tokens, block) * k)
    for up, tile, source, weight, scales, bias, result in (
        (True, choice[0], x, call.gate_up, call.gate_up_scales, call.gate_up_bias, act),
        (False, choice[1], act, call.down, call.down_scales, call.down_bias, y),
    ):
        rows = (8 if up else 16) * tile.tiles * tile.warps // tile.parts
        launch(
            device.few_tokens,
            (-(-result.shape[1] // rows), programs, -(-tokens // block)),
            {
                "IN": source.shape[1],
                "K": k,
                "KP": power(k),
                "BLOCK_T": block,
                "MATES": MATES,
                "WARPS": tile.warps,
                **tile.given,
                "UP": up,
                **given,
                "COMPUTE": computed_in(x),
                **overlapped(tile.overlap and overlap),
            },
            (
                source,
                *_words(weight, scales),
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
            ),
            tile.warps,
        )
    launch(
        plain.combine,
        (tokens, -(-outs // BLOCK)),
        {
            "K": k,
            "KP": power(k),
            "BLOCK": min(BLOCK, power(outs)),
            **overlapped(choice[1].overlap and overlap),
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
