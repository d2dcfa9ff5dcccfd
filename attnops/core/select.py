"""`select(problem, policy) -> Decision`: the one place that chooses. No imports, no device, no
logging of its own.

Pure, given the kernels registered and the table of measured times that is in force for the
problem's target.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Any

from attnops.core.builds import wish
from attnops.core.errors import InvalidInput, NoKernel, UnknownKernel, fail
from attnops.core.kernel import (
    Failed,
    Kernel,
    all_kernels,
    deterministic as deterministic_key,
    generation,
    kernel_names,
    kernels_of,
)
from attnops.core.problem import Extent, Extents, Problem, Refusal, altered
from attnops.core.told import tell
from attnops.core.traits import Unbuilt
from attnops.measured import (
    ESTIMATED,
    MEASURED,
    NOWHERE,
    Cost,
    Table,
    costs,
    in_force,
    never_run,
    ran_on,
)
from attnops.measured.cost import SCALED
from attnops.measured.store import default_policy_key

KERNEL_LISTS = ("kernel", "allow", "deny", "prefer")
"""The fields of a Policy that list kernels."""

MOST = 8192
"""Decisions that are kept: those that were made last."""
_DECISIONS: dict[tuple[Any, ...], Decision] = {}
_KEEPING = threading.Lock()


@dataclass(frozen=True)
class Policy:
    """The user's constraints on selection.

    Every entry is a name, `"fa3"`, which speaks of every op that has a kernel of that name and
    leaves the others alone, or a name with its op, `"paged_attention:fa3"`.

    kernel: force these. allow: only these may be chosen, on the ops they speak of. deny: these may
    not be chosen.
    prefer: these win, in this order, when they can run.
    deterministic: a request's result must not depend on its batch mates, bit for bit. Kernels that
    do not promise it refuse, and the
        choice follows from the model and the machine alone: no length, batch size or measured time
            reaches it (`without_sizes`), so
        that one kernel serves every step.
    """

    kernel: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    deterministic: bool = False

    @property
    def key(self) -> str:
        """The policy as the string that goes into the graph. Empty for the default policy."""
        parts = [
            f"{word}={','.join(names)}" for word in KERNEL_LISTS if (names := getattr(self, word))
        ]
        return ";".join(parts + ["deterministic"] * self.deterministic)

    def forced(self, op: str) -> str | None:
        """The kernel this policy forces on `op`, if any."""
        return next(
            (entry.rpartition(":")[2] for entry in self.kernel if _speaks_of(entry, op)), None
        )


@functools.lru_cache(maxsize=1024)
def parse_policy(key: str) -> Policy:
    """The inverse of `Policy.key`. Raises InvalidInput on an unknown word or op, UnknownKernel on a
    name no kernel bears."""
    values: dict[str, object] = {}
    for part in filter(None, key.split(";")):
        name, _, text = part.partition("=")
        if name == "deterministic" and not text:
            values[name] = True
        elif name in KERNEL_LISTS and text:
            values[name] = tuple(text.split(","))
        else:
            fail(
                InvalidInput,
                "policy",
                repr(part),
                "kernel=, allow=, deny=, prefer= with names, or deterministic",
            )
    policy = Policy(**values)  # type: ignore[arg-type]
    _check_names(policy)
    return policy


def _check_names(policy: Policy) -> None:
    for entry in chain.from_iterable(getattr(policy, word) for word in KERNEL_LISTS):
        scope, _, name = entry.rpartition(":")
        known = tuple(kernels_of(scope)) if scope else kernel_names()
        if not known:
            fail(
                InvalidInput,
                "policy",
                repr(entry),
                f"an op before the colon: {' | '.join(sorted({k.op for k in all_kernels()}))}",
            )
        if name not in known:
            fail(UnknownKernel, name, scope or "any", known)


@dataclass(frozen=True)
class Decision:
    """The kernel chosen for a problem, and every refusal of the others.

    costs: the time of each that can run. awaited: the kernel that would be chosen, were it built;
    "" for none.
    """

    problem: Problem
    policy: Policy
    kernel: Kernel | None
    refused: Mapping[str, tuple[Refusal, ...]]
    passed_over: tuple[str, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    awaited: str = ""

    @property
    def by_judge(self) -> str:
        """Why a GPU is left with the plain body, in a few words; nothing where a kernel answers."""
        if self.kernel is None or not self.kernel.judge or not self.problem.target.on_gpu:
            return ""
        if self.policy.forced(self.problem.op) == self.kernel.name or _rank(
            self.kernel, self.policy.prefer
        ) < len(self.policy.prefer):
            return "asked for"
        return "the fastest measured" if self.passed_over else "no kernel can run this call"

    def why_not(self, name: str) -> str:
        """Why a kernel that can run was passed over, in a few words."""
        if self.policy.prefer:
            return "not preferred"
        cost = self.costs.get(name, Cost(0.0, ESTIMATED))
        if cost.timed:
            return (
                f"{cost.how} slower, {cost.us:.4g} us"
                if cost.how == MEASURED
                else f"slower, {cost}"
            )
        if self.problem.target.on_gpu and kernels_of(self.problem.op)[name].judge:
            return "on a GPU only where nothing else can"
        if (better := self._rather_than(name, cost)) and unproven(self.problem, name, cost):
            return better
        return f"{cost.how} slower" if cost.how == ESTIMATED else "not measured, others are"

    def _rather_than(self, name: str, cost: Cost) -> str:
        """Why the chosen kernel is taken in place of one with a lower estimate; "" where there is
        none lower."""
        if self.kernel is None or self.costs[self.kernel.name].us <= cost.us:
            return ""
        where = ran_on().get(f"{self.problem.op}.{self.kernel.name}")
        known = f"ran on {', '.join(where)}" if where else "is of another package"
        return f"{cost.how} {cost.us:.4g} us, but {self.kernel.name} {known}"

    def untried(self, name: str) -> str:
        """`; never run on sm100` of a kernel that has not met the target's hardware, else
        nothing."""
        never = never_run(self.problem.op, name, self.problem.target)
        return f"; {never}" if never else ""

    @property
    def rank(self) -> tuple[int, bool, bool, float]:
        """The sort key of the choice, the least first. It also compares two decisions of one op and
        policy.

        The kernel's place among those preferred, the plain body on a GPU last, before it kernels
        that have run nowhere, then the cost. A decision without a kernel comes last.
        """
        if self.kernel is None:
            return sys.maxsize, True, True, inf
        cost = self.costs[self.kernel.name]
        judged = bool(self.by_judge) and cost.how != MEASURED
        return (
            _rank(self.kernel, self.policy.prefer),
            judged,
            unproven(self.problem, self.kernel.name, cost),
            cost.us,
        )

    @property
    def measured(self) -> str:
        """`, measured 25.7 us` or `, 25.7 us scaled from NVIDIA H200` when the choice rests on a
        measured time, else nothing."""
        cost = self.costs.get(self.kernel.name) if self.kernel is not None else None
        return f", {cost}" if cost is not None and cost.timed else ""

    @property
    def build(self) -> str:
        """The kernel that will be chosen once it is built, with the command, as the end of a line;
        else nothing."""
        if not self.awaited:
            return ""
        return f"; {self.awaited} once it is built: {self.refused[self.awaited][0].want}"

    def __str__(self) -> str:
        head = (
            f"{self.problem.op} on {self.problem.target} -> "
            f"{self.kernel.name if self.kernel else 'nothing fits'}{self.measured}"
        )
        head += f": {self.by_judge}" if self.by_judge else ""
        head += self.untried(self.kernel.name) if self.kernel else ""
        if self.kernel and self.kernel.unrepeated(self.problem):
            head += "; its bits may differ from run to run"
        head += self.build
        lines = [f"  not {n}: {'; '.join(map(str, rs))}" for n, rs in self.refused.items()]
        slower = [
            f"  not {n}: can run, {self.why_not(n)}{self.untried(n)}" for n in self.passed_over
        ]
        return "\n".join([head, f"  problem: {self.problem.summary()}", *slower, *lines])


def select(problem: Problem, policy: Policy | str = "") -> Decision:
    """Choose a kernel for `problem` under `policy` (a Policy or its key). Never raises for want of
    a kernel.

    Memoised, unless a kernel failed to answer (`attnops.core.kernel.Failed`): the cause may pass,
    so it is asked again at the next call.
    """
    return select_by(in_force(problem.target).table, problem, policy)


def select_by(
    table: Table | None, problem: Problem, policy: Policy | str = "", brief: bool = False
) -> Decision:
    """As `select`, by the times of `table`, or by the kernels' own estimates when it is None.

    brief: the chosen kernel and its cost are all that is asked for; of other kernels the Decision
    holds their first refusal.
    """
    policy = policy if isinstance(policy, Policy) else parse_policy(policy)
    key = problem, policy, generation(), table, brief
    if (known := _DECISIONS.get(key)) is not None:
        return known
    decision = _decide(problem, policy, table, brief)
    warns = decision.kernel is None and problem.step.repeatable == "warn"
    if warns and not has_failed(decision):
        anyhow = select_by(table, altered(problem, repeatable="no"), policy, brief)
        decision = replace(anyhow, problem=problem)
    if has_failed(decision):
        return decision
    for name, reasons in decision.refused.items():
        for reason in reasons:
            # A deterministic policy keeps its kernels, and with them its bits, while it runs.
            if isinstance(reason, Unbuilt) and not policy.deterministic:
                kernel = kernels_of(problem.op)[name]
                wish(kernel, _seen(problem, policy), reason, name == decision.awaited)
    with _KEEPING:
        if len(_DECISIONS) >= MOST:
            del _DECISIONS[next(iter(_DECISIONS))]
        _DECISIONS[key] = decision
    return decision


def choose(problem: Problem, policy: Policy | str = "") -> Kernel:
    """As `select`, but the kernel itself. Raises NoKernel with every reason when none may run, or
    when a forced one may not."""
    kernel = select_by(in_force(problem.target).table, problem, policy, brief=True).kernel
    if kernel is None:
        decision = select(problem, policy)
        forced = decision.policy.forced(problem.op)
        raise NoKernel(
            f"kernel {forced!r} was asked for and cannot run"
            if forced
            else f"no kernel can run this {problem.op}",
            decision,
        )
    if kernel.stopgap or problem.step.repeatable != "no":
        tell(kernel, problem)
    return kernel


def workspace_bytes(problem: Problem, policy: Policy | str = "") -> int:
    """Bytes of scratch that a call needs for the kernel that would be chosen if it brought enough.
    0: the kernel uses no scratch."""
    kernel = select(altered(problem, workspace=1 << 62), policy).kernel
    return (
        0 if kernel is None or kernel.workspace_bytes is None else kernel.workspace_bytes(problem)
    )


def has_failed(decision: Decision) -> bool:
    """Did a kernel fail to answer? The cause may pass, so such a decision is not kept."""
    return any(isinstance(reason, Failed) for reason in chain(*decision.refused.values()))


def _decide(problem: Problem, policy: Policy, table: Table | None, brief: bool) -> Decision:
    _check_names(policy)
    seen = _seen(problem, policy)
    forced, kernels = policy.forced(problem.op), kernels_of(problem.op)
    against = {
        name: _against(kernel, seen, policy, forced, brief) for name, kernel in kernels.items()
    }
    fits = [kernels[name] for name, reasons in against.items() if not reasons]
    needed, ranked = _in_order(problem, policy, fits, table)
    refused = {name: reasons for name, reasons in against.items() if reasons}
    return Decision(
        problem,
        policy,
        ranked[0] if ranked else None,
        refused,
        tuple(k.name for k in ranked[1:]),
        needed,
        _awaited(problem, policy, table, fits, refused),
    )


def _seen(problem: Problem, policy: Policy) -> Problem:
    """The problem as its policy shows it to kernels."""
    return without_sizes(problem) if policy.deterministic else problem


def _awaited(
    problem: Problem,
    policy: Policy,
    table: Table | None,
    fits: list[Kernel],
    refused: Mapping[str, tuple[Refusal, ...]],
) -> str:
    """The kernel that would be chosen, were it built; "" for none."""
    kernels = kernels_of(problem.op)
    waiting = [kernels[n] for n, reasons in refused.items() if isinstance(reasons[0], Unbuilt)]
    if not waiting:
        return ""
    _, ranked = _in_order(problem, policy, [*fits, *waiting], table)
    return ranked[0].name if ranked[0] in waiting else ""


def _in_order(
    problem: Problem, policy: Policy, kernels: list[Kernel], table: Table | None
) -> tuple[dict[str, Cost], list[Kernel]]:
    """(the time of each of these kernels, the kernels, the best first)."""
    seen = _seen(problem, policy)
    needed = (
        _invariant_costs(seen, kernels) if policy.deterministic else _costs(problem, kernels, table)
    )
    return needed, _ranked(problem, policy, kernels, needed)


def _against(
    kernel: Kernel, problem: Problem, policy: Policy, forced: str | None, brief: bool
) -> tuple[Refusal, ...]:
    """The kernel's own reasons against the problem, then the policy's; where there is none, what
    is not built of a kernel that is not forced."""
    reasons = tuple(_policy_refusals(kernel, problem, policy, forced))
    if brief and reasons:
        return reasons
    against = kernel.refusals(problem, brief) + reasons
    return against if against or forced is not None else kernel.unbuilt(problem)


def _costs(problem: Problem, fits: list[Kernel], table: Table | None) -> dict[str, Cost]:
    # Without a table no more of our files than this one is entered.
    needed = (
        {k.name: Cost(k.cost_us(problem), ESTIMATED) for k in fits}
        if table is None
        else costs(problem, fits, table)
    )
    return {k.name: _in_turn(k, problem, needed[k.name]) for k in fits}


def _ranked(
    problem: Problem, policy: Policy, fits: list[Kernel], needed: Mapping[str, Cost]
) -> list[Kernel]:
    """The kernels that can run, the best first."""
    order = {k.name: (unproven(problem, k.name, needed[k.name]), needed[k.name].us) for k in fits}
    guessed = _guessed(problem, fits, needed, order)
    return sorted(
        fits, key=lambda k: (_rank(k, policy.prefer), k.judge and guessed, *order[k.name])
    )


def _in_turn(kernel: Kernel, problem: Problem, cost: Cost) -> Cost:
    """The cost of a kernel that repeats its bits in a mode of its own, which is its way of a
    deterministic policy."""
    usual, steady = kernel.cost_us(problem), kernel.steady_us(problem)
    if problem.step.repeatable == "no" or not kernel.repeats or usual in (0.0, steady):
        return cost
    how = f"{SCALED} its time without turns" if cost.timed else cost.how
    return Cost(cost.us * steady / usual, how)


def without_sizes(problem: Problem) -> Problem:
    """`problem` as a deterministic policy sees it: without sizes and without promises of a single
    call.

    Sizes are unbounded, so a kernel of few queries refuses even a decode step, which may share its
    batch with a prompt, unless it takes any number under such a policy (`StepFacts.deterministic`).
    """
    return _step(problem, DECODE if problem.page_size else PROMPT)


DECODE, PROMPT = (8, 1), (1, 4096)
"""Requests, and queries of each, of the steps that a deterministic policy estimates; 4096 keys a
request."""

DECODES = 64
"""Decode steps to a prompt: eight requests at a time, each of which decodes 512 tokens."""


def _step(problem: Problem, step: tuple[int, int]) -> Problem:
    batch, queries = step
    sizes = Extents(*(Extent(0, None, hint) for hint in (batch * queries, batch, queries, 4096)))
    return altered(
        problem,
        padded=True,
        holes=False,
        sizes_equal=False,
        deterministic=True,
        compiled=False,
        sizes=sizes,
    )


def _invariant_costs(seen: Problem, kernels: list[Kernel]) -> dict[str, Cost]:
    """Of a fixed load: over pages a mean step of serving, elsewhere a prompt."""
    load = {_step(seen, DECODE): DECODES, _step(seen, PROMPT): 1} if seen.page_size else {seen: 1}
    steps = sum(load.values())
    return {
        k.name: Cost(sum(n * k.steady_us(p) for p, n in load.items()) / steps, ESTIMATED)
        for k in kernels
    }


def decode_us(decision: Decision) -> float:
    """Microseconds of a decode step by the kernel chosen; under a deterministic policy no size of
    the call counts, as in the choice."""
    kernel = decision.kernel
    if kernel is None:
        return inf
    return (
        kernel.steady_us(_step(decision.problem, DECODE))
        if decision.policy.deterministic
        else decision.costs[kernel.name].us
    )


def unproven(problem: Problem, name: str, cost: Cost) -> bool:
    """Has the kernel run on no GPU, as far as the committed results and its times tell?

    Its estimate then decides only among its like. A kernel of another package has no record, and
    its author's word counts.
    """
    return not cost.timed and never_run(problem.op, name, problem.target) == NOWHERE


def _guessed(
    problem: Problem,
    kernels: list[Kernel],
    needed: Mapping[str, Cost],
    order: Mapping[str, tuple[bool, float]],
) -> bool:
    """Would the judge win by a guess on a GPU? It may only beat a measured time, and only with one
    of its own."""
    players = [k for k in kernels if not k.judge]
    if not problem.target.on_gpu or not players:
        return False
    best = min(players, key=lambda k: order[k.name])
    return any(needed[k.name].how != MEASURED for k in kernels if k.judge or k is best)


def _policy_refusals(
    kernel: Kernel, problem: Problem, policy: Policy, forced: str | None
) -> Iterator[Refusal]:
    if forced is not None and kernel.name != forced:
        yield Refusal("policy.kernel", forced, kernel.name)
    if policy.deterministic:
        yield from kernel.varies(problem)
    # allow= leaves an op alone that it does not name: the op may have no kernel but `reference`.
    if any(_speaks_of(n, kernel.op) for n in policy.allow) and not _named(kernel, policy.allow):
        yield Refusal("policy.allow", ",".join(policy.allow), f"to hold {kernel.name}")
    if _named(kernel, policy.deny):
        yield Refusal("policy.deny", ",".join(policy.deny), f"not to hold {kernel.name}")


def _named(kernel: Kernel, names: tuple[str, ...]) -> bool:
    return kernel.name in names or f"{kernel.op}:{kernel.name}" in names


def _speaks_of(name: str, op: str) -> bool:
    scope, _, kernel = name.rpartition(":")
    return scope == op if scope else kernel in kernels_of(op)


def _rank(kernel: Kernel, prefer: tuple[str, ...]) -> int:
    return next(
        (i for i, name in enumerate(prefer) if name in (kernel.name, f"{kernel.op}:{kernel.name}")),
        len(prefer),
    )


# The policy in force ------------------------------------------------------------------------------


class _Active(threading.local):
    # Dynamo guards on reads of an instance's attribute, and not on one found on the class: code
    # compiled under one policy must not be reused under another.
    def __init__(self) -> None:
        self.put(default_policy_key())

    def put(self, key: str) -> None:
        """Put the policy of this key in force. Modules ask at every call whether it is
        deterministic."""
        self.key = key
        self.deterministic = deterministic_key(key)


_ACTIVE = _Active()


def active_policy() -> str:
    """The key of the policy in force in this thread."""
    return _ACTIVE.key


@contextmanager
def use(
    kernel: str | Mapping[str, str] | None = None,
    *,
    allow: tuple[str, ...] = (),
    deny: tuple[str, ...] = (),
    prefer: tuple[str, ...] = (),
    deterministic: bool = False,
) -> Iterator[None]:
    """Within the block (and this thread) calls are selected under this policy, eager and compiled
    alike.

    kernel: a name, or a mapping of op to name. See Policy for the rest. The policy becomes an
    argument of every op called in the block, so it is part of the graph, of Dynamo's guards and of
    the compile caches' keys. Raises UnknownKernel for a name that no kernel bears, InvalidInput for
    an op without kernels.
    """
    forced = (
        (kernel,)
        if isinstance(kernel, str)
        else tuple(f"{op}:{name}" for op, name in (kernel or {}).items())
    )
    before = _ACTIVE.key
    key = Policy(forced, tuple(allow), tuple(deny), tuple(prefer), deterministic).key
    parse_policy(key)  # checks its names
    _ACTIVE.put(key)
    try:
        yield
    finally:
        _ACTIVE.put(before)


def key_for(op: str, kernel: str | None) -> str:
    """The policy key of one call: the policy in force, in which `kernel`, if given, replaces the
    forced kernels."""
    if kernel is None:
        return _ACTIVE.key
    rest = (
        ";".join(p for p in _ACTIVE.key.split(";") if p and not p.startswith("kernel="))
        if _ACTIVE.key
        else ""
    )
    return f"kernel={op}:{kernel}" + (f";{rest}" if rest else "")
