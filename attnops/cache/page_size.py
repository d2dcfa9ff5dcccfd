"""The page size of a cache, negotiated with the kernels that may be chosen for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attnops.cache.paged import check_dtype, count
from attnops.core.errors import PageSizeConflict, UnknownKernel, fail
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, Refusal, Target, altered
from attnops.core.record import FLOATS, need
from attnops.core.select import active_policy, select
from attnops.ops.latent.record import STORED
from attnops.ops.pages.plan import over_latents, step_of

# The sizes that are tried. Of several equally good ones the nearest to the usual size is chosen.
SIZES, USUAL = (1, 16, 32, 64, 128, 256), 64
# Requests of the decode step that kernels are compared on, where the cache has room for as many.
STEP = 64
# Two costs as near as this are the same: a table of measured times interpolates between page sizes.
TIE = 1.05


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
    layers: Problem,
    *,
    max_requests: int,
    max_tokens_per_request: int,
    page_size: int | None = None,
    kernels: Sequence[str] | None = None,
    device: torch.device | str,
    workspace_bytes: int = 0,
    max_new_tokens: int = 1,
) -> PageSizeChoice:
    """The page size for these layers, from the kernels of their op. It allocates no memory and calls no kernel.

    Args:
        layers: what the layers share, of `paged_layers` or `latent_layers`; its page_size is not read. Pages of keys and values are
            floats of 16 bits or more. Quantised latents of the query's dtype are also tried with bfloat16 queries.
        max_requests, max_tokens_per_request: of the cache.
        page_size: tokens; it is the result, if all of `kernels` take it. None: any.
        kernels: all of them must take the size. Their needs of the machine do not count, because pages may be meant for another one. None:
            the result is one of 1, 16, 32, 64, 128 and 256: the size at which a decode step is fastest on `device`, or on `pretend`'s
            target, by the costs of `select`, with the kernels installed and under the policy in force. Ties go to the size that most
            kernels take, then to the size nearest to 64. Kernels of `paged_attention` count without a host plan, kernels of
            `mla_attention` with whichever plan they run with.
        device: of the pages.
        workspace_bytes: scratch that batches carry.
        max_new_tokens: the most new tokens of a request in a decode step.

    Raises:
        PageSizeConflict: no size suits all of `kernels`, or the one given does not, or no kernel can run at any.
        UnknownKernel, InvalidInput: the op has no kernel of that name; a size, the dtype or `kernels` is invalid.
    """
    asked = _decode_steps(layers, max_requests, max_tokens_per_request, max_new_tokens, torch.device(device), workspace_bytes)
    op, target, known = asked[0].op, asked[0].target, kernels_of(asked[0].op)
    names = tuple(known) if kernels is None else () if isinstance(kernels, str) or not isinstance(kernels, Sequence) else tuple(kernels)
    right = bool(names) and all(isinstance(kernel, str) for kernel in names)
    need(right, "kernels", repr(kernels), "None, or at least one name of a kernel, e.g. ('flashmla',)")
    if unknown := [kernel for kernel in names if kernel not in known]:
        fail(UnknownKernel, unknown[0], op, tuple(known))
    given = None if page_size is None else count("page_size", page_size, 1, "tokens")
    sizes = SIZES if given is None else tuple(sorted({*SIZES, given}))
    problems = {size: [replace(p, page_size=size) for p in asked] for size in sizes}
    here = {size: [select(p, active_policy()) for p in problems[size]] for size in sizes}
    us: dict[int, dict[str, float]] = {size: {} for size in sizes}
    for size, kernel, cost in ((s, k, c.us) for s in sizes for decision in here[s] for k, c in decision.costs.items()):
        us[size][kernel] = min(cost, us[size].get(kernel, cost))

    def refused_here(kernel: str, size: int) -> tuple[Refusal, ...]:
        return () if kernel in us[size] else _nearest(decision.refused[kernel] for decision in here[size])

    def refused(kernel: str, size: int) -> tuple[Refusal, ...]:
        if kernels is None:
            return refused_here(kernel, size)
        unmet = (known[kernel].unmet(p) for p in problems[size])
        return _nearest(tuple(r for r in found if r.field not in ("target", "device")) for found in unmet)

    against = {k: {s: refused(k, s) for s in sizes} for k in names}
    takes = {k: tuple(s for s in sizes if not of[s]) for k, of in against.items()}
    fits = [s for s in sizes if (any if kernels is None else all)(s in taken for taken in takes.values())]
    if not fits if given is None else kernels is not None and given not in fits:
        fail(PageSizeConflict, given, sizes, takes, {k: _once(r for s in sizes for r in of[s]) for k, of in against.items()})
    chosen = given
    if chosen is None:
        costs = {s: min((cost for k, cost in us[s].items() if k in against), default=math.inf) for s in fits}
        alike = [s for s in fits if costs[s] <= min(costs.values()) * TIE]
        chosen = min(alike, key=lambda s: (-len(us[s]), max(s, USUAL) / min(s, USUAL), s))
    reasons = ["as given"] * (given is not None) + [f"taken by {', '.join(against)}"] * (kernels is not None)
    reasons = reasons or [f"{min(us[chosen], key=us[chosen].__getitem__)} is the fastest kernel of a decode step"]
    elsewhere = {k: reason for k in against if (reason := refused_here(k, chosen))}
    return PageSizeChoice(chosen, target, ", ".join(reasons), {k: v for k, v in takes.items() if v}, elsewhere)


def _decode_steps(
    layers: Problem, max_requests: int, max_tokens_per_request: int, max_new_tokens: int, device: torch.device, scratch: int
) -> list[Problem]:
    """The decode step that kernels are compared on, in each way that a kernel may be called. Raises InvalidInput."""
    stored, latent = layers.kv_dtype, over_latents(layers)
    check_dtype(stored, (*FLOATS, *STORED) if latent else FLOATS, "dtype" if stored == layers.dtype else "kv_dtype")
    for field in ("q_heads", "kv_heads", "head_dim", "v_head_dim", *(("rope_dim",) if latent else ())):
        count(field, getattr(layers, field), 1)
    batch, new = min(count("max_requests", max_requests, 1), STEP), count("max_new_tokens", max_new_tokens, 1, "tokens")
    context = count("max_tokens_per_request", max_tokens_per_request, 1, "tokens")
    step = step_of(replace(layers, page_size=1), Target.of(device), batch * new, batch, context, new)
    step = altered(step, workspace=count("workspace_bytes", scratch, 0))
    if not latent:
        return [altered(step, plan="none", padded=False, pages_alike=layers.head_dim == layers.v_head_dim)]
    queries = (torch.bfloat16, layers.dtype) if stored == layers.dtype and stored in STORED else (layers.dtype,)
    return [altered(step, dtype=q, plan=p) for q in queries if q.is_floating_point for p in ("none", "device", "host")]


def _nearest(refusals: Iterable[tuple[Refusal, ...]]) -> tuple[Refusal, ...]:
    """Those of the call that is the nearest to running. The query's dtype counts last, because several are tried."""
    return min(refusals, key=lambda found: (len(found), sum("dtype" in r.field for r in found)))


def _once(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The first of each field and wish: page_size=1 (wants 64) implies page_size=16 (wants 64)."""
    found: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        found.setdefault((refusal.field, refusal.want), refusal)
    return tuple(found.values())
