"""Launches of the scan of Mamba-2. Importing this module imports triton."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from attnops.core.kernel import deterministic
from attnops.core.record import changed
from attnops.kernels.shared.launch.gpu import computed_in, flat, gpu_of, launch, steady
from attnops.kernels.shared.recurrent import MOST_ROWS, goes_by_chunks, in_one_piece
from attnops.kernels.shared.sizes import power
from attnops.kernels.shared.tokens import clear
from attnops.kernels.triton.device import scan as device
from attnops.kernels.triton.launch import verify_states
from attnops.kernels.triton.launch.recurrent import CHUNK_VALUES, columns, stages

if TYPE_CHECKING:
    from attnops.ops.recurrent.scan import Mamba2Scan

STEP_VALUES, STEP_WARPS = 8, 1
"""Rows of the state that a program holds, token after token, and its warps."""
WIDE_VALUES, WIDE_WARPS = 64, 8
"""Those by chunks of two tiles, where they leave a program for each multiprocessor."""
TWO_TILES = 160 * 1024
"""Shared memory of such a program, with two chunks under way. With one, code of Triton 3.6 read
past the end of memory on an H200."""


@in_one_piece
def mamba2_scan(call: Mamba2Scan) -> None:
    """One launch: by chunks, or token after token where no request has more than one token, and
    where chunks have no kernel. Under a deterministic policy the tokens do not matter, so that a
    request's bits do not follow from its mates."""
    fixed = deterministic(call.policy)
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))
    if call.accepted is not None:
        verify_states.mamba2_scan(call)
        return
    (_, heads, dv), (_, groups, dk) = call.x.shape, call.b.shape
    requests = call.state.shape[0]
    if not call.output.numel() or not requests:
        return
    chunks = _goes_by_chunks(call, fixed)
    if chunks or fixed:
        call = changed(call, x=steady(call.x), b=steady(call.b), c=steady(call.c))
    block, warps = min(STEP_VALUES, power(dv)), STEP_WARPS
    blocks: dict[str, Any] = {"BLOCK_K": power(dk)}
    if chunks:
        block, warps, under_way = _chunk_tile(call, fixed)
        blocks = {"BLOCK_K": min(columns(dk), MOST_ROWS), "num_stages": under_way}
        blocks["COMPUTE"] = computed_in(call.x)
    launch(
        device.by_chunks if chunks else device.in_turn,
        (requests, heads, -(-dv // block)) if chunks else (requests * heads * -(-dv // block),),
        {
            "HEADS": heads,
            "GROUP": heads // groups,
            "DK": dk,
            "DV": dv,
            "SOFTPLUS": call.dt_softplus,
            "FRESH": call.fresh,
            "BLOCK_V": block,
            **blocks,
        },
        (
            call.x,
            call.dt,
            call.a.contiguous(),
            call.b,
            call.c,
            call.cu_seqlens_q,
            flat(call.d),
            flat(call.dt_bias),
            call.output,
            call.state,
            call.dt_min,
            call.dt_max or inf,
            *call.x.stride()[:2],
            *call.dt.stride(),
            *call.b.stride()[:2],
            *call.c.stride()[:2],
            call.cu_seqlens_q.stride(0),
        ),
        warps,
    )


def _goes_by_chunks(call: Mamba2Scan, fixed: bool) -> bool:
    dv, dk = call.state.shape[2:]
    if call.max_seqlen_q <= 1 and not fixed:
        return False
    fits = dk <= MOST_ROWS or gpu_of(call.x).memory >= TWO_TILES
    return fits and goes_by_chunks("mamba2_scan", call.x.dtype, dk, dv)


def _chunk_tile(call: Mamba2Scan, fixed: bool) -> tuple[int, int, int]:
    """(rows of the state, warps, chunks under way) of a program. fixed: they do not follow from the
    requests."""
    requests, heads, dv, dk = call.state.shape
    if dk <= MOST_ROWS:
        return CHUNK_VALUES, 4, stages(call.b, CHUNK_VALUES)
    wide = requests * heads * -(-dv // WIDE_VALUES)
    if not fixed and wide >= gpu_of(call.x).multiprocessors:
        return WIDE_VALUES, WIDE_WARPS, 2
    return CHUNK_VALUES, 4, 2
