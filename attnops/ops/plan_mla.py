"""The host plan of attention over latents (MLA): as `attnops.ops.plan`, for `mla_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops.call import INT32, KW_ONLY, QUANTISED, Call, Sizes, arg, name, need, record
from attnops.ops.op import Op, define
from attnops.ops.plan import NAMES, SIZES, ask, buffers, dtypes, largest_sizes
from attnops.problem import Extent, Problem, Target
from attnops.reference import data
from attnops.reference.holes import UNKNOWN


def _rules(call: Any, sizes: Sizes) -> None:
    need(call.head_dim > call.v_head_dim, "head_dim", call.head_dim, f"> v_head_dim = {call.v_head_dim}")
    buffers(call)


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"plan": "none", "workspace": 0, "kv_heads": 1, "rope_dim": call.head_dim - call.v_head_dim, **dtypes(call)}


@record("plan_mla_attention", rules=_rules, facts=_facts, problem=SIZES)
class PlanMlaAttention(Call):
    """The host plan of attention over latents."""

    page_table: Tensor = arg("B, max_pages", INT32)
    seq_lens: Tensor = arg("B", INT32)
    cu_seqlens_q: Tensor = arg("B + 1", INT32)
    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True)
    max_seqlen_q: int = arg(least=0, symbolic=True)
    q_heads: int = arg(least=1)
    head_dim: int = arg(least=1)
    v_head_dim: int = arg(least=1)
    page_size: int = arg(least=1)
    dtype: str = arg(choices=tuple(NAMES))
    kv_dtype: str = arg(choices=tuple(NAMES))
    causal: bool = arg(default=True, always=True)
    num_pages: int = arg(default=UNKNOWN, least=0, symbolic=True, always=True)
    policy: str = ""
    plan: Tensor = arg("words", (torch.int64,), written=True, any_device=True)
    workspace: Tensor = arg("bytes", (torch.uint8,), written=True)


PLAN = define(Op(PlanMlaAttention, data.no_plan, about="host plan of attention over latents"))


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
            "dtype": name(self.dtype),
            "kv_dtype": name(self.kv_dtype or self.dtype),
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
            kv_scales=(self.kv_dtype or self.dtype) in QUANTISED,
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
