"""`fa3_triton`: attention over latents where the number of a request's own queries decides which of
two kernels serves it.

Triton's kernel takes requests of at most `DECODE_QUERIES` queries and splits their keys;
FlashAttention-3 takes the longer ones, which fill the device without splits. Neither kernel lets a
batch mate change a request's bits, and a request's own number of queries chooses between them. So a
deterministic policy has the speed of both. Other policies choose a kernel by the batch, and need no
mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnops.core.kernel import Invariant, register
from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.kernels.sgl import fa3
from attnops.kernels.triton import attention as triton
from attnops.kernels.triton.launch.grids import DECODE_QUERIES

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla


def mla_attention(call: mla.MlaAttention) -> None:
    """FlashAttention-3 first: it clears the output."""
    call = changed(call, policy="deterministic")
    if min(call.max_seqlen_q, call.q_nope.shape[0]) <= DECODE_QUERIES:
        triton.attention(call)
        return
    queries = call.cu_seqlens_q.diff()
    fa3.latents(call, torch.where(queries > DECODE_QUERIES, queries, 0))
    triton.few_queries(call)


def _cost_us(p: Problem) -> float:
    """As the kernel that serves the longest request, and a launch of the other. Alone each is the
    plainer choice."""
    return (
        fa3.LATENTS(p) + 10.0 if p.sizes.queries.hint > DECODE_QUERIES else triton.LATENTS(p) + 0.5
    )


register(
    replace(
        fa3.LATENT_KERNEL,
        name="fa3_triton",
        run=mla_attention,
        needs=(*fa3.LATENT_KERNEL.needs, *triton.LATENT_NEEDS),
        packages=(fa3.PACKAGE, triton.PACKAGE),
        cost_us=_cost_us,
        invariant=Invariant(any_page=True),
        about="FlashAttention-3 for long requests, Triton's kernel for short ones, over latents",
    )
)
