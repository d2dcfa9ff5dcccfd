"""The page size of a cache, negotiated with the kernels that may be chosen for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attnops.cache.paged import check_dtype, count
from attnops.call import FLOATS
from attnops.errors import InvalidInput, PageSizeConflict, UnknownKernel, fail
from attnops.kernel import Kernel, kernels_of
from attnops.ops.latent import STORED
from attnops.problem import Extent, Problem, Refusal, Target
from attnops.select import active_policy, select

SIZES = (1, 16, 32, 64, 128, 256)
"""The sizes that are tried."""

USUAL = 64
"""Of several equally good sizes the nearest to this one is chosen."""

STEP = 64
"""Requests of the decode step that kernels are compared on, where the cache has room for as many."""

HEADS = 128
"""Query heads of DeepSeek-V3."""

TIE = 1.05
"""Two costs as near as this are the same: a table of measured times interpolates between page sizes."""


@dataclass(frozen=True)
class PageSizeChoice:
    """A page size, and the reasons for it.

    page_size: in tokens.
    target: the machine it was chosen for.
    why: in a few words.
    takes: for each kernel that was asked for, or that can run on the target, the sizes it takes of those tried.
    refused: why the other kernels cannot run on the target at this page size.
    """

    page_size: int
    target: Target
    why: str
    takes: Mapping[str, tuple[int, ...]]
    refused: Mapping[str, tuple[Refusal, ...]]

    def __str__(self) -> str:
        takes = [f"  {kernel}: {', '.join(map(str, sizes))}" for kernel, sizes in self.takes.items()]
        refused = [f"  not {kernel} on {self.target}: {'; '.join(map(str, reasons))}" for kernel, reasons in self.refused.items()]
        return "\n".join([f"page size {self.page_size} on {self.target}: {self.why}", *takes, *refused])


def negotiate_page_size(
    *,
    latent_dim: int = 512,
    rope_dim: int = 64,
    max_requests: int,
    max_tokens_per_request: int,
    page_size: int | None = None,
    q_heads: int | None = None,
    kernels: Sequence[str] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    workspace_bytes: int = 0,
    max_new_tokens: int = 1,
) -> PageSizeChoice:
    """The page size for latents of these sizes, from the kernels of `mla_attention`. It allocates no memory and calls no kernel.

    kernels None: of the sizes 1, 16, 32, 64, 128 and 256 the one at which a decode step is fastest on `device` (or on the target that
    `pretend` has put in its place) with the kernels installed and under the policy in force, by the costs that `select` goes by; of
    those alike, the one that most kernels take; then the nearest to 64. A kernel counts with whichever plan and, over quantised
    latents, query dtype it runs with.

    kernels given: all of them must take the size. Their needs of the machine do not count, because pages may be meant for another one, or
    for several.

    page_size given: it is the result, if all of `kernels` take it.

    Args:
        latent_dim, rope_dim: Dc and Dr.
        max_requests, max_tokens_per_request: of the cache.
        page_size: tokens, or None.
        q_heads: query heads; None: 128.
        kernels: names, or None.
        dtype, device: of the pages.
        workspace_bytes: scratch that batches carry.
        max_new_tokens: the most new tokens of a request in a decode step.

    Raises:
        PageSizeConflict: no size suits all of `kernels`, or the one given does not, or no kernel can run at any.
        UnknownKernel: `mla_attention` has no kernel of that name.
        InvalidInput: a size, the dtype or `kernels` is invalid.
    """
    check_dtype(dtype, (*FLOATS, *STORED))
    latent, rope = count("latent_dim", latent_dim, 1), count("rope_dim", rope_dim, 1)
    step = _decode_step(
        Problem(
            "mla_attention", Target.of(torch.device(device)), dtype=dtype, kv_dtype=dtype, kv_heads=1, head_dim=latent + rope,
            q_heads=HEADS if q_heads is None else count("q_heads", q_heads, 1), v_head_dim=latent, rope_dim=rope, causal=True,
            kv_scales=dtype in STORED,
        ),
        max_requests, max_tokens_per_request, max_new_tokens, workspace_bytes,
    )  # fmt: skip
    queries = (torch.bfloat16, *((dtype,) if dtype.is_floating_point else ())) if dtype in STORED else (dtype,)
    asked = [replace(step, dtype=query, plan=plan) for query in queries for plan in ("none", "device", "host")]
    return _negotiate(asked, page_size, kernels)


def negotiate_kv_page_size(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    softcap: bool = False,
    sinks: torch.dtype | None = None,
    max_requests: int,
    max_tokens_per_request: int,
    page_size: int | None = None,
    kernels: Sequence[str] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    workspace_bytes: int = 0,
    max_new_tokens: int = 1,
) -> PageSizeChoice:
    """The page size for keys and values of these sizes, from the kernels of `paged_attention`. It allocates no memory and calls no kernel.

    As `negotiate_page_size`, for causal layers without a window whose calls bring no plan of the host.

    Args:
        dtype: of query and pages, a float of 16 bits or more.
        softcap: do the layers have one?
        sinks: their dtype, or None.
        the rest: as in `negotiate_page_size`.

    Raises:
        PageSizeConflict: no size suits all of `kernels`, or the one given does not, or no kernel can run at any.
        UnknownKernel: `paged_attention` has no kernel of that name.
        InvalidInput: a size, the dtype or `kernels` is invalid.
    """
    check_dtype(dtype, FLOATS)
    queries, keys, k_dim = count("q_heads", q_heads, 1), count("kv_heads", kv_heads, 1), count("head_dim", head_dim, 1)
    v_dim = k_dim if v_head_dim is None else count("v_head_dim", v_head_dim, 1)
    step = Problem(
        "paged_attention", Target.of(torch.device(device)), dtype=dtype, kv_dtype=dtype, q_heads=queries, kv_heads=keys, head_dim=k_dim,
        v_head_dim=v_dim, causal=True, softcap=softcap, sinks=sinks is not None, sinks_dtype=sinks, padded=False,
        pages_alike=k_dim == v_dim,
    )  # fmt: skip
    step = _decode_step(step, max_requests, max_tokens_per_request, max_new_tokens, workspace_bytes)
    return _negotiate([step], page_size, kernels)


def _decode_step(problem: Problem, max_requests: int, max_tokens_per_request: int, max_new_tokens: int, workspace_bytes: int) -> Problem:
    """`problem` with the sizes and the scratch of the decode step that kernels are compared on. Raises InvalidInput."""
    batch, new = min(count("max_requests", max_requests, 1), STEP), count("max_new_tokens", max_new_tokens, 1, "tokens")
    context = count("max_tokens_per_request", max_tokens_per_request, 1, "tokens")
    tokens, requests, queries, keys = map(Extent.of, (batch * new, batch, new, context))
    scratch = count("workspace_bytes", workspace_bytes, 0)
    return replace(problem, tokens=tokens, batch=requests, queries=queries, context=keys, workspace=scratch)


def _negotiate(asked: Sequence[Problem], page_size: int | None, kernels: Sequence[str] | None) -> PageSizeChoice:
    """asked: the decode step, in each way a kernel may be called."""
    op, target, known = asked[0].op, asked[0].target, kernels_of(asked[0].op)
    if kernels is not None:
        if isinstance(kernels, str) or not isinstance(kernels, Sequence) or not kernels or not all(isinstance(n, str) for n in kernels):
            fail(InvalidInput, "kernels", repr(kernels), "None, or at least one name of a kernel, e.g. ('flashmla',)")
        if unknown := [kernel for kernel in kernels if kernel not in known]:
            fail(UnknownKernel, unknown[0], op, tuple(known))
    given = None if page_size is None else count("page_size", page_size, 1, "tokens")
    sizes = SIZES if given is None else tuple(sorted({*SIZES, given}))
    problems = {size: [replace(p, page_size=size) for p in asked] for size in sizes}
    here = {size: _on_target(problems[size]) for size in sizes}
    if kernels is None:
        against = {k: {s: here[s].refused.get(k, ()) for s in sizes} for k in known}
    else:
        against = {k: {s: _anywhere(known[k], problems[s]) for s in sizes} for k in kernels}
    takes = {k: tuple(s for s in sizes if not refused[s]) for k, refused in against.items()}
    fits = [s for s in sizes if (any if kernels is None else all)(s in taken for taken in takes.values())]
    if not fits if given is None else kernels is not None and given not in fits:
        fail(PageSizeConflict, given, sizes, takes, {k: _once(r for s in sizes for r in refused[s]) for k, refused in against.items()})
    if given is None:
        costs = {s: min((us for k, us in here[s].us.items() if k in against), default=math.inf) for s in fits}
        alike = [s for s in fits if costs[s] <= min(costs.values()) * TIE]
        chosen = min(alike, key=lambda s: (-len(here[s].us), max(s, USUAL) / min(s, USUAL), s))
    else:
        chosen = given
    us = here[chosen].us
    reasons = ["as given"] * (given is not None) + [f"taken by {', '.join(against)}"] * (kernels is not None)
    reasons = reasons or [f"{min(us, key=us.__getitem__)} is the fastest kernel of a decode step"]
    refused_here = {k: r for k, r in here[chosen].refused.items() if k in against}
    return PageSizeChoice(chosen, target, ", ".join(reasons), {k: v for k, v in takes.items() if v}, refused_here)


@dataclass(frozen=True)
class _Answers:
    """us: the least cost of each kernel that can run one of the problems. refused: of each other one, why it cannot run the nearest."""

    us: Mapping[str, float]
    refused: Mapping[str, tuple[Refusal, ...]]


def _on_target(problems: Sequence[Problem]) -> _Answers:
    decisions = [select(p, active_policy()) for p in problems]
    us: dict[str, float] = {}
    for kernel, cost in (item for decision in decisions for item in decision.costs.items()):
        us[kernel] = min(us.get(kernel, cost.us), cost.us)
    refused = {k: min((d.refused[k] for d in decisions), key=_far) for k in kernels_of(problems[0].op) if k not in us}
    return _Answers(us, refused)


def _anywhere(kernel: Kernel, problems: Iterable[Problem]) -> tuple[Refusal, ...]:
    """The refusals of the kernel for the nearest of `problems`, on any machine."""
    unmet = [tuple(r for r in kernel.unmet(p) if r.field not in ("target", "device")) for p in problems]
    return min(unmet, key=_far)


def _far(refusals: tuple[Refusal, ...]) -> tuple[int, int]:
    """How far a kernel is from running. The query's dtype counts last, because several are tried."""
    return len(refusals), sum("dtype" in r.field for r in refusals)


def _once(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The first of each field and wish: page_size=1 (wants 64) implies page_size=16 (wants 64)."""
    found: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        found.setdefault((refusal.field, refusal.want), refusal)
    return tuple(found.values())
