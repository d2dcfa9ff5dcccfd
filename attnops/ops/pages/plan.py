"""Plans made on the host, once a step and outside CUDA graphs: ops that write two buffers, which
the layers' attention then reads.

`plan_paged_attention` plans for `paged_attention`, `plan_mla_attention` for `mla_attention`,
attention over latents. An op `plan_X` has a record; a kind of call holds what the layers' calls of
`X` share; the public function makes a record of it and a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import plain_only
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import deterministic, kernels_of
from attnops.core.op import OPS, Op, define
from attnops.core.problem import LEAVES, Extent, Extents, Problem, Target, altered, leaf, repeatable
from attnops.core.record import (
    FLOATS,
    INT32,
    KW_ONLY,
    QUANTISED,
    Sizes,
    arg,
    changed,
    check,
    group,
    name,
    need,
    record,
)
from attnops.core.select import active_policy, choose, key_for
from attnops.ops import rules, typical
from attnops.ops.metadata.reference import UNKNOWN
from attnops.ops.pages import reference

NAMES = {name(d): d for d in (*FLOATS, *QUANTISED)}
ON_HOST = "seq_lens_cpu", "cu_seqlens_q_cpu"
SIZES = {"tokens": "num_tokens", "context": "max_pages * page_size"}


def _buffers(call: Any) -> None:
    """The plan is on the CPU, and neither buffer has gaps. So are the lengths for the host, both or
    neither."""
    on_host = {name: getattr(call, name) for name in ("plan", *ON_HOST)}
    for field, given in on_host.items():
        if given is not None and given.device.type != "cpu":
            fail(InvalidInput, f"{field}.device", given.device, "cpu")
    both = (call.seq_lens_cpu is None) == (call.cu_seqlens_q_cpu is None)
    need(both, ", ".join(ON_HOST), "one of them", "both or neither")
    rules.contiguous("plan", call.plan)
    rules.contiguous("workspace", call.workspace)


def _paged_rules(call: Any, sizes: Sizes) -> None:
    need(
        call.q_heads % call.kv_heads == 0,
        "q_heads",
        call.q_heads,
        f"a multiple of kv_heads = {call.kv_heads}",
    )
    _buffers(call)


def _mla_rules(call: Any, sizes: Sizes) -> None:
    need(
        call.head_dim > call.v_head_dim,
        "head_dim",
        call.head_dim,
        f"> v_head_dim = {call.v_head_dim}",
    )
    _buffers(call)


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    """The dtypes are those of the layers' calls."""
    return {"dtype": NAMES[call.dtype], "kv_dtype": NAMES[call.kv_dtype]}


@group
class HostPlan(rules.Paged):
    """The arguments of both ops."""

    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True, holds="tokens")
    max_seqlen_q: int = arg(least=0, symbolic=True, holds="most_queries")
    q_heads: int = arg(least=1)
    head_dim: int = arg(least=1)
    v_head_dim: int = arg(least=1)
    page_size: int = arg(least=1)
    dtype: str = arg(choices=tuple(NAMES))
    kv_dtype: str = arg(choices=tuple(NAMES))
    causal: bool = arg(default=True, always=True, facts=rules.CAUSAL)
    num_pages: int = arg(default=UNKNOWN, least=0, symbolic=True, always=True, holds="page_count")
    plan: Tensor = arg("words", (torch.int64,), written=True, any_device=True)
    workspace: Tensor = arg("bytes", (torch.uint8,), written=True)
    seq_lens_cpu: Tensor | None = arg("B", INT32, default=None, hint=True, any_device=True)
    cu_seqlens_q_cpu: Tensor | None = arg("B + 1", INT32, default=None, hint=True, any_device=True)


KEYWORDS = """num_tokens max_seqlen_q q_heads kv_heads head_dim v_head_dim page_size dtype kv_dtype
    causal window_left window_right softcap sinks num_pages plan workspace
    seq_lens_cpu cu_seqlens_q_cpu"""


