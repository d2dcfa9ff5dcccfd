"""`pointwise`: rotation and quantisation of queries and latents as plain torch ops, lowered in place: the compiler writes each part
into its place in float8 and stores no other tensor. On the CPU this is one function, with pointwise producers fused in.
"""

from __future__ import annotations

import torch

from attnops.kernel import Inline, Invariant, Kernel, register
from attnops.kernels.torch.scatter import float8_in_triton
from attnops.problem import Problem
from attnops.reference.rope_quantize import rope_quantize_latent


def _cost_us(p: Problem) -> float:
    """Two launches, and the bytes; not measured."""
    return 8.0 + max(p.tokens.hint, 1) * (p.q_heads + 1) * p.head_dim * (p.dtype.itemsize + 1) / 3.1e6


register(
    Kernel(
        "pointwise",
        "rope_quantize_latent",
        rope_quantize_latent,
        takes=frozenset({"interleaved"}),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        kv_dtypes=(torch.float8_e4m3fn,),
        needs=(float8_in_triton,),
        cost_us=_cost_us,
        invariant=Invariant(),
        inline=Inline(),
        about="pointwise torch ops fused by the compiler",
    )
)
