"""The choice between absorbed and expanded attention over latents (MLA), by the number of new tokens a request.

Absorbed: T new tokens cost two products with the halves of W, `2 T H Dc (nope + v)` operations together, and `2 H (2 Dc + Dr)` for each
pair of a token and a key. Expanded: every latent, new or before, is unfolded at `2 Dc H (nope + v)` operations and as many bytes as its
keys and values have, and a pair costs `2 H (nope + Dr + v)`. A long prefix is worth unfolding for many new tokens only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch

from attnops.core.errors import UnknownKernel, fail
from attnops.core.kernel import generation, kernels_of, own_kernel
from attnops.core.problem import Extent, Extents, Problem, Target
from attnops.core.select import Decision, parse_policy, select_by
from attnops.measured import Table, in_force
from attnops.measured.cost import BY_ARCH, CPU, RTX_PRO_6000

ABSORBED, EXPANDED = "absorbed", "expanded"

ATTENTION = ("mla_attention", "varlen_attention", "attention")
"""The attention ops of a layer with latents: absorbed, expanded over packed tokens, and expanded over dense ones."""

PREFIX = 8192
"""The assumed cached tokens of a request that has any. Both costs grow with it, so that the crossover hardly depends on it."""

REQUESTS = 4
"""The assumed number of requests that bring tokens in one batch."""

MOST = 4096
"""The most new tokens of a request for which the costs are compared."""

STEPS = (*range(2, 8), *(m << k for k in range(9) for m in range(8, 16)), MOST)
"""New tokens for which the costs are compared. Not 1: tables hold packed calls of several tokens only."""

ALWAYS = 2**31 - 1
"""More tokens than a request can have."""

PRODUCTS, COPIES = 0.8137, 0.978
"""The parts of the rates that products and copies reach: 650 TFLOP/s and 4.2 TB/s on an H200."""

RATES = {0: CPU, 80: BY_ARCH[80], 90: BY_ARCH[90], 100: BY_ARCH[100], 120: RTX_PRO_6000}
"""The rates by which forms are compared, from this compute capability on. 0: also GPUs of other makers."""

UNFOLDING = 1.75
"""Unfolding a prefix takes this many times longer than at these rates: `forms` of benchmarks/results/h200/mla.json, an H200."""

LAUNCH_US = 3.0
"""The cost of a launch in a busy stream."""


@dataclass(frozen=True)
class LatentDims:
    """The sizes of a layer's heads: of a query without (nope) and with (rope, Dr) position, of a latent (Dc) and of a value."""

    nope: int
    rope: int
    latent: int
    v: int


@dataclass(frozen=True)
class LatentCall:
    """The facts of a layer's calls that the form depends on.

    before: have the requests cached tokens? None: the batch does not describe them, so that only the absorbed form is possible.
    policies: the keys of mla_attention and varlen_attention. absorb_up_to: the caller's own limit in place of a comparison of costs.
    query_dtype: of mla_attention's query where it is quantised, i.e. not dtype.
    """

    dims: LatentDims
    heads: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    target: Target
    before: bool | None
    policies: tuple[str, str] = ("", "")
    absorb_up_to: int | None = None
    query_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class FormDecision:
    """The form for requests that bring `queries` tokens.

    absorb_up_to: the most new tokens of a request for which the absorbed form is taken.
    absorbed_us, expanded_us: the estimated cost for REQUESTS such requests, projections included; infinite for an impossible form.
    absorbed, expanded: the Decisions on `mla_attention`, and on `varlen_attention` of the new tokens among themselves.
    """

    call: LatentCall
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
        return {form: us for form, us in ((ABSORBED, self.absorbed_us), (EXPANDED, self.expanded_us)) if us < inf}

    def __str__(self) -> str:
        call = self.call
        if call.before is None:
            return f"form of {self.queries} new tokens a request -> {self.form} (the batch does not describe their cached tokens)"
        why = "asked for" if call.absorb_up_to is not None else "policy.deterministic" if self.absorb_up_to == ALWAYS else "by cost"
        had = f"{PREFIX} tokens before" if call.before else "no tokens before"
        costs = ((ABSORBED, self.absorbed_us, self.absorbed), (EXPANDED, self.expanded_us, self.expanded))
        shown = (f"{form} {us:.4g} us with {d.problem.op}.{d.kernel.name if d.kernel else 'no kernel'}" for form, us, d in costs)
        head = f"form of {self.queries} new tokens a request, {had} -> {self.form}; absorb_up_to={self.absorb_up_to} ({why})"
        return f"{head}\n  {', '.join(shown)}"


def latent_form(call: LatentCall, queries: int = 1) -> FormDecision:
    """The form for requests that bring `queries` tokens. Pure and memoised, as `select`, given the kernels and the table in force."""
    return _form(call, queries, generation(), in_force(call.target).table)


def crossover(
    dims: tuple[int, int, int, int],
    heads: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    page_size: int,
    device: torch.device,
    before: bool,
    policies: tuple[str, str],
) -> int:
    """`absorb_up_to` of the LatentCall with these fields. Tuples: Dynamo guards the identity of a dataclass, not its fields."""
    call = LatentCall(LatentDims(*dims), heads, *dtypes, page_size, Target.of(device), before, policies)
    return _crossover(call, generation(), in_force(call.target).table)


def kernel_for(op: str, name: str | None) -> str | None:
    """`name` where `op`, one of ATTENTION, has a kernel of that name, else None. Raises UnknownKernel for a name that none of them has."""
    if name is not None and not any(name in kernels_of(other) for other in ATTENTION):
        fail(UnknownKernel, name, op, tuple(kernels_of(op)))
    return own_kernel(op, name)


