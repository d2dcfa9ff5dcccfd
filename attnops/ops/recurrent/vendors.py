"""Training of layers that carry a state by others, as `attnops.ops.attention.vendors` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnops.ops.attention.vendors import Attend, Compiler, Inputs


def fla(c: Any, compiler: Compiler | None = None) -> Attend:
    """flash-linear-attention, as its layers call it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    starts = None if c.state.shape[0] == 1 else c.cu_seqlens_q.long()

    def run(given: Inputs) -> Tensor:
        q, k, v, g, beta = (given[n][None] for n in ("query", "key", "value", "decay", "beta"))
        output, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=c.scale,
            initial_state=c.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=c.normalize,
            cu_seqlens=starts,
        )
        found: Tensor = output[0]
        return found

    return run


VENDORS: Mapping[str, Mapping[str, Any]] = {"gated_delta_rule": {"direct.fla": fla}}
