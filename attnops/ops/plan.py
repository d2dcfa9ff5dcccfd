"""Plans made on the host, once a step and outside CUDA graphs: an op that writes two buffers, which the layers' attention then reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.kernel import deterministic, kernels_of
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem, Target
from attnops.reference import data
from attnops.reference.holes import UNKNOWN
from attnops.select import active_policy, choose, key_for

NAMES = {str(d).removeprefix("torch."): d for d in (*check.FLOATS, *check.QUANTISED)}


def _check_plan(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    max_seqlen_q: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: bool = False,
    sinks: bool = False,
    num_pages: int = UNKNOWN,
    plan: Tensor,
    workspace: Tensor,
) -> None:
    check_batch(page_table, seq_lens, cu_seqlens_q, workspace, num_tokens, max_seqlen_q)
    for field, value in (("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        check.need(value >= 1, field, value, ">= 1")
    check.need(q_heads % kv_heads == 0, "q_heads", q_heads, f"a multiple of kv_heads = {kv_heads}")
    check.need(page_size >= 1, "page_size", page_size, ">= 1 token a page")
    check.need(num_pages >= 0, "num_pages", num_pages, ">= 0")
    check.numbers(1.0, window_left, window_right, 0.0)
    check_buffers(plan, workspace, dtype, kv_dtype)


def check_batch(page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, workspace: Tensor, num_tokens: int, max_seqlen_q: int) -> None:
    """What every plan op is told of a batch."""
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.same_device(page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, workspace=workspace)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.need(num_tokens >= 0, "num_tokens", num_tokens, ">= 0")
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")


def check_buffers(plan: Tensor, workspace: Tensor, dtype: str, kv_dtype: str) -> None:
    """The dtypes a plan is for, and what every plan op writes: int64 on the CPU, bytes on the device, both without gaps."""
    check.one_of("dtype", dtype, tuple(NAMES))
    check.one_of("kv_dtype", kv_dtype, tuple(NAMES))
    check.tensor("plan", plan, 1, (torch.int64,), "int64 [n], on the CPU")
    check.tensor("workspace", workspace, 1, (torch.uint8,), "uint8 [n], on the device of page_table")
    if plan.device.type != "cpu":
        fail(InvalidInput, "plan.device", plan.device, "cpu")
    for field, value in (("plan", plan), ("workspace", workspace)):
        if value.stride(0) != 1 and value.shape[0] > 1:
            fail(InvalidInput, f"{field}.stride()", value.stride(), "(1,)")


def _problem_plan(
    page_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    num_tokens: Any,
    max_seqlen_q: Any,
    dtype: str,
    kv_dtype: str,
    window_left: int = -1,
    window_right: int = -1,
    num_pages: Any = UNKNOWN,
    plan: Any = None,
    workspace: Any = None,
    page_size: int,
    causal: bool = True,
    **statics: Any,
) -> Problem:
    return Problem(
        op="plan_paged_attention",
        target=target_of(page_table),
        dtype=NAMES[dtype],
        kv_dtype=NAMES[kv_dtype],
        page_size=page_size,
        causal=causal,
        window=(window_left, window_right),
        tokens=Extent.of(num_tokens),
        batch=Extent.of(page_table.shape[0]),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(page_table.shape[1] * page_size),
        **statics,
    )


def nothing(*_: Any, **__: Any) -> None:
    """The fake of an op that writes its results."""


PLAN = define(
    Op(
        name="plan_paged_attention",
        schema="(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_tokens, SymInt max_seqlen_q, int q_heads, "
        "int kv_heads, int head_dim, int v_head_dim, int page_size, str dtype, str kv_dtype, bool causal=True, int window_left=-1, "
        "int window_right=-1, bool softcap=False, bool sinks=False, SymInt num_pages=2147483647, "
        'str policy="", Tensor(a!) plan, Tensor(b!) workspace) -> ()',
        check=_check_plan,
        fake=nothing,
        problem=_problem_plan,
        reference=data.no_plan,
        about="host plan of paged attention",
    )
)


@dataclass(frozen=True)
class PagedSpec:
    """What layers have in common that share a plan: all of a `paged_attention` call that is the same in every step.

    Layers that differ in one of these, e.g. in their window, need a plan each. dtype: of query and output; kv_dtype: of the pages, the
    query's when None. window: (left, right). softcap: is there one. sinks: their dtype or None. lse: is it asked for.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    v_head_dim: int | None = None
    kv_dtype: torch.dtype | None = None
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: torch.dtype | None = None
    lse: bool = False

    @property
    def statics(self) -> dict[str, Any]:
        """The plan op's static arguments."""
        return {
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.head_dim if self.v_head_dim is None else self.v_head_dim,
            "page_size": self.page_size,
            "dtype": check.name(self.dtype),
            "kv_dtype": check.name(self.kv_dtype or self.dtype),
            "causal": self.causal,
            "window_left": self.window[0],
            "window_right": self.window[1],
            "softcap": self.softcap,
            "sinks": self.sinks is not None,
        }

    def problem(self, target: Target, num_tokens: int, requests: int, max_pages: int, max_seqlen_q: int) -> Problem:
        """The Problem of a layer's `paged_attention` with a plan of the host."""
        given = self.statics
        return Problem(
            op="paged_attention",
            target=target,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            **{n: given[n] for n in ("q_heads", "kv_heads", "head_dim", "v_head_dim", "page_size", "causal", "softcap", "sinks")},
            window=self.window,
            sinks_dtype=self.sinks,
            kv_scales=self.kv_dtype is not None and self.kv_dtype != self.dtype,
            lse=self.lse,
            plan="host",
            tokens=Extent.of(num_tokens),
            batch=Extent.of(requests),
            queries=Extent.of(max_seqlen_q),
            context=Extent.of(max_pages * self.page_size),
        )