# As `torch.compiler.assume_constant_result`, which would import the compiler: Dynamo calls these with constants, stores the results in the
# graph and guards the arguments, but neither the registry nor the tables.
for _constant in (crossover, kernel_for):
    vars(_constant).update(_dynamo_marked_constant=True)

_WATCHERS: list[Callable[[FormDecision], None]] = []


def watch_forms(watcher: Callable[[FormDecision], None]) -> Callable[[], None]:
    """Call `watcher(decision)` for every eager call that has a form. Returns a function that removes the watcher."""
    _WATCHERS.append(watcher)
    return lambda: _WATCHERS.remove(watcher)


def tell(call: Callable[[], tuple[LatentCall, int]]) -> None:
    """Report a call and its new tokens a request to the watchers. `call` is evaluated only if there are any."""
    if _WATCHERS:
        decision = latent_form(*call())
        for watcher in tuple(_WATCHERS):
            watcher(decision)


@functools.lru_cache(maxsize=4096)
def _form(call: LatentCall, queries: int, registered: int, table: Table | None) -> FormDecision:
    up_to = _crossover(call, registered, table) if call.absorb_up_to is None else call.absorb_up_to
    absorbed_us, absorbed = _absorbed(call, queries, table)
    expanded_us, expanded = _expanded(call, queries, table)
    form = ABSORBED if call.before is None or queries <= up_to else EXPANDED
    return FormDecision(call, queries, form, up_to, absorbed_us, inf if call.before is None else expanded_us, absorbed, expanded)


@functools.lru_cache(maxsize=1024)
def _crossover(call: LatentCall, registered: int, table: Table | None) -> int:
    """The last of STEPS before the first for which the expanded form is the cheaper."""
    if call.before is None:
        return MOST
    if any(parse_policy(key).deterministic for key in call.policies):
        return ALWAYS  # the longest request of a batch and the ends of chunks depend on the other requests
    last = 0
    for queries in STEPS:
        if _absorbed(call, queries, table, brief=True)[0] > _expanded(call, queries, table, brief=True)[0]:
            break
        last = queries
    return last


def _absorbed(call: LatentCall, queries: int, table: Table | None, brief: bool = False) -> tuple[float, Decision]:
    d, tokens, heads, width = call.dims, REQUESTS * queries, call.heads, call.dtype.itemsize
    decision = select_by(table, Problem.of(
        op="mla_attention", target=call.target, dtype=call.query_dtype or call.dtype, kv_dtype=call.kv_dtype, q_heads=heads,
        kv_heads=1, head_dim=d.latent + d.rope, v_head_dim=d.latent, rope_dim=d.rope, page_size=call.page_size, causal=True,
        kv_scales=call.kv_dtype != call.dtype, sizes=_sizes(queries, queries if call.before is False else queries + PREFIX),
    ), call.policies[0], brief)  # fmt: skip
    weights, rows = heads * d.latent * (d.nope + d.v), tokens * heads * (d.nope + d.v + 2 * d.latent)
    return _us(decision) + _product_us(call, 2.0 * tokens * weights, width * (weights + rows), launches=2), decision


def _expanded(call: LatentCall, queries: int, table: Table | None, brief: bool = False) -> tuple[float, Decision]:
    new, decision = _attend(call, queries, queries, True, table, brief)
    unfold = _unfold_us(call, REQUESTS * queries)
    if not call.before:
        return new + unfold, decision
    before, _ = _attend(call, queries, PREFIX, False, table, brief)
    d, tokens = call.dims, REQUESTS * queries
    merge = _product_us(call, 0.0, 3 * call.dtype.itemsize * tokens * call.heads * d.v)
    return new + unfold + before + merge + UNFOLDING * _unfold_us(call, REQUESTS * PREFIX), decision


def _attend(call: LatentCall, queries: int, keys: int, causal: bool, table: Table | None, brief: bool) -> tuple[float, Decision]:
    d = call.dims
    problem = Problem.of(
        op="varlen_attention", target=call.target, dtype=call.dtype, kv_dtype=call.dtype, q_heads=call.heads, kv_heads=call.heads,
        head_dim=d.nope + d.rope, v_head_dim=d.v, causal=causal, lse=bool(call.before), padded=False, sizes=_sizes(queries, keys),
    )  # fmt: skip
    decision = select_by(table, problem, call.policies[1], brief)
    # Tables hold packed calls of as many keys as queries only; their times do not extend to calls of other shapes.
    return (_us(decision) if causal or decision.kernel is None else decision.kernel.cost_us(problem)), decision


def _unfold_us(call: LatentCall, tokens: int) -> float:
    """A product with W, and the pass that puts the rotated part behind each head's key."""
    d, width = call.dims, call.dtype.itemsize
    weights, made = call.heads * d.latent * (d.nope + d.v), tokens * call.heads * (d.nope + d.v)
    keys = tokens * call.heads * (2 * d.nope + d.rope)
    return _product_us(call, 2.0 * tokens * weights, width * (weights + made)) + _product_us(call, 0.0, width * keys)


def _product_us(call: LatentCall, flops: float, moved: float, launches: int = 1) -> float:
    arch = call.target.arch if call.target.device == "cuda" else 0
    rates = RATES[max(a for a in RATES if a <= arch)]
    flops_us = PRODUCTS * rates.matmul * 1e6 * min(2 / call.dtype.itemsize, 1.0)
    bytes_us = COPIES * rates.bandwidth * 1e6
    return launches * LAUNCH_US + max(flops / flops_us, moved / bytes_us)


def _sizes(queries: int, keys: int) -> Extents:
    return Extents(*map(Extent.of, (REQUESTS * queries, REQUESTS, queries, keys)))


def _us(decision: Decision) -> float:
    return inf if decision.kernel is None else decision.costs[decision.kernel.name].us
