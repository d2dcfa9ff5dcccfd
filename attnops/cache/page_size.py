"""The page size of a cache, negotiated with the kernels that may be chosen for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from attnops.cache.paged import check_dtype, count
from attnops.core.errors import PageSizeConflict, UnknownKernel, fail
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, Refusal, Target, altered
from attnops.core.record import FLOATS, need
from attnops.core.select import active_policy, parse_policy, select
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
    takes: for each kernel that was asked for, or that can run on the target, the sizes it takes of
    those tried.
    refused: why the other kernels cannot run on the target at this page size.
    """

    page_size: int
    target: Target
    why: str
    takes: Mapping[str, tuple[int, ...]]
    refused: Mapping[str, tuple[Refusal, ...]]

    def __str__(self) -> str:
        takes = [
            f"  {kernel}: {', '.join(map(str, sizes))}" for kernel, sizes in self.takes.items()
        ]
        refused = [
            f"  not {kernel} on {self.target}: {'; '.join(map(str, reasons))}"
            for kernel, reasons in self.refused.items()
        ]
        return "\n".join(
            [f"page size {self.page_size} on {self.target}: {self.why}", *takes, *refused]
        )


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
    """The page size for these layers, from the kernels of their op. It allocates no memory and
    calls no kernel.

    Args:
        layers: what the layers share, of `paged_layers` or `latent_layers`; its page_size is not
            read. Pages of keys and values are floats of 16 bits or more. Quantised latents of the
            query's dtype are also tried with bfloat16 queries.
        max_requests, max_tokens_per_request: of the cache.
        page_size: tokens; it is the result, if all of `kernels` take it. None: any.
        kernels: all of them must take the size. Their needs of the machine do not count, because
            pages may be meant for another one. None: the result is one of 1, 16, 32, 64, 128 and
            256: the size at which a decode step is fastest on `device`, or on `pretend`'s target,
            by the costs of `select`, with the kernels installed and under the policy in force. Ties
            go to the size that most kernels take, then to the size nearest to 64. Kernels of
            `paged_attention` that neither `kernels` nor a policy names count without a host plan,
            kernels of `mla_attention` with whichever plan they run with.
        device: of the pages.
        workspace_bytes: scratch that batches carry.
        max_new_tokens: the most new tokens of a request in a decode step.

    Raises:
        PageSizeConflict: no size suits all of `kernels`, or the one given does not, or no kernel
            can run at any.
        UnknownKernel, InvalidInput: the op has no kernel of that name; a size, the dtype or
            `kernels` is invalid.
    """
    asked = _decode_steps(
        layers,
        max_requests,
        max_tokens_per_request,
        max_new_tokens,
        torch.device(device),
        workspace_bytes,
        kernels is not None,
    )
    names = _names(kernels, asked[0].op)
    given = None if page_size is None else count("page_size", page_size, 1, "tokens")
    tried = _tried(asked, given)
    takes, refused = _answers(tried, names, anywhere=kernels is not None)
    possible = (
        set().union(*takes.values())
        if kernels is None
        else set(tried).intersection(*takes.values())
    )
    suits = bool(possible) if given is None else kernels is None or given in possible
    if not suits:
        fail(PageSizeConflict, given, tuple(tried), takes, refused)
    chosen = _fastest({size: tried[size] for size in possible}, names) if given is None else given
    here = tried[chosen]
    why = ["as given"] * (given is not None) + [f"taken by {', '.join(names)}"] * (
        kernels is not None
    )
    why = why or [f"{min(here.us, key=here.us.__getitem__)} is the fastest kernel of a decode step"]
    elsewhere = {k: reasons for k in names if (reasons := here.refused(k))}
    return PageSizeChoice(
        chosen, asked[0].target, ", ".join(why), {k: v for k, v in takes.items() if v}, elsewhere
    )


def _names(kernels: Sequence[str] | None, op: str) -> tuple[str, ...]:
    """The kernels that are asked. Raises InvalidInput, UnknownKernel."""
    known = tuple(kernels_of(op))
    if kernels is None:
        return known
    listed = isinstance(kernels, Sequence) and not isinstance(kernels, str) and len(kernels) > 0
    right = listed and all(isinstance(kernel, str) for kernel in kernels)
    need(
        right,
        "kernels",
        repr(kernels),
        "None, or at least one name of a kernel, e.g. ('flashmla',)",
    )
    for kernel in kernels:
        if kernel not in known:
            fail(UnknownKernel, kernel, op, known)
    return tuple(kernels)


