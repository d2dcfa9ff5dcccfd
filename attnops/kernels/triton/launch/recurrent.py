"""Launches of layers that carry a state. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import deterministic
from attnops.core.record import changed, values as values_of
from attnops.kernels.shared.launch.gpu import computed_in, flat, gpu_of, launch, steady
from attnops.kernels.shared.recurrent import CHUNK, goes_by_chunks, in_one_piece
from attnops.kernels.shared.sizes import padded, power
from attnops.kernels.shared.tokens import clear
from attnops.kernels.triton.device import recurrent as device
from attnops.kernels.triton.launch import verify_states

if TYPE_CHECKING:
    from attnops.ops.recurrent.conv import CausalConv1d
    from attnops.ops.recurrent.record import GatedDeltaRule

WIDE_STEP, NARROW_STEP, STEP_HELD = 8192, 4096, 64
"""Numbers of the state that a program holds token after token, and those of a thread."""
STEP_PROGRAMS = 8
"""Wide programs a multiprocessor must have."""
CHUNK_VALUES = 32
"""Columns of the state that a program holds by chunks."""
OTHER_BYTES = 16 * 1024
"""Shared memory of a program that carries a state, beside what it loads."""
CONV_TOKENS, CONV_CHANNELS = 16, 64


@in_one_piece
def gated_delta_rule(call: GatedDeltaRule) -> None:
    """One launch where no request has more than one token, and where chunks have no kernel; else
    two. Under a deterministic policy the tokens do not matter, so that a request's bits do not
    follow from its mates."""
    fixed = deterministic(call.policy)
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))
    if call.accepted is not None:
        verify_states.gated_delta_rule(call)
        return
    if not call.output.numel() or not call.state.shape[0]:
        return
    sizes = _heads(call)
    chunks = goes_by_chunks("gated_delta_rule", call.query.dtype, sizes["DK"], sizes["DV"])
    chunks = chunks and (call.max_seqlen_q > 1 or fixed)
    if chunks or fixed:
        call = changed(
            call, query=steady(call.query), key=steady(call.key), value=steady(call.value)
        )
    if chunks:
        _by_chunks(call)
    else:
        _in_turn(call, fixed)


def _heads(call: GatedDeltaRule) -> dict[str, Any]:
    (_, heads, dv), (_, groups, dk) = call.value.shape, call.key.shape
    return {"HEADS": heads, "GROUP": heads // groups, "DK": dk, "DV": dv}


def step_tile(state: Tensor, keys: int, values: int, fixed: bool) -> tuple[int, int]:
    """(values, warps) of a program that goes on token after token. A wide tile reads more of each
    row of memory. fixed: it does not follow from the requests."""
    rows, numbers = state.shape[0] * state.shape[1], NARROW_STEP
    wide = -(-values // max(WIDE_STEP // power(keys), 1))
    if not fixed and rows * wide >= STEP_PROGRAMS * gpu_of(state).multiprocessors:
        numbers = WIDE_STEP
    block = min(max(numbers // power(keys), 1), power(values))
    return block, max(block * power(keys) // (32 * STEP_HELD), 1)


def _in_turn(call: GatedDeltaRule, fixed: bool) -> None:
    sizes = _heads(call)
    block, warps = step_tile(call.state, sizes["DK"], sizes["DV"], fixed)
    launch(
        device.in_turn,
        (call.state.shape[0] * sizes["HEADS"] * -(-sizes["DV"] // block),),
        {
            **sizes,
            "NORMALIZE": call.normalize,
            "FRESH": call.fresh,
            "ONE": call.max_seqlen_q == 1,
            "BLOCK_K": power(sizes["DK"]),
            "BLOCK_V": block,
        },
        (
            call.query,
            call.key,
            call.value,
            call.decay,
            call.beta,
            call.cu_seqlens_q,
            call.output,
            call.state,
            call.scale,
            *call.query.stride()[:2],
            *call.key.stride()[:2],
            *call.value.stride()[:2],
            *call.decay.stride(),
            *call.beta.stride(),
            call.cu_seqlens_q.stride(0),
        ),
        warps,
    )


def _by_chunks(call: GatedDeltaRule) -> None:
    query, key, value, decay, beta, starts, *_ = values_of(call)
    sizes, compute = _heads(call), computed_in(query)
    tokens, heads = value.shape[:2]
    keys = query.new_empty((tokens, heads, sizes["DK"]))
    values = torch.empty_like(value, memory_format=torch.contiguous_format)
    seen = query.new_empty((tokens, heads, CHUNK))
    factors = decay.new_empty((tokens, heads, 2))
    made = keys, values, seen, factors
    requests, chunks = call.state.shape[0], max(-(-call.max_seqlen_q // CHUNK), 1)
    blocks = {"BLOCK_K": columns(sizes["DK"]), "COMPUTE": compute}
    warps = 8 if blocks["BLOCK_K"] > 128 else 4
    launch(
        device.solve,
        (requests * chunks, heads),
        {
            **sizes,
            **blocks,
            "NORMALIZE": call.normalize,
            "BLOCK_V": columns(sizes["DV"]),
        },
        (
            query,
            key,
            value,
            decay,
            beta,
            starts,
            *made,
            call.scale,
            chunks,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *decay.stride(),
            *beta.stride(),
            starts.stride(0),
        ),
        warps,
    )
    block = CHUNK_VALUES
    launch(
        device.carry,
        (requests, heads, -(-sizes["DV"] // block)),
        {
            **sizes,
            **blocks,
            "FRESH": call.fresh,
            "BLOCK_V": block,
            "num_stages": stages(query, block),
        },
        (
            query,
            key,
            decay,
            starts,
            *made,
            call.output,
            call.state,
            *query.stride()[:2],
            *key.stride()[:2],
            *decay.stride(),
            starts.stride(0),
        ),
        warps,
    )


def columns(numbers: int) -> int:
    """Columns of a tile for so many numbers. With fewer than 64, code of Triton 3.6 reads past the
    end of shared memory on an H200 (by `compute-sanitizer`, at a product of `solve`)."""
    return max(64, padded(numbers))


def stages(key: Tensor, values: int) -> int:
    """Chunks that a program loads ahead into shared memory."""
    numbers = 3 * columns(key.shape[2]) + CHUNK + values
    chunk = CHUNK * numbers * key.dtype.itemsize
    return max(1, min(3, (gpu_of(key).memory - OTHER_BYTES) // chunk))


@in_one_piece
def causal_conv1d(call: CausalConv1d) -> None:
    """One launch. A number knows of its own channel and request alone."""
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))
    if call.accepted is not None:
        verify_states.causal_conv1d(call)
        return
    requests, channels, kept = call.state.shape
    if not call.output.numel() or not requests:
        return
    tokens = 1 if call.max_seqlen_q == 1 else CONV_TOKENS
    block, tiles = min(CONV_CHANNELS, power(channels)), max(-(-call.max_seqlen_q // tokens), 1)
    launch(
        device.conv,
        (requests * tiles, -(-channels // block)),
        {
            "WIDTH": call.weight.shape[1],
            "KEPT": kept,
            "KEPT_P": power(kept),
            "SILU": call.activation == "silu",
            "FRESH": call.fresh,
            "BLOCK_T": tokens,
            "BLOCK_C": block,
        },
        (
            call.x,
            call.weight,
            flat(call.bias),
            call.cu_seqlens_q,
            call.output,
            call.state,
            tiles,
            channels,
            *call.x.stride(),
            *call.weight.stride(),
            call.cu_seqlens_q.stride(0),
        ),
    )
