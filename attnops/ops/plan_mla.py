"""The host plan of attention over latents (MLA): as `attnops.ops.plan`, for `mla_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.plan import NAMES, ask, check_batch, check_buffers, largest_sizes, nothing
from attnops.problem import Extent, Problem, Target
from attnops.reference import data
from attnops.reference.holes import UNKNOWN


def _check_plan(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    max_seqlen_q: int,
    q_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    causal: bool = True,
    num_pages: int = UNKNOWN,
    plan: Tensor,
    workspace: Tensor,
) -> None:
    check_batch(page_table, seq_lens, cu_seqlens_q, workspace, num_tokens, max_seqlen_q)
    check.need(q_heads >= 1, "q_heads", q_heads, ">= 1")
    check.need(v_head_dim >= 1, "v_head_dim", v_head_dim, ">= 1")
    check.need(head_dim > v_head_dim, "head_dim", head_dim, f"> v_head_dim = {v_head_dim}")
    check.need(page_size >= 1, "page_size", page_size, ">= 1 token a page")
    check.need(num_pages >= 0, "num_pages", num_pages, ">= 0")
    check_buffers(plan, workspace, dtype, kv_dtype)


def _problem_plan(
    page_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    num_tokens: Any,
    max_seqlen_q: Any,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    v_head_dim: int,
    num_pages: Any = UNKNOWN,
    plan: Any = None,
    workspace: Any = None,
    page_size: int,
    **statics: Any,
) -> Problem:
    return Problem(
        op="plan_mla_attention",
        target=target_of(page_table),
        dtype=NAMES[dtype],
        kv_dtype=NAMES[kv_dtype],
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rope_dim=head_dim - v_head_dim,
        page_size=page_size,
        tokens=Extent.of(num_tokens),
        batch=Extent.of(page_table.shape[0]),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(page_table.shape[1] * page_size),
        **statics,
    )


PLAN = define(
    Op(
        name="plan_mla_attention",
        schema="(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_tokens, SymInt max_seqlen_q, int q_heads, "
        "int head_dim, int v_head_dim, int page_size, str dtype, str kv_dtype, bool causal=True, "
        'SymInt num_pages=2147483647, str policy="", Tensor(a!) plan, Tensor(b!) workspace) -> ()',
        check=_check_plan,
        fake=nothing,
        problem=_problem_plan,
        reference=data.no_plan,
        about="host plan of attention over latents",
    )
)


@dataclass(frozen=True)
class LatentSpec:
    """What layers have in common that share a plan: all of an `mla_attention` call that is the same in every step.

    q_heads: of the query. head_dim: Dc + Dr, the numbers of a latent; v_head_dim: Dc. page_size: in tokens. dtype: of query and output;
    kv_dtype: of the pages, the query's when None. lse: is it asked for.
    """

    q_heads: int
    page_size: int
    dtype: torch.dtype
    head_dim: int = 576
    v_head_dim: int = 512
    kv_dtype: torch.dtype | None = None
    causal: bool = True
    lse: bool = False

    @property
    def statics(self) -> dict[str, Any]:
        """The plan op's static arguments."""
        return {
            "q_heads": self.q_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "page_size": self.page_size,
            "dtype": check.name(self.dtype),
            "kv_dtype": check.name(self.kv_dtype or self.dtype),
            "causal": self.causal,
        }

    def problem(self, target: Target, num_tokens: int, requests: int, max_pages: int, max_seqlen_q: int) -> Problem:
        """The Problem of a layer's `mla_attention` with a plan of the host."""
        return Problem(
            op="mla_attention",
            target=target,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            q_heads=self.q_heads,
            kv_heads=1,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            rope_dim=self.head_dim - self.v_head_dim,
            page_size=self.page_size,
            causal=self.causal,
            kv_scales=(self.kv_dtype or self.dtype) in check.QUANTISED,
            lse=self.lse,
            plan="host",
            tokens=Extent.of(num_tokens),
            batch=Extent.of(requests),
            queries=Extent.of(max_seqlen_q),
            context=Extent.of(max_pages * self.page_size),
        )


def plan_mla_sizes(
    spec: LatentSpec, *, max_tokens: int, max_requests: int, max_pages: int, device: torch.device | str = "cpu"
) -> tuple[int, int]:
    """(length of `plan`, bytes of `workspace`) that serve every kernel that plans, on calls of at most these sizes.

    max_tokens: query tokens of a step. max_requests, max_pages: rows and columns of the page table. (0, 0): no kernel here plans.
    """
    return largest_sizes(PLAN, spec.statics, max_tokens, max_requests, max_pages, torch.device(device))


def plan_mla_attention(
    spec: LatentSpec,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    max_seqlen_q: int,
    num_pages: int | None = None,
    plan: Tensor,
    workspace: Tensor,
    kernel: str | None = None,
) -> str | None:
    """Ask which kernel will answer the layers' `mla_attention`; if it plans on the host, write its plan. To be called once a step.

    A host step, as `plan_paged_attention`: it waits for the current stream, lies outside CUDA graphs, and writes into `plan` and
    `workspace` only. The plan holds for the lengths it was made from; the page table may change under it, its holes may not.

    Args:
        spec: what the layers ask for.
        page_table: int32 `[B, max_pages]`, seq_lens: int32 `[B]`, cu_seqlens_q: int32 `[B + 1]`: as `mla_attention` takes them.
        num_tokens: rows of the query, padding included. max_seqlen_q: as in `mla_attention`.
        num_pages: pages of the pool; None: unknown, and the plan serves calls with `holes=False` alone.
        plan: int64 on the CPU, workspace: uint8 on the device, of the lengths that `plan_mla_sizes` gives. Give both to the layers.
        kernel: plan for this kernel and no other.

    Returns:
        The name of the kernel that the plan is for, or None: the layers will run a kernel that needs no plan, and nothing was written.

    Raises:
        InvalidInput: a shape, dtype, device, number or length breaks the contract, or a buffer is too short.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    return ask(PLAN, spec, (page_table, seq_lens, cu_seqlens_q), num_tokens, max_seqlen_q, num_pages, plan, workspace, kernel)
