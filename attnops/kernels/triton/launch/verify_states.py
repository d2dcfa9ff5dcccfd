"""Launches of layers that carry a state over tokens that may be taken back. Importing this module
imports triton."""

from __future__ import annotations

from math import inf
from typing import Any

from attnops.core.kernel import deterministic
from attnops.core.record import changed
from attnops.kernels.shared.launch.gpu import flat, launch, steady
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import verify_states as device

VALUES, WARPS = 8, 1
"""Columns of a state that a program holds, and its warps: sums over a column need no shared
memory."""
CONV_TOKENS, CONV_CHANNELS = 8, 64


def _known(call: Any, *names: str) -> Any:
    """The call with tensors that the launch can read. names: those that a deterministic policy
    loads in one way, see `steady`."""
    given = (
        {name: steady(getattr(call, name)) for name in names} if deterministic(call.policy) else {}
    )
    return changed(call, accepted=call.accepted.contiguous(), **given)


def gated_delta_rule(call: Any) -> None:
    """One launch, which reads and writes each state once. The output is contiguous, and 0 in
    padding rows."""
    if not call.state.shape[0]:
        return
    call = _known(call, "query", "key", "value")
    (_, heads, dv), (_, groups, dk) = call.value.shape, call.key.shape
    block = min(VALUES, power(dv))
    kept = call.kept_key, call.kept_value, call.kept_decay, call.kept_beta
    launch(
        device.rule,
        (call.state.shape[0], heads, -(-dv // block)),
        {
            "HEADS": heads,
            "GROUP": heads // groups,
            "DK": dk,
            "DV": dv,
            "SLOTS": call.kept_key.shape[1],
            "NORMALIZE": call.normalize,
            "BLOCK_K": power(dk),
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
            *kept,
            call.accepted,
            call.scale,
            *call.query.stride()[:2],
            *call.key.stride()[:2],
            *call.value.stride()[:2],
            *call.decay.stride(),
            *call.beta.stride(),
            call.cu_seqlens_q.stride(0),
        ),
        WARPS,
    )


def mamba2_scan(call: Any) -> None:
    """As `gated_delta_rule`."""
    if not call.state.shape[0]:
        return
    call = _known(call, "x", "b", "c")
    (_, heads, dv), (_, groups, dk) = call.x.shape, call.b.shape
    block = min(VALUES, power(dv))
    launch(
        device.scan,
        (call.state.shape[0], heads, -(-dv // block)),
        {
            "HEADS": heads,
            "GROUP": heads // groups,
            "DK": dk,
            "DV": dv,
            "SLOTS": call.kept_x.shape[1],
            "SOFTPLUS": call.dt_softplus,
            "BLOCK_K": power(dk),
            "BLOCK_V": block,
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
            call.kept_x,
            call.kept_dt,
            call.kept_b,
            call.accepted,
            call.dt_min,
            call.dt_max or inf,
            *call.x.stride()[:2],
            *call.dt.stride(),
            *call.b.stride()[:2],
            *call.c.stride()[:2],
            call.cu_seqlens_q.stride(0),
        ),
        WARPS,
    )


def causal_conv1d(call: Any) -> None:
    """As `gated_delta_rule`."""
    if not call.state.shape[0]:
        return
    call = _known(call)
    requests, channels, held = call.state.shape
    block = min(CONV_CHANNELS, power(channels))
    launch(
        device.conv,
        (requests, -(-channels // block)),
        {
            "WIDTH": call.weight.shape[1],
            "HELD": held,
            "HELD_P": power(held),
            "SLOTS": call.kept_x.shape[1],
            "SILU": call.activation == "silu",
            "BLOCK_T": min(CONV_TOKENS, power(max(call.max_seqlen_q, 1))),
            "BLOCK_C": block,
        },
        (
            call.x,
            call.weight,
            flat(call.bias),
            call.cu_seqlens_q,
            call.output,
            call.state,
            call.kept_x,
            call.accepted,
            channels,
            *call.x.stride(),
            *call.weight.stride(),
            call.cu_seqlens_q.stride(0),
        ),
    )