class _Tried:
    """What kernels say of a decode step over pages of one size. us: of each that can run, by the
    fastest way to call it."""

    def __init__(self, steps: list[Problem]) -> None:
        self.steps, self.decisions = steps, [select(step, active_policy()) for step in steps]
        self.us: dict[str, float] = {}
        for kernel, cost in chain.from_iterable(
            decision.costs.items() for decision in self.decisions
        ):
            self.us[kernel] = min(cost.us, self.us.get(kernel, cost.us))

    def refused(self, kernel: str) -> tuple[Refusal, ...]:
        """Why it cannot run on the target."""
        return (
            ()
            if kernel in self.us
            else _nearest(decision.refused[kernel] for decision in self.decisions)
        )

    def unmet(self, kernel: str) -> tuple[Refusal, ...]:
        """Why it takes no pages of this size on any machine."""
        found = (kernels_of(step.op)[kernel].unmet(step) for step in self.steps)
        return _nearest(
            tuple(r for r in reasons if r.field not in ("target", "device")) for reasons in found
        )


def _tried(steps: list[Problem], given: int | None) -> dict[int, _Tried]:
    sizes = SIZES if given is None else sorted({*SIZES, given})
    return {size: _Tried([replace(step, page_size=size) for step in steps]) for size in sizes}


def _answers(
    tried: Mapping[int, _Tried], names: Iterable[str], anywhere: bool
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[Refusal, ...]]]:
    """By kernel the sizes that it takes, on the target or anywhere, and its reasons against the
    others."""
    against = {
        k: {size: at.unmet(k) if anywhere else at.refused(k) for size, at in tried.items()}
        for k in names
    }
    takes = {
        k: tuple(size for size, reasons in of.items() if not reasons) for k, of in against.items()
    }
    return takes, {k: _once(chain.from_iterable(of.values())) for k, of in against.items()}


def _fastest(tried: Mapping[int, _Tried], names: Collection[str]) -> int:
    """The size at which the fastest of these kernels is fastest. Of equals the one most kernels
    take, then the nearest to USUAL."""
    costs = {
        size: min((us for k, us in at.us.items() if k in names), default=math.inf)
        for size, at in tried.items()
    }
    alike = [size for size, cost in costs.items() if cost <= min(costs.values()) * TIE]
    return min(
        alike, key=lambda size: (-len(tried[size].us), max(size, USUAL) / min(size, USUAL), size)
    )


def _decode_steps(
    layers: Problem,
    max_requests: int,
    max_tokens_per_request: int,
    max_new_tokens: int,
    device: torch.device,
    scratch: int,
    named: bool,
) -> list[Problem]:
    """The decode step that kernels are compared on, in each way that a kernel may be called. named:
    by the caller, as by a policy that forces one. Raises InvalidInput."""
    stored, latent = layers.kv_dtype, over_latents(layers)
    check_dtype(
        stored,
        (*FLOATS, *STORED) if latent else FLOATS,
        "dtype" if stored == layers.dtype else "kv_dtype",
    )
    for field in (
        "q_heads",
        "kv_heads",
        "head_dim",
        "v_head_dim",
        *(("rope_dim",) if latent else ()),
    ):
        count(field, getattr(layers, field), 1)
    batch = min(count("max_requests", max_requests, 1), STEP)
    new = count("max_new_tokens", max_new_tokens, 1, "tokens")
    context = count("max_tokens_per_request", max_tokens_per_request, 1, "tokens")
    step = step_of(
        replace(layers, page_size=1), Target.of(device), batch * new, batch, context, new
    )
    step = altered(step, workspace=count("workspace_bytes", scratch, 0))
    if not latent:
        alike = layers.head_dim == layers.v_head_dim
        named = named or parse_policy(active_policy()).forced(step.op) is not None
        plans = ("none", "host") if named else ("none",)
        return [altered(step, plan=plan, padded=False, pages_alike=alike) for plan in plans]
    queries = (
        (torch.bfloat16, layers.dtype)
        if stored == layers.dtype and stored in STORED
        else (layers.dtype,)
    )
    return [
        altered(step, dtype=q, plan=p)
        for q in queries
        if q.is_floating_point
        for p in ("none", "device", "host")
    ]


def _nearest(refusals: Iterable[tuple[Refusal, ...]]) -> tuple[Refusal, ...]:
    """Those of the call that is the nearest to running. The query's dtype counts last, because
    several are tried."""
    return min(refusals, key=lambda found: (len(found), sum("dtype" in r.field for r in found)))


def _once(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The first of each field and wish: page_size=1 (wants 64) implies page_size=16 (wants 64)."""
    found: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        found.setdefault((refusal.field, refusal.want), refusal)
    return tuple(found.values())