@record("plan_paged_attention", rules=_paged_rules, facts=_facts, problem=SIZES, keywords=KEYWORDS)
class PlanPagedAttention(HostPlan):
    """The host plan of paged attention."""

    _: KW_ONLY
    kv_heads: int = arg(least=1)
    window_left: int = rules.LEFT_OF_ANY_KERNEL
    window_right: int = rules.RIGHT_OF_ANY_KERNEL
    softcap: bool = arg(default=False, always=True, facts=rules.SOFTCAP)
    sinks: bool = arg(default=False, always=True, facts=rules.SINKS)


@record(
    "plan_mla_attention",
    rules=_mla_rules,
    facts=_facts,
    problem={**SIZES, "kv_heads": "1", "rope_dim": "head_dim - v_head_dim"},
)
class PlanMlaAttention(HostPlan):
    """The host plan of attention over latents."""


define(
    Op(
        PlanPagedAttention,
        reference.no_plan,
        about="host plan of paged attention",
        typical=({**typical.PREFILL, "page_size": 64},),
    )
)
define(
    Op(
        PlanMlaAttention,
        reference.no_plan,
        about="host plan of attention over latents",
        typical=({**typical.SIZES, **typical.DEEPSEEK, "causal": True},),
    )
)


def paged_layers(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    v_head_dim: int | None = None,
    *,
    sinks: torch.dtype | None = None,
    **more: Any,
) -> Problem:
    """The kind of `paged_attention` calls that layers share a plan for, the same in every step.
    Layers that differ in it need a plan each.

    Args:
        q_heads, kv_heads: of query and pages. head_dim, v_head_dim: of key and value; None: the
            key's.
        page_size: in tokens. 0: not known yet.
        dtype: of query and output.
        sinks: their dtype, or None.
        more: further fields of a Problem. kv_dtype: of the pages, unless it is the query's. causal:
            True unless given. window: (left, right). softcap, lse: do the layers ask for it?

    Raises:
        InvalidInput: a window that is none. TypeError: another name.
    """
    given = {"causal": True, "sinks": sinks is not None, "sinks_dtype": sinks, **more}
    given["window"] = eager_cache.window(given.get("window", rules.UNBOUNDED))
    return Problem.kind(
        "paged_attention",
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        dtype=dtype,
        **given,
    )


def latent_layers(
    q_heads: int,
    page_size: int,
    dtype: torch.dtype,
    head_dim: int = 576,
    v_head_dim: int = 512,
    *,
    causal: bool = True,
    **more: Any,
) -> Problem:
    """As `paged_layers`, of `mla_attention`. head_dim: Dc + Dr, the numbers of a latent and its
    rotated key. v_head_dim: Dc."""
    return Problem.kind(
        "mla_attention",
        q_heads=q_heads,
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rope_dim=head_dim - v_head_dim,
        page_size=page_size,
        dtype=dtype,
        causal=causal,
        **more,
    )


def over_latents(layers: Problem) -> bool:
    """Are they layers of `latent_layers`?"""
    return layers.op == "mla_attention"


def step_of(
    layers: Problem,
    target: Target,
    num_tokens: int,
    requests: int,
    max_pages: int,
    max_seqlen_q: int,
) -> Problem:
    """The Problem of a layer's call with a plan made on the host."""
    sizes = Extents(
        *map(Extent.of, (num_tokens, requests, max_seqlen_q, max_pages * layers.page_size))
    )
    quantised = layers.kv_dtype in QUANTISED
    return altered(
        layers,
        target=target,
        sizes=sizes,
        kv_scales=quantised,
        plan="host",
        repeatable=repeatable(),
    )


def statics_of(layers: Problem) -> dict[str, Any]:
    """The static arguments of the op `plan_<op>` that plans for these layers."""
    left, right = layers.rules.window
    told = {
        "dtype": name(layers.dtype),
        "kv_dtype": name(layers.kv_dtype),
        "window_left": left,
        "window_right": right,
    }
    fields = (
        a.name
        for a in OPS[f"plan_{layers.op}"].spec.args
        if not a.tensor and (a.name in told or a.name in LEAVES)
    )
    return {field: told[field] if field in told else leaf(layers, field) for field in fields}


