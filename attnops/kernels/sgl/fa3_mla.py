"""FlashAttention-3 over latents, absorbed: the rotated part is query and key, the latent is value and, through `q_v`, key as well.

Key and value are strided views of the same rows, so nothing is copied. Read in hopper/tile_size.h and hopper/flash_api.cpp: tiles are
64 x 64; pages are loaded by TMA when they are whole tiles and more than 64 rows (queries times heads) ask for them, by cp.async
otherwise. `fa3` registers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, arch, deterministic, dtypes, one_of, without
from attnops.kernels.sgl.fa3_op import PACKAGE, bfloat16_sinks, call, longest_query, missing, packed_lse, past
from attnops.measured import Roofline, phases
from attnops.problem import Problem

LATENT, ROPE, TILE = 512, 64, 64


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
    used: Tensor | None = None,
) -> None:
    """See `attnops.ops.mla_attention`. The kernel writes into `output` itself. used: as `_fa3.call` has it."""
    output.zero_()  # rows of no request are not written by the kernel, and how many there are only the device knows
    raw = None
    if q_nope.numel() and latent_pages.numel() and page_table.numel() and max_seqlen_q:
        pages = latent_pages[:, :, None]
        latent = q_nope.shape[2]
        # TMA would load stale NaN past a request's end with the rest of its page, and a weight of 0 does not silence it. A left
        # padding selects cp.async, which zeroes what lies there.
        whole = latent_pages.shape[1] % TILE == 0 and max_seqlen_q * q_nope.shape[1] > TILE
        starts = torch.zeros_like(seq_lens, memory_format=torch.contiguous_format) if whole or deterministic(policy) else None
        table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
        out = output if output.stride(2) == 1 else None
        found, raw = call(
            q_pe, pages[..., latent:], pages[..., :latent], sinks, policy, scale, (causal, window_left, -1, softcap, 0), None, out,
            (cu_seqlens_q, None), (longest_query(policy, max_seqlen_q, -1), None), seq_lens.contiguous(), starts, table,
            q_v=q_nope, used=used,
        )  # fmt: skip
        if out is None:
            output.copy_(found.masked_fill(past(cu_seqlens_q, found.shape[0]), 0.0))
    if lse is not None:
        if raw is None:
            raw = output.new_full((output.shape[1], output.shape[0]), float("-inf"), dtype=torch.float32)
        lse.copy_(packed_lse(raw, sinks, cu_seqlens_q))


COST_US = phases(Roofline(18.3, 1.1, 0.86, 0.0057, 1800), Roofline(14.6, 0.41, 0.87, 0.028, 520))


def _unsplit_us(p: Problem) -> float:
    """Under a deterministic policy one block works through all keys of a request and 64 rows, full or not."""
    return max(COST_US(p), 10.0 + 2.0 * TILE * max(p.context.hint, 1) * (p.head_dim + p.v_head_dim) / (5e8 / 132))


NEEDS: tuple[Need, ...] = (
    arch(90),
    dtypes(torch.float16, torch.bfloat16),
    one_of("v_head_dim", LATENT),
    one_of("rope_dim", ROPE),
    bfloat16_sinks,
    one_of("last_dim_contiguous", True),
    *without("mask", "kv_scales"),
)
KERNEL = Kernel(
    "fa3",
    "mla_attention",
    mla_attention,
    needs=NEEDS,
    packages=(PACKAGE,),
    probe=missing,
    cost_us=COST_US,
    invariant=Invariant(cost_us=_unsplit_us),
    about="FlashAttention-3 of sgl-kernel, absorbed latents",
)
