"""`flashmla`: FlashMLA inside the sgl_kernel wheel, for latents of 512 + 64: dense decode on SM90, sparse attention (`_flashmla_sparse`).

Called without a schedule, the raw ops make it on the device from this call's lengths: no state, no sync, and a captured graph follows
its inputs. Dense decode takes the one that lies in a plan of `decode_rows` made for its heads, and starts one kernel less in every
layer. It takes every query token as a row of its own: the raw op wants the same number of queries of every request, and the contract
lets them differ. A row without keys gets 0 from the kernel itself, so that padding needs no pass over the output. It is lowered in
place: the compiler joins the query's parts where they are made, and takes the raw op's result for the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Core, Inline, Invariant, Kernel, Plan, arch, at_most, dtypes, extent_at_most, one_of, register, without
from attnops.kernels.sgl import flashmla_schedule as _schedule
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.flashmla_sparse import HEADS, LATENT, ROPE, sparse_mla_attention
from attnops.kernels.sgl.flashmla_sparse import LIBRARY as LIBRARY
from attnops.kernels.shared.decode import adjoin, batch_by_token, whole
from attnops.measured import Roofline, phases
from attnops.problem import Problem, Refusal

PAGE = 64
MOST_QUERIES = 8
"""Of one request. Every token reads all keys of its request."""


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
    tokens, heads = q_nope.shape[:2]
    tables, lengths, schedule = batch_by_token(plan, page_table, seq_lens, cu_seqlens_q, tokens, causal, heads, (False,))
    out, z = torch.ops.attnops.mla_attention__flashmla(*adjoin(q_nope, q_pe), latent_pages, tables, lengths, schedule, scale)
    output.copy_(out)
    if lse is not None:
        # The kernel says +inf where there is no key.
        lse.copy_(torch.where(z == float("inf"), float("-inf"), z))


def _core(
    q_nope: Tensor, q_pe: Tensor | None, latent_pages: Tensor, tables: Tensor, lengths: Tensor, schedule: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    wheel.load("dense_decode_fwd", LIBRARY)
    parts, splits = (None, None) if schedule is None else _schedule.split(schedule, *q_nope.shape[:2])
    # A single query at the last key it sees sees every key, causal or not.
    out, z, _, _ = torch.ops.sgl_kernel.dense_decode_fwd(
        whole(q_nope, q_pe)[:, None], latent_pages[:, :, None], LATENT, lengths, tables, scale, False, parts, splits
    )
    return out[:, 0], z[:, :, 0]


def _fake_core(q_nope: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q_nope.new_empty((*q_nope.shape[:2], LATENT)), q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)


PLANNED = phases(Roofline(23.2, 1.2, 1.1, 0.0013, 25_000), Roofline(16.3, 0.19, 1.0, 0.0046, 2700))


def _cost_us(p: Problem) -> float:
    return PLANNED(p) + _schedule.cost_us(p)


def _sparse_cost_us(p: Problem) -> float:
    """The larger of the latents' bytes over the bandwidth and the products over the throughput it may reach on SM90.

    bfloat16 latents: a wave of as many tokens as there are SMs costs the same whether it is full or not.
    """
    blocks = max(p.tokens.hint, 1) * (1 if p.q_heads <= HEADS[0] else 2)
    packed = p.kv_dtype == torch.uint8
    filled = blocks if packed else -(-blocks // 132) * 132
    products = 2 * HEADS[0] * (p.head_dim + p.v_head_dim) / (4.1e8 if packed else 6e8)
    return (15.0 if packed else 10.0) + max(p.context.hint, 1) * max(filled * products, p.tokens.hint * (656 if packed else 1152) / 3.5e6)


def _unsplit(p: Problem) -> Refusal | None:
    """A token of bfloat16 latents has blocks of its own. How the keys of packed latents are split follows from the whole batch."""
    return Refusal("kv_dtype", p.kv_dtype, "bfloat16 (policy.deterministic)") if p.kv_dtype == torch.uint8 else None


register(
    Kernel(
        "flashmla",
        "mla_attention",
        mla_attention,
        needs=(
            arch(90),
            dtypes(torch.float16, torch.bfloat16),
            one_of("v_head_dim", LATENT),
            one_of("rope_dim", ROPE),
            one_of("page_size", PAGE),
            extent_at_most("queries", MOST_QUERIES),
            one_of("last_dim_contiguous", True),
            *without("mask", "sinks", "kv_scales", "softcap", "windowed"),
        ),
        packages=(wheel.package("0.4.3"),),
        probe=lambda target: wheel.lacks(target, LIBRARY),
        cost_us=_cost_us,
        plan=Plan(device=_schedule.plan),
        inline=Inline(
            core=Core(
                "(Tensor q_nope, Tensor? q_pe, Tensor latent_pages, Tensor tables, Tensor lengths, "
                "Tensor? schedule, float scale) -> (Tensor output, Tensor lse)",
                _core,
                _fake_core,
            )
        ),
        about="FlashMLA dense decode (sgl_kernel)",
    )
)
register(
    Kernel(
        "flashmla",
        "sparse_mla_attention",
        sparse_mla_attention,
        needs=(
            arch(90, 100),
            one_of("dtype", torch.bfloat16),
            one_of("kv_dtype", torch.bfloat16, torch.uint8),
            at_most("q_heads", HEADS[-1]),
            one_of("v_head_dim", LATENT),
            one_of("rope_dim", ROPE),
            one_of("last_dim_contiguous", True),
            one_of("pages_packed", True),
            *without("kv_scales"),
        ),
        packages=(wheel.package("0.4.3"),),
        probe=lambda target: wheel.lacks(target, LIBRARY),
        cost_us=_sparse_cost_us,
        invariant=Invariant((_unsplit,)),
        about="FlashMLA sparse attention (sgl_kernel): packed or bfloat16 latents",
    )
)