def plan_sizes(
    spec: PagedSpec, *, max_tokens: int, max_requests: int, max_pages: int, device: torch.device | str = "cpu"
) -> tuple[int, int]:
    """(length of `plan`, bytes of `workspace`) that serve every kernel that plans, on calls of at most these sizes.

    max_tokens: query tokens of a step. max_requests, max_pages: rows and columns of the page table. (0, 0): no kernel here plans.
    """
    return largest_sizes(PLAN, spec.statics, max_tokens, max_requests, max_pages, torch.device(device))


def largest_sizes(
    op: Op, statics: dict[str, Any], max_tokens: int, max_requests: int, max_pages: int, device: torch.device
) -> tuple[int, int]:
    """As `plan_sizes`, of any plan op."""
    sizes = [(0, 0)]
    for kernel in kernels_of(op.name).values():
        if kernel.plan_sizes is not None and not kernel.absences(Target.of(device)):
            maxima = {"max_tokens": max_tokens, "max_requests": max_requests, "max_pages": max_pages}
            sizes.append(kernel.plan_sizes(**statics, **maxima, device=device))
    return max(n for n, _ in sizes), max(b for _, b in sizes)


def plan_paged_attention(
    spec: PagedSpec,
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
    """Ask which kernel will answer the layers' `paged_attention`; if it plans on the host, write its plan. To be called once a step.

    A host step: it copies the lengths to the CPU, which waits for the current stream, and lies outside CUDA graphs. It writes into
    `plan` and `workspace` only, so a captured model that was given them follows a later plan for the same sizes. Plan, model and the
    next plan belong on one stream: the workspace is read while the model runs.

    Args:
        spec: what the layers ask for.
        page_table: int32 `[B, max_pages]`, seq_lens: int32 `[B]`, cu_seqlens_q: int32 `[B + 1]`: as `paged_attention` takes them.
        num_tokens: rows of the query, padding included. max_seqlen_q: as in `paged_attention`.
        num_pages: pages of the pool; None: unknown, and the plan serves calls with `holes=False` alone.
        plan: int64 on the CPU, workspace: uint8 on the device, of the lengths that `plan_sizes` gives. Give both to the layers.
            A pinned plan is copied from without waiting.
        kernel: plan for this kernel and no other.

    Returns:
        The name of the kernel that the plan is for, or None: the layers will run a kernel that needs no plan, and nothing was written.

    Raises:
        InvalidInput: a shape, dtype, device, number or length breaks the contract, or a buffer is too short.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    return ask(PLAN, spec, (page_table, seq_lens, cu_seqlens_q), num_tokens, max_seqlen_q, num_pages, plan, workspace, kernel)


class Spec(Protocol):
    """What `PagedSpec` and `LatentSpec` have in common."""

    @property
    def statics(self) -> dict[str, Any]: ...

    def problem(self, target: Target, num_tokens: int, requests: int, max_pages: int, max_seqlen_q: int) -> Problem: ...


def ask(
    op: Op,
    spec: Spec,
    tables: tuple[Tensor, Tensor, Tensor],
    num_tokens: int,
    max_seqlen_q: int,
    num_pages: int | None,
    plan: Tensor,
    workspace: Tensor,
    kernel: str | None,
) -> str | None:
    """As `plan_paged_attention`, of any plan op. tables: page_table, seq_lens, cu_seqlens_q."""
    pages = UNKNOWN if num_pages is None else num_pages
    given = {
        "num_tokens": num_tokens,
        "max_seqlen_q": max_seqlen_q,
        "num_pages": pages,
        **spec.statics,
        "plan": plan,
        "workspace": workspace,
    }
    op.check(*tables, **given)
    requests, pages = tables[0].shape
    problem = spec.problem(target_of(tables[0]), num_tokens, requests, pages, max_seqlen_q)
    found = kernels_of(op.name).get(choose(problem, key_for(problem.op, kernel)).name)
    if found is None or found.plan_sizes is None:
        return None
    rest = ";deterministic" if deterministic(active_policy()) else ""
    op.packet.default(*tables, **given, policy=f"kernel={op.name}:{found.name}{rest}")
    return found.name
