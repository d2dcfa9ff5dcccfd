"""`scatter`: the write of keys and values, or of latents, as torch's own index_put, lowered in place, so that the compiler fuses
it with whatever makes them.

Float8 pages are left to others: writing them takes a view of another dtype, and a write through such a view is lost when inlined.
"""

from __future__ import annotations

import torch

from attnops.kernel import Kernel, one_of, register
from attnops.problem import Problem
from attnops.reference.data import write_kv
from attnops.reference.mla import write_latent


def _cost_us(p: Problem) -> float:
    numbers = p.head_dim if p.rope_dim else p.kv_heads * (p.head_dim + p.v_head_dim)
    return 5.0 + max(p.tokens.hint, 1) * numbers / 1e6


for _op, _run in (("write_kv", write_kv), ("write_latent", write_latent)):
    register(
        Kernel(
            "scatter",
            _op,
            _run,
            needs=(one_of("kv_dtype", torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8),),
            cost_us=_cost_us,
            batch_invariant=True,
            inline=True,
            about="index_put fused by the compiler",
        )
    )
