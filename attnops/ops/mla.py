"""Attention over pages of latents (MLA), one op for decode and extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last
from attnops.ops.holes import whole
from attnops.ops.latent import STORED, check_pages, check_stored
from attnops.ops.varlen import token_mask
from attnops.problem import Extent, Problem
from attnops.promises import refuse_plan_of_holes
from attnops.reference import mla
from attnops.select import key_for


def _check_mla(
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
    holes: bool = True,
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    queries = (*check.FLOATS, torch.float8_e4m3fn)
    check.tensor("q_nope", q_nope, 3, queries, "[T, H, Dc]")
    check.tensor("q_pe", q_pe, 3, (q_nope.dtype,), "[T, H, Dr]")
    for dim, meaning in ((0, "the tokens of q_nope"), (1, "the heads of q_nope")):
        check.equal(f"q_pe.shape[{dim}]", q_pe.shape[dim], q_nope.shape[dim], meaning)
    check_pages(latent_pages, q_nope.shape[2], q_pe.shape[2])
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.tensor("output", output, 3, check.FLOATS if q_nope.dtype in STORED else (q_nope.dtype,), "[T, H, Dc]")
    check.same_device(
        q_nope, q_pe=q_pe, latent_pages=latent_pages, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
        mask=mask, sinks=sinks, q_scale=q_scale, kv_scale=kv_scale, output=output, lse=lse, workspace=workspace,
    )  # fmt: skip
    check.plan(q_nope.device, plan)
    refuse_plan_of_holes(plan, holes)
    check.workspace(workspace)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.need(q_nope.shape[1] >= 1, "q_nope.shape[1]", q_nope.shape[1], ">= 1 head")
    if q_nope.dtype in STORED and q_scale is None:
        fail(InvalidInput, "q_scale", "None", f"a scale, because the query is {check.name(q_nope.dtype)}")
    check_stored(latent_pages, kv_scale, q_nope.dtype)
    check.scales(1, q_scale=q_scale, kv_scale=kv_scale)
    check.sinks(sinks, q_nope.shape[1])
    check.numbers(scale, window_left, -1, softcap)
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")
    token_mask(mask, q_nope, page_table.shape[1] * latent_pages.shape[1], "max_pages * page_size")
    for dim in range(3):
        check.equal(f"output.shape[{dim}]", output.shape[dim], q_nope.shape[dim], "[T, H, Dc]")
    if lse is not None:
        check.tensor("lse", lse, 2, (torch.float32,), "[T, H]")
        for dim in range(2):
            check.equal(f"lse.shape[{dim}]", lse.shape[dim], q_nope.shape[dim], "[T, H]")


def _problem_mla(
    q_nope: Any,
    q_pe: Any,
    latent_pages: Any,
    page_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    mask: Any = None,
    sinks: Any = None,
    q_scale: Any = None,
    kv_scale: Any = None,
    plan: Any = None,
    *,
    max_seqlen_q: Any,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    holes: bool = True,
    output: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Problem:
    page_size = int(latent_pages.shape[1])
    return Problem(
        op="mla_attention",
        target=target_of(q_nope),
        dtype=q_nope.dtype,
        kv_dtype=latent_pages.dtype,
        q_heads=int(q_nope.shape[1]),
        kv_heads=1,
        head_dim=int(latent_pages.shape[2]),
        v_head_dim=int(q_nope.shape[2]),
        rope_dim=int(q_pe.shape[2]),
        page_size=page_size,
        causal=causal,
        window=(window_left, -1),
        softcap=softcap > 0,
        sinks=sinks is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        kv_scales=q_scale is not None or kv_scale is not None,
        lse=lse is not None,
        plan=check.plan_kind(plan),
        holes=holes,
        last_dim_contiguous=_packed_last(q_nope) and _packed_last(q_pe) and _packed_last(latent_pages),
        pages_packed=latent_pages.stride() == (page_size * latent_pages.shape[2], latent_pages.shape[2], 1),
        workspace=check.workspace_bytes(workspace),
        tokens=Extent.of(q_nope.shape[0]),
        batch=Extent.of(page_table.shape[0]),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(page_table.shape[1] * page_size),
    )


MLA = define(
    Op(
        name="mla_attention",
        schema="(Tensor q_nope, Tensor q_pe, Tensor latent_pages, Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        "Tensor? mask=None, Tensor? sinks=None, Tensor? q_scale=None, Tensor? kv_scale=None, Tensor? plan=None, *, "
        "SymInt max_seqlen_q, float scale, bool causal=True, int window_left=-1, float softcap=0.0, "
        'bool holes=True, str policy="", Tensor(a!) output, Tensor(b!)? lse=None, Tensor(c!)? workspace=None) -> ()',
        check=_check_mla,
        fake=lambda *_, **__: None,
        problem=_problem_mla,
        reference=mla.mla_attention,
        about="attention over pages of latents (MLA), decode and extend",
    )
)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    holes: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of new tokens over pages that hold their latents (MLA, absorbed form). No gradient.

    Every head reads the same latents: scores = scale * (q_nope . c + q_pe . k_pe), output = P . c, with c the first Dc numbers of a
    latent and k_pe the other Dr. W_UK has been applied to q_nope and W_UV is yet to be applied to the output, both by the caller:
    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, the new tokens of all requests one after the other; float, or float8_e4m3fn
            with q_scale.
        latent_pages: `[P, page, Dc + Dr]`, the query's dtype, or float8_e4m3fn/int8 with kv_scale.
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, holes: as in `paged_attention`.
        scale: what the scores are multiplied by; DeepSeek-V3 has 1/sqrt(128 + 64), times the square of YaRN's mscale: never
            1/sqrt(Dc + Dr), hence no default.
        causal: query i of n of a request with L keys sees keys up to L - n + i.
        window_left: keys further back than this are not seen; -1: unbounded.
        softcap, mask, sinks: as in `paged_attention`.
        q_scale, kv_scale: float32 `[1]`, what the stored query and the stored latents are multiplied by.
        plan: what a kernel's plan op made for this batch: int32 on the query's device, or int64 on the CPU. Kernels that plan
            otherwise, or not at all, do not read it.
        output: `[T, H, Dc]` to write into, of the query's dtype, or any float dtype for a quantised query; allocated when None
            (bfloat16 for a quantised query). lse: float32 `[T, H]`, natural log, to write into, or None.
        workspace: uint8 `[bytes]`, scratch for kernels that ask for one, zeroed once by its owner, the caller; see
            `attnops.explain(...).workspace_bytes`.
        kernel: force a kernel by name for this call.

    Returns:
        `output`. A token without keys, and tokens past `cu_seqlens_q[B]`, give 0 and lse -inf.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    if output is None:
        output = torch.empty(q_nope.shape, dtype=torch.bfloat16 if q_nope.dtype in STORED else q_nope.dtype, device=q_nope.device)
    if mask is not None:
        check.mask(mask)
    if holes and plan is None and torch.compiler.is_compiling():
        page_table, seq_lens, holes = whole(
            latent_pages, page_table, seq_lens, cu_seqlens_q, mask=mask, causal=causal, window=(window_left, -1)
        )
    torch.ops.attnops.mla_attention.default(
        q_nope, q_pe, latent_pages, page_table, seq_lens, cu_seqlens_q, mask, sinks, q_scale, kv_scale, plan,
        max_seqlen_q=max_seqlen_q, scale=scale, causal=causal, window_left=window_left, softcap=softcap, holes=holes,
        policy=key_for("mla_attention", kernel), output=output, lse=lse, workspace=workspace,
    )  # fmt: skip
    return output
