"""Launches of the scan of Mamba-2. Importing this module imports triton."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from attnops.core.kernel import deterministic
from attnops.core.record import changed
from attnops.kernels.shared.launch.gpu import computed_in, flat, launch, steady
from attnops.kernels.shared.recurrent import goes_by_chunks, in_one_piece
from attnops.kernels.shared.sizes import power
from attnops.kernels.shared.tokens import clear
from attnops.kernels.triton.device import scan as device
from attnops.kernels.triton.launch.recurrent import CHUNK_VALUES, columns, stages

if TYPE_CHECKING:
    from attnops.ops.recurrent.scan import Mamba2Scan

STEP_VALUES = 16
"""Rows of the state that a program holds, token after token."""


@in_one_piece
def mamba2_scan(call: Mamba2Scan) -> None:
    """One launch: by chunks, or token after token where no request has more than one token, and
    where chunks have no kernel. Under a deterministic policy the tokens do not matter, so that a
    request's bits do not follow from its mates."""
    fixed = deterministic(call.policy)
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))
    (_, heads, dv), (_, groups, dk) = call.x.shape, call.b.shape
    requests = call.state.shape[0]
    if not call.output.numel() or not requests:
        return
    chunks = goes_by_chunks(call.x.dtype, dk, dv) and (call.max_seqlen_q > 1 or fixed)
    if chunks or fixed:
        call = changed(call, x=steady(call.x), b=steady(call.b), c=steady(call.c))
    block = CHUNK_VALUES if chunks else min(STEP_VALUES, power(dv))
    blocks: dict[str, Any] = {"BLOCK_K": power(dk), "BLOCK_V": block}
    if chunks:
        blocks |= {"BLOCK_K": columns(dk), "COMPUTE": computed_in(call.x)}
        blocks["num_stages"] = stages(call.b, block)
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
    )
