"""`flashinfer_mla_fa3`: FlashInfer's attention over latents with the warp groups of SM90, planned by the host. See `flashinfer_mla_fa2`."""

from __future__ import annotations

from attnops.kernel import arch
from attnops.kernels._flashinfer import FA3
from attnops.kernels._flashinfer_mla import declare
from attnops.problem import Problem


def _cost_us(p: Problem) -> float:
    """Measured on an H200: 561 TFLOP/s with 128 heads, 3.79 TB/s with 16; and a layer's share of the plan."""
    tokens, queries, context = (max(x.hint, 1) for x in (p.tokens, p.queries, p.context))
    rows = max(tokens * p.q_heads, tokens * 64 // queries)
    flops = 2.0 * rows * context * (p.head_dim + p.v_head_dim) * (0.5 if p.causal and queries > 1 else 1.0)
    size = float(p.kv_dtype.itemsize) * max(p.batch.hint, 1) * context * p.head_dim
    return 25.0 + max(size / 3.8e6, flops / 5.6e8)


declare(FA3, arch(90), _cost_us, "FlashInfer: MLA on SM90, planned by the host")
