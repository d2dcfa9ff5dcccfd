"""The page size of a cache, negotiated with the kernels that may be chosen for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnops.cache.paged import count
from attnops.call import FLOATS, name
from attnops.errors import InvalidInput, PageSizeConflict, UnknownKernel, fail
from attnops.kernel import Kernel, kernels_of
from attnops.ops.latent import STORED
from attnops.problem import Extent, Problem, Refusal, Target
from attnops.select import active_policy, select

OP = "mla_attention"
PAGED = "paged_attention"
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

PLANS = ("none", "device", "host")


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
    if dtype not in (*FLOATS, *STORED):
        fail(InvalidInput, "dtype", dtype, " | ".join(map(name, (*FLOATS, *STORED))))
    latent, rope = count("latent_dim", latent_dim, 1), count("rope_dim", rope_dim, 1)
    heads = HEADS if q_heads is None else count("q_heads", q_heads, 1)
    step = _step(max_requests, max_tokens_per_request, max_new_tokens, workspace_bytes)

    def problems(target: Target, size: int) -> list[Problem]:
        queries = (torch.bfloat16, *((dtype,) if dtype.is_floating_point else ())) if dtype in STORED else (dtype,)
        return [
            Problem(
                OP, target, dtype=query, kv_dtype=dtype, q_heads=heads, kv_heads=1, head_dim=latent + rope, v_head_dim=latent,
                rope_dim=rope, page_size=size, causal=True, kv_scales=dtype in STORED, plan=plan, **step,
            )
            for query in queries
            for plan in PLANS
        ]  # fmt: skip

    return _negotiate(OP, problems, device, page_size, kernels)


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
    if dtype not in FLOATS:
        fail(InvalidInput, "dtype", dtype, " | ".join(map(name, FLOATS)))
    queries, keys, k_dim = count("q_heads", q_heads, 1), count("kv_heads", kv_heads, 1), count("head_dim", head_dim, 1)
    v_dim = k_dim if v_head_dim is None else count("v_head_dim", v_head_dim, 1)
    step = _step(max_requests, max_tokens_per_request, max_new_tokens, workspace_bytes)

    def problems(target: Target, size: int) -> list[Problem]:
        return [
            Problem(
                PAGED, target, dtype=dtype, kv_dtype=dtype, q_heads=queries, kv_heads=keys, head_dim=k_dim, v_head_dim=v_dim,
                page_size=size, causal=True, softcap=softcap, sinks=sinks is not None, sinks_dtype=sinks, padded=False,
                pages_alike=k_dim == v_dim, **step,
            )
        ]  # fmt: skip

    return _negotiate(PAGED, problems, device, page_size, kernels)


def _step(max_requests: int, max_tokens_per_request: int, max_new_tokens: int, workspace_bytes: int) -> dict[str, Any]:
    """Of the decode step that kernels are compared on: sizes and scratch. Raises InvalidInput."""
    batch, new = min(count("max_requests", max_requests, 1), STEP), count("max_new_tokens", max_new_tokens, 1, "tokens")
    context = count("max_tokens_per_request", max_tokens_per_request, 1, "tokens")
    sizes = {"tokens": batch * new, "batch": batch, "queries": new, "context": context}
    return {"workspace": count("workspace_bytes", workspace_bytes, 0), **{name: Extent.of(size) for name, size in sizes.items()}}


def _negotiate(
    op: str, asked: Callable[[Target, int], list[Problem]], device: torch.device | str, page_size: int | None, kernels: Sequence[str] | None
) -> PageSizeChoice:
    """asked: the decode step at a page size, in each way a kernel may be called."""
    named = None if kernels is None else _kernels(kernels, op)
    given = None if page_size is None else count("page_size", page_size, 1, "tokens")
    target = Target.of(torch.device(device))
    problems = functools.partial(asked, target)
    sizes = SIZES if given is None else tuple(sorted({*SIZES, given}))
    here = {size: _on_target(op, problems(size)) for size in sizes}
    if named is None:
        against = {k: {s: here[s].refused.get(k, ()) for s in sizes} for k in kernels_of(op)}
    else:
        against = {k.name: {s: _anywhere(k, problems(s)) for s in sizes} for k in named}
    takes = {k: tuple(s for s in sizes if not refused[s]) for k, refused in against.items()}
    fits = [s for s in sizes if (any if named is None else all)(s in taken for taken in takes.values())]
    if not fits if given is None else named is not None and given not in fits:
        fail(PageSizeConflict, given, sizes, takes, {k: _once(r for s in sizes for r in refused[s]) for k, refused in against.items()})

    costs = {s: min((us for k, us in here[s].us.items() if k in against), default=math.inf) for s in fits}
    if given is None:
        alike = [s for s in fits if costs[s] <= min(costs.values()) * TIE]
        chosen = min(alike, key=lambda s: (-len(here[s].us), max(s, USUAL) / min(s, USUAL), s))
    else:
        chosen = given
    reasons = ["as given"] * (given is not None) + [f"taken by {', '.join(against)}"] * (named is not None)
    if not reasons:
        reasons = [f"{min(here[chosen].us.items(), key=lambda item: item[1])[0]} is the fastest kernel of a decode step"]
    refused_here = {k: r for k, r in here[chosen].refused.items() if k in against}
    return PageSizeChoice(chosen, target, ", ".join(reasons), {k: v for k, v in takes.items() if v}, refused_here)


@dataclass(frozen=True)
class _Answers:
    """us: the least cost of each kernel that can run one of the problems. refused: of each other one, why it cannot run the nearest."""

    us: Mapping[str, float]
    refused: Mapping[str, tuple[Refusal, ...]]


def _on_target(op: str, problems: Iterable[Problem]) -> _Answers:
    decisions = [select(p, active_policy()) for p in problems]
    us: dict[str, float] = {}
    for decision in decisions:
        for kernel, cost in decision.costs.items():
            us[kernel] = min(us.get(kernel, cost.us), cost.us)
    refused = {k: min((d.refused[k] for d in decisions), key=_far) for k in kernels_of(op) if k not in us}
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


def _kernels(names: Sequence[str], op: str) -> tuple[Kernel, ...]:
    known = kernels_of(op)
    if isinstance(names, str) or not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        fail(InvalidInput, "kernels", repr(names), "None, or at least one name of a kernel, e.g. ('flashmla',)")
    for kernel in names:
        if kernel not in known:
            fail(UnknownKernel, kernel, op, tuple(known))
    return tuple(known[n] for n in dict.fromkeys(names))