def plan_sizes(
    spec: Problem,
    *,
    max_tokens: int,
    max_requests: int,
    max_pages: int,
    device: torch.device | str = "cpu",
) -> tuple[int, int]:
    """The length of `plan` and the bytes of `workspace` that are enough for every kernel that
    plans, (0, 0) where no kernel does.

    Args:
        spec: what the layers share, of `paged_layers` or `latent_layers`. device: of their tensors.
        max_tokens: the most query tokens of a step. max_requests, max_pages: rows and columns of
            the page table.
    """
    device, sizes = torch.device(device), [(0, 0)]
    maxima = {"max_tokens": max_tokens, "max_requests": max_requests, "max_pages": max_pages}
    for kernel in kernels_of(f"plan_{spec.op}").values():
        if kernel.plan.sizes is not None and not kernel.absences(Target.of(device)):
            sizes.append(kernel.plan.sizes(**statics_of(spec), **maxima, device=device))
    return max(n for n, _ in sizes), max(b for _, b in sizes)


def plan_paged_attention(
    spec: Problem,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    max_seqlen_q: int,
    num_pages: int | None = None,
    plan: Tensor,
    workspace: Tensor,
    seq_lens_cpu: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
    kernel: str | None = None,
) -> str | None:
    """Write the plan of a step for the layers' attention, if the kernel that will run them plans on
    the host.

    Call it once a step, outside CUDA graphs and on the model's stream. It waits for the stream and
    copies the lengths to the CPU, unless you pass them. It writes into `plan` and `workspace` only,
    so that a captured model that reads them follows a later plan of the same sizes. The plan is for
    these lengths. The page table of latents may change afterwards, its holes may not.

    Args:
        spec: what the layers share, of `paged_layers` or `latent_layers`.
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q: as in `paged_attention`.
        num_tokens: rows of the query, padding rows included.
        num_pages: pages of the pool. None: unknown; the plan then serves calls with `holes=False`
            only.
        plan: int64 on the CPU, of the length that `plan_sizes` gives. Pass it to the layers. Copies
            from a pinned plan do not wait.
        workspace: uint8 on the device, likewise.
        seq_lens_cpu, cu_seqlens_q_cpu: int32 `[B]` and `[B + 1]` on the CPU, the values of
            `seq_lens` and `cu_seqlens_q`, both or neither. They promise a page table without holes.
        kernel: plan for this kernel only.

    Returns:
        The name of the kernel that the plan is for, or None where the layers will run a kernel that
        needs no plan. The buffers are then unchanged.

    Raises:
        InvalidInput: a shape, dtype, device, number or length breaks the contract, or a buffer is
            too short.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    op = OPS[f"plan_{spec.op}"]
    make: Any = op.call
    call = make(
        page_table,
        seq_lens,
        cu_seqlens_q,
        num_tokens=num_tokens,
        max_seqlen_q=max_seqlen_q,
        num_pages=UNKNOWN if num_pages is None else num_pages,
        plan=plan,
        workspace=workspace,
        seq_lens_cpu=seq_lens_cpu,
        cu_seqlens_q_cpu=cu_seqlens_q_cpu,
        **statics_of(spec),
    )
    plain_only(op.names, call)
    check(call)
    requests, pages = page_table.shape
    problem = step_of(spec, Target.of(page_table.device), num_tokens, requests, pages, max_seqlen_q)
    found = kernels_of(op.name).get(choose(problem, key_for(problem.op, kernel)).name)
    if found is None or found.plan.sizes is None:
        return None
    rest = ";deterministic" if deterministic(active_policy()) else ""
    op(changed(call, policy=f"kernel={op.name}:{found.name}{rest}"))
    return found.name


plan_mla_attention = plan_paged_attention
"""One function by the names of both ops: `spec` says which attention the plan is for."""
