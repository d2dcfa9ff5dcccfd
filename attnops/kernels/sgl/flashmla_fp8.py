"""`flashmla_fp8`: the dense FP8 decode of FlashMLA inside the sgl_kernel wheel: query and latents in float8_e4m3fn, SM90.

Weights are rounded to float8_e4m3fn before they meet the latents, and those below 2^-10 of the largest vanish: `tolerance` says so.
A row without keys would make the kernel read before its page table, so it is given one key, and what comes of it is thrown away.
Lowered in place, its schedule out of a plan made for float8; see `flashmla`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Core, Inline, Kernel, Plan, Tolerance, arch, dtypes, extent_at_most, one_of, register, without
from attnops.kernels.sgl import flashmla_schedule as _schedule
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.flashmla_sparse import LIBRARY as LIBRARY
from attnops.kernels.shared.decode import adjoin, batch_by_token, whole
from attnops.measured import Roofline
from attnops.problem import Problem

PAGE, LATENT, ROPE = 64, 512, 64
MOST_QUERIES = 8


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
    """See `attnops.ops.mla_attention`. plan: from `decode_rows`, or None to make it here."""
    if not (output.numel() and page_table.numel() and latent_pages.numel()):
        output.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    assert q_scale is not None and kv_scale is not None  # the op's check
    tokens, heads = q_nope.shape[:2]
    tables, lengths, schedule = batch_by_token(plan, page_table, seq_lens, cu_seqlens_q, tokens, causal, heads, (True,))
    out, z = torch.ops.attnops.mla_attention__flashmla_fp8(
        *adjoin(q_nope, q_pe), latent_pages, tables, lengths.clamp(min=1), schedule, q_scale, kv_scale, scale
    )
    blind = (lengths == 0)[:, None]
    output.copy_(out.masked_fill(blind[..., None], 0.0))
    if lse is not None:
        lse.copy_(z.masked_fill(blind, float("-inf")))


def _core(
    q_nope: Tensor,
    q_pe: Tensor | None,
    latent_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    schedule: Tensor | None,
    q_scale: Tensor,
    kv_scale: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    wheel.load("fwd_kvcache_mla_fp8", LIBRARY)
    tokens, heads = q_nope.shape[:2]
    parts, splits = _schedule.made(lengths, heads, True) if schedule is None else _schedule.split(schedule, tokens, heads)
    out, z = torch.ops.sgl_kernel.fwd_kvcache_mla_fp8(
        whole(q_nope, q_pe)[:, None], latent_pages[:, :, None], LATENT, lengths, tables, scale, False, parts, splits,
        q_scale.contiguous(), kv_scale.contiguous(),
    )  # fmt: skip
    return out[:, 0], z[:, :, 0]


def _fake_core(q_nope: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q_nope.new_empty((*q_nope.shape[:2], LATENT), dtype=torch.bfloat16), q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)


PLANNED = Roofline(24.0, 0.75, 1.0, 0.0013, 25_000)
"""Not in a table: as `flashmla` where they are alike."""


def _cost_us(p: Problem) -> float:
    return PLANNED(p) + _schedule.cost_us(p)


register(
    Kernel(
        "flashmla_fp8",
        "mla_attention",
        mla_attention,
        needs=(
            arch(90),
            dtypes(torch.float8_e4m3fn),
            one_of("v_head_dim", LATENT),
            one_of("rope_dim", ROPE),
            one_of("page_size", PAGE),
            extent_at_most("queries", MOST_QUERIES),
            _schedule.few_tokens,
            one_of("last_dim_contiguous", True),
            *without("mask", "sinks", "softcap", "windowed"),
        ),
        packages=(wheel.package("0.4.3"),),
        probe=lambda target: wheel.lacks(target, LIBRARY),
        cost_us=_cost_us,
        tolerance=Tolerance(16.0, rounded_sums=True),
        plan=Plan(device=_schedule.plan),
        inline=Inline(
            core=Core(
                "(Tensor q_nope, Tensor? q_pe, Tensor latent_pages, Tensor tables, Tensor lengths, Tensor? schedule, "
                "Tensor q_scale, Tensor kv_scale, float scale) -> (Tensor output, Tensor lse)",
                _core,
                _fake_core,
            )
        ),
        about="FlashMLA dense decode in float8 (sgl_kernel)",
    )
)
