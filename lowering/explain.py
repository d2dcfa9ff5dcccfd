"""`explain`: the kernel of every attention call of a model, on this machine or another, and the reasons against the others."""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..kernel import all_kernels
from ..measured import in_force
from ..ops import Op
from ..ops.latent_form import FormDecision, LatentCall, watch_forms
from ..ops.op import watch
from ..problem import Problem, Target, pretend
from ..select import Decision, select, workspace_bytes


@dataclass(frozen=True)
class CallSite:
    """One or more calls with the same decision.

    where: module paths, with `*` for numbers.
    count: the number of calls.
    """

    where: str
    count: int
    decision: Decision


@dataclass(frozen=True)
class FormSite:
    """One or more steps of latent attention (MLA) with the same decision of form; fields as in CallSite."""

    where: str
    count: int
    decision: FormDecision


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` is the table.

    sites: call sites in order of first use.
    times: the measured times that the choices use; "" where all kernels are ranked by their own estimates.
    forms: choices of form of latent attention, printed before the calls that follow from them.
    """

    target: str
    assumed: tuple[str, ...] | None
    sites: tuple[CallSite, ...]
    times: str = ""
    forms: tuple[FormSite, ...] = ()

    def __str__(self) -> str:
        assumed = "" if self.assumed is None else f", assuming packages: {', '.join(self.assumed) or 'none'}"
        lines = [f"target {self.target}{assumed}", *([self.times] if self.times else [])]
        printed: set[str] = set()
        for site in self.sites:
            forms = () if site.where in printed else tuple(f for f in self.forms if f.where == site.where)
            printed.add(site.where)
            entries: tuple[CallSite | FormSite, ...] = (*forms, site)
            for entry in entries:
                lines.append(f"\n{entry.where}  x{entry.count}")
                lines.extend("  " + line for line in str(entry.decision).splitlines())
        return "\n".join(lines if self.sites else [*lines, "no attnops call was made"])

    def chosen(self) -> tuple[str, ...]:
        """`op.kernel` of every call site, in order."""
        return tuple(f"{s.decision.problem.op}.{s.decision.kernel.name if s.decision.kernel else 'none'}" for s in self.sites)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace with which every call gets the kernel that selection prefers. 0: none needs any."""
        return max((workspace_bytes(s.decision.problem, s.decision.policy) for s in self.sites), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain data, for JSON."""
        return {
            "target": self.target,
            "assumed": self.assumed,
            "times": self.times,
            "calls": [
                {
                    "where": s.where,
                    "count": s.count,
                    "op": s.decision.problem.op,
                    "problem": s.decision.problem.summary(),
                    "kernel": s.decision.kernel.name if s.decision.kernel else None,
                    "by_judge": s.decision.by_judge,
                    "can_run": list(s.decision.passed_over),
                    "never_run": [n for n in s.decision.costs if s.decision.untried(n)],
                    "cost_us": {n: {"us": float(f"{c.us:.4g}"), "how": c.how} for n, c in s.decision.costs.items()},
                    "refused": {
                        name: [{"field": r.field, "got": str(r.got), "want": r.want} for r in reasons]
                        for name, reasons in s.decision.refused.items()
                    },
                }
                for s in self.sites
            ],
            "forms": [
                {
                    "where": f.where,
                    "count": f.count,
                    "form": f.decision.form,
                    "new_tokens": f.decision.queries,
                    "absorb_up_to": f.decision.absorb_up_to,
                    "us": {n: float(f"{us:.4g}") for n, us in f.decision.costs.items()},
                }
                for f in self.forms
            ],
        }


def packages_of_kernels() -> tuple[str, ...]:
    """The modules that kernels need, sorted."""
    return tuple(sorted({p.module for k in all_kernels() for p in k.packages}))


def explain(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    assume: tuple[str, ...] | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Run `model(*args, **kwargs)` on fake tensors and report, per call site, the kernel and the reasons against all others.

    No kernel runs and no weight is read. Python state of the arguments, such as lengths in a cache object, changes as in a call. A
    compiled model runs uncompiled, with the same Problems.

    Args:
        model: a module or function.
        args: its inputs, real or fake tensors.
        kwargs: its inputs by name.
        target: None for this machine, or "cpu", "sm80", "sm90", "sm100", ..., on any machine.
        assume: modules to treat as installed on a named target; default: all that kernels need. Not allowed with target=None.
        quiet: do not print.

    Returns:
        An Explanation, printed unless quiet.

    Raises:
        InvalidInput: an unknown target, or assume without a target. Errors of the call itself pass through.
    """
    from ..errors import InvalidInput

    if target is None and assume is not None:
        raise InvalidInput("assume", assume, "None without a target: packages of this machine are looked up")
    named = Target.parse(target, assume) if isinstance(target, str) else target
    if named is not None and named.assume is None:
        named = dataclasses.replace(named, assume=packages_of_kernels())
    found: dict[tuple[str, Problem, str], int] = {}
    formed: dict[tuple[str, LatentCall, int], tuple[int, FormDecision]] = {}
    path = _ModulePath(model)

    def form_watcher(decision: FormDecision) -> None:
        spot = (_folded(path.current()), decision.call, decision.queries)
        formed[spot] = (formed.get(spot, (0, decision))[0] + 1, decision)

    def watcher(op: Op, problem: Problem, policy: str) -> None:
        site = (path.current(), problem, policy)
        found[site] = found.get(site, 0) + 1

    call = getattr(model, "_orig_mod", model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(named))
        stack.enter_context(path.tracked())
        stack.callback(watch(watcher))
        stack.callback(watch_forms(form_watcher))
        stack.enter_context(_eager_stance())
        stack.enter_context(_fake_mode(args, kwargs))
        if isinstance(call, nn.Module) and not call.training:
            stack.enter_context(torch.no_grad())
        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, _fake, (args, kwargs))
        call(*fake_args, **fake_kwargs)
        here = str(named) if named is not None else ("cuda" if torch.cuda.is_available() else "cpu") + " (this machine)"
        sites = _fold([(where, count, select(problem, policy)) for (where, problem, policy), count in found.items()])
    forms = tuple(FormSite(where, count, decision) for (where, _, _), (count, decision) in formed.items())
    explanation = Explanation(here, named.assume if named else None, sites, _times(sites), forms)
    if not quiet:
        print(explanation)
    return explanation


def _times(sites: tuple[CallSite, ...]) -> str:
    """The source of the measured times, "" where no choice uses any."""
    for site in sites:
        decision = site.decision
        if decision.measured and (table := (found := in_force(decision.problem.target)).table) is not None:
            kind = "the table shipped with attnops" if found.shipped else "this machine's table"
            return f"measured times: {table.source or table.gpu}, {kind}" + (f", scaled to {table.gpu}" if table.source else "")
    return ""


def _fold(calls: list[tuple[str, int, Decision]]) -> tuple[CallSite, ...]:
    """Merge calls with the same decision whose paths differ in numbers only."""
    folded: dict[tuple[str, Problem, str], tuple[int, Decision]] = {}
    for where, count, decision in calls:
        spot = (_folded(where), decision.problem, decision.policy.key)
        folded[spot] = (folded.get(spot, (0, decision))[0] + count, decision)
    return tuple(CallSite(where, count, decision) for (where, _, _), (count, decision) in folded.items())


def _folded(where: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", where)


class _ModulePath:
    """The dotted path of the innermost module being called."""

    def __init__(self, model: Any) -> None:
        root = getattr(model, "_orig_mod", model)
        self._names = {id(m): n or type(m).__name__ for n, m in root.named_modules()} if isinstance(root, nn.Module) else {}
        self._stack: list[str] = []

    def current(self) -> str:
        return self._stack[-1] if self._stack else "(function)"

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._stack.pop()

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _fake(x: torch.Tensor) -> torch.Tensor:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor

    mode = detect_fake_mode()
    return x if isinstance(x, FakeTensor) or mode is None else mode.from_tensor(x)


@contextlib.contextmanager
def _fake_mode(args: Any, kwargs: Any) -> Iterator[None]:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs))) or FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def _eager_stance() -> contextlib.AbstractContextManager[Any]:
    # Compiled submodules run uncompiled. A process without Dynamo has none.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
