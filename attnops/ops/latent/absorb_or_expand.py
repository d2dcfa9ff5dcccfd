"""The choice between absorbed and expanded attention over latents (MLA), by the number of new
tokens a request.

Absorbed: T new tokens cost two products with the halves of W, `2 T H Dc (nope + v)` operations
together, and `2 H (2 Dc + Dr)` for each pair of a token and a key. Expanded: every latent, new or
before, is unfolded at `2 Dc H (nope + v)` operations and as many bytes as its keys and values have,
and a pair costs `2 H (nope + Dr + v)`. A long prefix is worth unfolding for many new tokens only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from attnops.core.errors import UnknownKernel, fail
from attnops.core.kernel import generation, kernels_of, own_kernel
from attnops.core.private_torch import assume_constant
from attnops.core.problem import Extent, Extents, Problem, Target, altered
from attnops.core.select import Decision, parse_policy, select_by
from attnops.measured import Table, in_force
from attnops.measured.cost import BY_ARCH, CPU, RTX_PRO_6000

ABSORBED, EXPANDED = "absorbed", "expanded"

ATTENTION = ("mla_attention", "varlen_attention", "attention")
"""The attention ops of a layer with latents: absorbed, expanded over packed tokens, and expanded
over dense ones."""

PREFIX = 8192
"""The assumed cached tokens of a request that has any. Both costs grow with it, so that the
crossover hardly depends on it."""

REQUESTS = 4
"""The assumed number of requests that bring tokens in one batch."""

MOST = 4096
"""The most new tokens of a request for which the costs are compared."""

STEPS = (*range(2, 8), *(m << k for k in range(9) for m in range(8, 16)), MOST)
"""New tokens for which the costs are compared. Not 1: tables hold packed calls of several tokens
only."""

ALWAYS = 2**31 - 1
"""More tokens than a request can have."""

PRODUCTS, COPIES = 0.8137, 0.978
"""The parts of the rates that products and copies reach: 650 TFLOP/s and 4.2 TB/s on an H200."""

RATES = {0: CPU, 80: BY_ARCH[80], 90: BY_ARCH[90], 100: BY_ARCH[100], 120: RTX_PRO_6000}
"""The rates by which forms are compared, from this compute capability on. 0: also GPUs of other
makers."""

UNFOLDING = 1.75
"""Unfolding a prefix takes this many times longer than at these rates: `forms` of
benchmarks/results/h200/mla.json, an H200."""

LAUNCH_US = 3.0
"""The cost of a launch in a busy stream."""


@dataclass(frozen=True)
class LatentDims:
    """The sizes of a layer's heads: of a query without (nope) and with (rope, Dr) position, of a
    latent (Dc) and of a value."""

    nope: int
    rope: int
    latent: int
    v: int


@dataclass(frozen=True)
class LatentForms:
    """A layer's calls in both forms, as kinds of calls on one target, and what else the choice of a
    form depends on.

    absorbed: of `mla_attention`; its dtype is the query's, which may be quantised. expanded: of
    `varlen_attention`, in the layer's dtype.
    before: have the requests cached tokens? None: the batch does not describe them, so that only
    the absorbed form is possible.
    policies: the keys of mla_attention and varlen_attention. absorb_up_to: the caller's own limit
    in place of a comparison of costs.
    """

    absorbed: Problem
    expanded: Problem
    before: bool | None
    policies: tuple[str, str] = ("", "")
    absorb_up_to: int | None = None

    @classmethod
    def of(
        cls,
        dims: LatentDims,
        heads: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        page_size: int,
        target: Target,
        query_dtype: torch.dtype | None = None,
        **more: Any,
    ) -> LatentForms:
        """Those of a layer. dtypes: of the layer and of the pages. query_dtype: of mla_attention's
        query where it is quantised.

        more: `before`, and the other fields if they are given.
        """
        dtype, kv_dtype = dtypes
        absorbed = Problem.kind(
            "mla_attention",
            target=target,
            dtype=query_dtype or dtype,
            kv_dtype=kv_dtype,
            q_heads=heads,
            kv_heads=1,
            head_dim=dims.latent + dims.rope,
            v_head_dim=dims.latent,
            rope_dim=dims.rope,
            page_size=page_size,
            causal=True,
            kv_scales=kv_dtype != dtype,
        )
        expanded = Problem.kind(
            "varlen_attention",
            target=target,
            dtype=dtype,
            q_heads=heads,
            kv_heads=heads,
            head_dim=dims.nope + dims.rope,
            v_head_dim=dims.v,
            padded=False,
            lse=bool(more["before"]),
        )
        return cls(absorbed, expanded, **more)

    @property
    def target(self) -> Target:
        """That of both kinds."""
        return self.expanded.target

    @property
    def dims(self) -> LatentDims:
        """The sizes of the heads."""
        a, e = self.absorbed, self.expanded
        return LatentDims(e.head_dim - a.rope_dim, a.rope_dim, a.v_head_dim, e.v_head_dim)


@dataclass(frozen=True)
class FormDecision:
    """The form for requests that bring `queries` tokens.

    absorb_up_to: the most new tokens of a request for which the absorbed form is taken.
    absorbed_us, expanded_us: the estimated cost for REQUESTS such requests, projections included;
    infinite for an impossible form.
    absorbed, expanded: the Decisions on `mla_attention`, and on `varlen_attention` of the new
    tokens among themselves.
    """

    layer: LatentForms
    queries: int
    form: str
    absorb_up_to: int
    absorbed_us: float
    expanded_us: float
    absorbed: Decision
    expanded: Decision

    @property
    def costs(self) -> dict[str, float]:
        """Microseconds of the possible forms."""
        return {
            form: us
            for form, us in ((ABSORBED, self.absorbed_us), (EXPANDED, self.expanded_us))
            if us < inf
        }

    def __str__(self) -> str:
        layer = self.layer
        if layer.before is None:
            return (
                f"form of {self.queries} new tokens a request -> {self.form} (the batch does "
                "not describe their cached tokens)"
            )
        why = (
            "asked for"
            if layer.absorb_up_to is not None
            else "policy.deterministic"
            if self.absorb_up_to == ALWAYS
            else "by cost"
        )
        had = f"{PREFIX} tokens before" if layer.before else "no tokens before"
        costs = (
            (ABSORBED, self.absorbed_us, self.absorbed),
            (EXPANDED, self.expanded_us, self.expanded),
        )
        shown = (
            f"{form} {us:.4g} us with {d.problem.op}.{d.kernel.name if d.kernel else 'no kernel'}"
            for form, us, d in costs
        )
        head = (
            f"form of {self.queries} new tokens a request, {had} -> {self.form}; "
            f"absorb_up_to={self.absorb_up_to} ({why})"
        )
        return f"{head}\n  {', '.join(shown)}"


def latent_form(layer: LatentForms, queries: int = 1) -> FormDecision:
    """The form for requests that bring `queries` tokens. Pure and memoised, as `select`, given the
    kernels and the table in force."""
    return _form(layer, queries, generation(), in_force(layer.target).table)


# Of both Dynamo stores the results in the graph and guards the arguments, but neither the registry
# nor the tables.
@assume_constant
def crossover(
    dims: tuple[int, int, int, int],
    heads: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    page_size: int,
    device: torch.device,
    before: bool,
    policies: tuple[str, str],
) -> int:
    """`absorb_up_to` of the LatentForms of these. Tuples: Dynamo guards the identity of a
    dataclass, not its fields."""
    layer = LatentForms.of(
        LatentDims(*dims),
        heads,
        dtypes,
        page_size,
        Target.of(device),
        before=before,
        policies=policies,
    )
    return _crossover(layer, generation(), in_force(layer.target).table)


@assume_constant
def kernel_for(op: str, name: str | None) -> str | None:
    """`name` where `op`, one of ATTENTION, has a kernel of that name, else None. Raises
    UnknownKernel for a name that none of them has."""
    if name is not None and not any(name in kernels_of(other) for other in ATTENTION):
        fail(UnknownKernel, name, op, tuple(kernels_of(op)))
    return own_kernel(op, name)


FORM_WATCHERS: list[Callable[[FormDecision], None]] = []


def watch_forms(watcher: Callable[[FormDecision], None]) -> Callable[[], None]:
    """Call `watcher(decision)` for every eager call that has a form. Returns a function that
    removes the watcher."""
    FORM_WATCHERS.append(watcher)
    return lambda: FORM_WATCHERS.remove(watcher)


def tell(told: Callable[[], tuple[LatentForms, int]]) -> None:
    """Report a layer and its new tokens a request to the watchers. `told` is evaluated only if
    there are any."""
    if FORM_WATCHERS:
        decision = latent_form(*told())
        for watcher in tuple(FORM_WATCHERS):
            watcher(decision)


@functools.lru_cache(maxsize=4096)
def _form(layer: LatentForms, queries: int, registered: int, table: Table | None) -> FormDecision:
    up_to = (
        _crossover(layer, registered, table) if layer.absorb_up_to is None else layer.absorb_up_to
    )
    absorbed_us, absorbed = _absorbed(layer, queries, table)
    expanded_us, expanded = _expanded(layer, queries, table)
    form = ABSORBED if layer.before is None or queries <= up_to else EXPANDED
    return FormDecision(
        layer,
        queries,
        form,
        up_to,
        absorbed_us,
        inf if layer.before is None else expanded_us,
        absorbed,
        expanded,
    )


@functools.lru_cache(maxsize=1024)
def _crossover(layer: LatentForms, registered: int, table: Table | None) -> int:
    """The last of STEPS before the first for which the expanded form is the cheaper."""
    if layer.before is None:
        return MOST
    if any(parse_policy(key).deterministic for key in layer.policies):
        # the longest request of a batch and the ends of chunks depend on the other requests
        return ALWAYS
    last = 0
    for queries in STEPS:
        if (
            _absorbed(layer, queries, table, brief=True)[0]
            > _expanded(layer, queries, table, brief=True)[0]
        ):
            break
        last = queries
    return last


def _absorbed(
    layer: LatentForms, queries: int, table: Table | None, brief: bool = False
) -> tuple[float, Decision]:
    d = layer.dims
    tokens = REQUESTS * queries
    heads = layer.expanded.q_heads
    width = layer.expanded.dtype.itemsize
    sizes = _sizes(queries, queries if layer.before is False else queries + PREFIX)
    decision = select_by(table, altered(layer.absorbed, sizes=sizes), layer.policies[0], brief)
    weights = heads * d.latent * (d.nope + d.v)
    rows = tokens * heads * (d.nope + d.v + 2 * d.latent)
    return _us(decision) + _product_us(
        layer, 2.0 * tokens * weights, width * (weights + rows), launches=2
    ), decision


def _expanded(
    layer: LatentForms, queries: int, table: Table | None, brief: bool = False
) -> tuple[float, Decision]:
    new, decision = _attend(layer, queries, queries, True, table, brief)
    unfold = _unfold_us(layer, REQUESTS * queries)
    if not layer.before:
        return new + unfold, decision
    before, _ = _attend(layer, queries, PREFIX, False, table, brief)
    d, tokens, kind = layer.dims, REQUESTS * queries, layer.expanded
    merge = _product_us(layer, 0.0, 3 * kind.dtype.itemsize * tokens * kind.q_heads * d.v)
    return new + unfold + before + merge + UNFOLDING * _unfold_us(
        layer, REQUESTS * PREFIX
    ), decision


def _attend(
    layer: LatentForms, queries: int, keys: int, causal: bool, table: Table | None, brief: bool
) -> tuple[float, Decision]:
    problem = altered(layer.expanded, causal=causal, sizes=_sizes(queries, keys))
    decision = select_by(table, problem, layer.policies[1], brief)
    # Tables hold packed calls of as many keys as queries only; their times do not extend to calls
    # of other shapes.
    return (
        _us(decision) if causal or decision.kernel is None else decision.kernel.cost_us(problem)
    ), decision


def _unfold_us(layer: LatentForms, tokens: int) -> float:
    """A product with W, and the pass that puts the rotated part behind each head's key."""
    d, heads, width = layer.dims, layer.expanded.q_heads, layer.expanded.dtype.itemsize
    weights, made = heads * d.latent * (d.nope + d.v), tokens * heads * (d.nope + d.v)
    keys = tokens * heads * (2 * d.nope + d.rope)
    return _product_us(layer, 2.0 * tokens * weights, width * (weights + made)) + _product_us(
        layer, 0.0, width * keys
    )


def _product_us(layer: LatentForms, flops: float, moved: float, launches: int = 1) -> float:
    arch = layer.target.arch if layer.target.device == "cuda" else 0
    rates = RATES[max(a for a in RATES if a <= arch)]
    flops_us = PRODUCTS * rates.matmul * 1e6 * min(2 / layer.expanded.dtype.itemsize, 1.0)
    bytes_us = COPIES * rates.bandwidth * 1e6
    return launches * LAUNCH_US + max(flops / flops_us, moved / bytes_us)


def _sizes(queries: int, keys: int) -> Extents:
    return Extents(*map(Extent.of, (REQUESTS * queries, REQUESTS, queries, keys)))


def _us(decision: Decision) -> float:
    return inf if decision.kernel is None else decision.costs[decision.kernel.name].us
