"""`flashinfer_mla_fa2`: FlashInfer's attention over latents for SM80 and later (https://arxiv.org/abs/2501.01005), planned by the host.

Two names for FlashInfer's two kernels, so that the choice between them, and between them and FlashMLA, is selection's and can be
measured, forced and read in the generated code like any other.
"""

from __future__ import annotations

from attnops.kernel import arch
from attnops.kernels._flashinfer import FA2
from attnops.kernels._flashinfer_mla import declare
from attnops.problem import Problem


def _cost_us(p: Problem) -> float:
    """As in `flashinfer`; measured on an H200: 265 TFLOP/s of tiles of 64 rows, full or not, and a layer's share of the plan."""
    tokens, queries, context = (max(x.hint, 1) for x in (p.tokens, p.queries, p.context))
    rows = max(tokens * p.q_heads, tokens * 64 // queries)
    flops = 2.0 * rows * context * (p.head_dim + p.v_head_dim) * (0.5 if p.causal and queries > 1 else 1.0)
    size = float(p.kv_dtype.itemsize) * max(p.batch.hint, 1) * context * p.head_dim
    return 25.0 + max(size / 2.5e6, flops / 2.65e8)


declare(FA2, arch(80, 86, 87, 89, 90, 100, 103, 120, 121), _cost_us, "FlashInfer: MLA of SM80 and later, planned by the host")
