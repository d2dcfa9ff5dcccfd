"""`fa3_triton`: attention over latents where the number of a request's own queries decides who serves it.

Triton's kernel takes requests of at most DECODE_QUERIES queries and splits their keys; FlashAttention-3 takes the longer ones, which fill
the device without splits. Neither kernel lets a batch mate change a request's bits, and a request's own length is none of its mates'.
So a deterministic policy has the speed of both. Other policies choose a kernel by the batch, and need no mixture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, register
from attnops.kernels.sgl import fa3_mla as _fa3_mla
from attnops.kernels.sgl import fa3_op as _fa3
from attnops.kernels.triton import attention as triton
from attnops.kernels.triton.launch.plan import DECODE_QUERIES
from attnops.problem import Problem


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.ops.mla_attention`."""
    args = (q_nope, q_pe, latent_pages, page_table, seq_lens, cu_seqlens_q, None, sinks)
    given: dict[str, Any] = {"scale": scale, "causal": causal, "window_left": window_left, "softcap": softcap, "output": output, "lse": lse}
    deep = min(max_seqlen_q, q_nope.shape[0]) > DECODE_QUERIES
    if deep:
        queries = cu_seqlens_q.diff()
        used = torch.where(queries > DECODE_QUERIES, queries, 0)
        _fa3_mla.mla_attention(*args, **given, max_seqlen_q=max_seqlen_q, policy="deterministic", used=used)
    triton.mla_attention(*args, **given, max_seqlen_q=max_seqlen_q, policy="deterministic", most=DECODE_QUERIES if deep else 0)


def _cost_us(p: Problem) -> float:
    """As the kernel that serves the longest request, and a launch of the other. Alone each is the plainer choice."""
    return _fa3_mla.COST_US(p) + 10.0 if p.queries.hint > DECODE_QUERIES else triton.LATENTS(p) + 0.5


register(
    Kernel(
        "fa3_triton",
        "mla_attention",
        mla_attention,
        needs=(*_fa3_mla.NEEDS, *triton.LATENT_NEEDS),
        packages=(_fa3.PACKAGE, triton.PACKAGE),
        probe=_fa3.missing,
        cost_us=_cost_us,
        invariant=Invariant(),
        about="FlashAttention-3 for long requests, Triton's kernel for short ones, over latents",
    )
)
