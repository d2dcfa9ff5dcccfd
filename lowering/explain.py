"""`explain`: the kernel of every attention call of a model, and the reasons against the others."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..core.kernel import all_kernels
from ..core.op import watch
from ..core.private_torch import FakeTensor, FakeTensorMode
from ..core.problem import Problem, Target, altered, pretend
from ..core.record import need
from ..core.select import Decision, select, workspace_bytes
from ..measured import in_force
from ..ops import Op
from ..ops.latent.absorb_or_expand import FormDecision, watch_forms
from .inductor import detect_fake_mode, dynamo_is_loaded

D = TypeVar("D", Decision, FormDecision)


@dataclass(frozen=True)
class Site(Generic[D]):
    """One or more calls with the same decision.

    The decision is on the kernel or, of latent attention (MLA), between absorbed and expanded.

    where: module paths, with `*` for numbers.
    """

    where: str
    count: int
    decision: D


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` is the table.

    sites: call sites in order of first use.
    times: the measured times that the choices use; "" where all kernels are ranked by estimates.
    forms: decisions between absorbed and expanded latents, printed before the calls that follow.
    """

    target: str
    assumed: tuple[str, ...] | None
    sites: tuple[Site[Decision], ...]
    times: str = ""
    forms: tuple[Site[FormDecision], ...] = ()

    def __str__(self) -> str:
        lines = [f"target {self.target}"]
        if self.assumed is not None:
            lines[0] += f", assuming packages: {', '.join(self.assumed) or 'none'}"
        if self.times:
            lines.append(self.times)
        first = {site.where: site for site in reversed(self.sites)}
        for site in self.sites:
            forms = (form for form in self.forms if first.get(form.where) is site)
            entries: tuple[Site[Any], ...] = (*forms, site)
            for entry in entries:
                lines += [f"\n{entry.where}  x{entry.count}", indent(str(entry.decision), "  ")]
        return "\n".join(lines if self.sites else [*lines, "no attnops call was made"])

    def chosen(self) -> tuple[str, ...]:
        """`op.kernel` of every call site, in order."""
        names = ((s.decision.problem.op, s.decision.kernel) for s in self.sites)
        return tuple(f"{op}.{kernel.name if kernel else 'none'}" for op, kernel in names)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace with which every call gets the kernel that selection prefers.

        0 where no call needs one.
        """
        decisions = (site.decision for site in self.sites)
        return max((workspace_bytes(d.problem, d.policy) for d in decisions), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain data, for JSON."""
        calls = [{"where": s.where, "count": s.count, **_call(s.decision)} for s in self.sites]
        forms = [{"where": s.where, "count": s.count, **_form(s.decision)} for s in self.forms]
        return {
            "target": self.target,
            "assumed": self.assumed,
            "times": self.times,
            "calls": calls,
            "forms": forms,
        }


def _call(d: Decision) -> dict[str, Any]:
    return {
        "op": d.problem.op,
        "problem": d.problem.summary(),
        "kernel": d.kernel.name if d.kernel else None,
        "by_judge": d.by_judge,
        "awaited": d.awaited,
        "can_run": list(d.passed_over),
        "never_run": [name for name in d.costs if d.untried(name)],
        "cost_us": {name: {"us": _short(c.us), "how": c.how} for name, c in d.costs.items()},
        "refused": {n: [{**vars(r), "got": str(r.got)} for r in rs] for n, rs in d.refused.items()},
    }


def _form(d: FormDecision) -> dict[str, Any]:
    return {
        "form": d.form,
        "new_tokens": d.queries,
        "absorb_up_to": d.absorb_up_to,
        "us": {name: _short(us) for name, us in d.costs.items()},
    }


def _short(us: float) -> float:
    return float(f"{us:.4g}")


def packages_of_kernels() -> tuple[str, ...]:
    """The modules that kernels need, sorted."""
    packages = (package for kernel in all_kernels() for package in kernel.packages)
    return tuple(sorted({each.module for package in packages for each in package.each}))


def explain(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    assume: tuple[str, ...] | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Run `model(*args, **kwargs)` on fake tensors and report the kernel of every call site.

    The report has the reasons against all other kernels. No kernel runs and no weight is read.
    Python state of the arguments, such as lengths in a cache object, changes as in a call. A
    compiled model runs uncompiled, with the Problems of compiled code: plain torch that a compiler
    fuses is priced so.

    Args:
        model: a module or function.
        args: its inputs, real or fake tensors.
        kwargs: its inputs by name.
        target: None for this machine, or, on any machine, "cpu", a GPU ("h100", "h200", "b200",
            "rtx4090") or an architecture ("sm80", "sm90", "sm100", "gfx942", ...). The two GPUs of
            SM90 have a table of measured times each.
        assume: modules to treat as installed on a named target; default: all that kernels need. Not
            allowed with target=None.
        quiet: do not print.

    Returns:
        An Explanation, printed unless quiet.

    Raises:
        InvalidInput: an unknown target, or assume without a target. Errors of the call itself pass
            through.
    """
    named = _target(target, assume)
    calls: dict[Any, Site[Decision]] = {}
    forms: dict[Any, Site[FormDecision]] = {}
    run = getattr(model, "_orig_mod", model)
    compiled = run is not model or hasattr(model, "_torchdynamo_orig_callable")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(named))
        path = stack.enter_context(_module_path(run))

        def on_call(op: Op, problem: Problem, call: Any) -> None:
            decision = select(altered(problem, compiled=compiled), call.policy)
            _count(calls, path(), decision, problem, decision.policy.key)

        def on_form(decision: FormDecision) -> None:
            _count(forms, path(), decision, decision.layer, decision.queries)

        given, rest = stack.enter_context(_fake((args, kwargs)))
        stack.callback(watch(on_call))
        stack.callback(watch_forms(on_form))
        if dynamo_is_loaded():  # compiled submodules run uncompiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(run, nn.Module) and not run.training:
            stack.enter_context(torch.no_grad())
        run(*given, **rest)
    machine = "cuda" if torch.cuda.is_available() else "cpu"
    title = named.title if named else f"{machine} (this machine)"
    assumed, sites = named.assume if named else None, tuple(calls.values())
    explanation = Explanation(title, assumed, sites, _times(sites), tuple(forms.values()))
    if not quiet:
        print(explanation)
    return explanation


def _target(target: str | Target | None, assume: tuple[str, ...] | None) -> Target | None:
    wanted = 'a name such as "sm90", a Target, or None'
    need(target is None or isinstance(target, (str, Target)), "target", repr(target), wanted)
    wanted = "None without a target: packages of this machine are looked up"
    need(target is not None or assume is None, "assume", assume, wanted)
    named = Target.parse(target, assume) if isinstance(target, str) else target
    if named is not None and named.assume is None:
        return dataclasses.replace(named, assume=packages_of_kernels())
    return named


def _count(sites: dict[Any, Site[D]], where: str, decision: D, *facts: object) -> None:
    """Count a call at the site of calls that have the same facts."""
    site = sites.get((where, facts)) or Site(where, 0, decision)
    sites[where, facts] = dataclasses.replace(site, count=site.count + 1)


@contextlib.contextmanager
def _fake(inputs: Any) -> Iterator[Any]:
    """The inputs as fake tensors, in a mode that takes real weights beside them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # As without a ShapeEnv, but for our own ops.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    own = FakeTensorMode(shape_env=shapes, static_shapes=True)
    mode = detect_fake_mode(pytree.tree_leaves(inputs)) or own

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x)

    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield pytree.tree_map_only(torch.Tensor, fake, inputs)
    finally:
        mode.allow_non_fake_inputs = before


def _times(sites: tuple[Site[Decision], ...]) -> str:
    """The source of the measured times, "" where no choice uses any."""
    for problem in (site.decision.problem for site in sites if site.decision.measured):
        found = in_force(problem.target)
        if (table := found.table) is not None:
            kind = "the table shipped with attnops" if found.shipped else "this machine's table"
            scaled = f", scaled to {table.gpu}" if table.source else ""
            return f"measured times: {table.source or table.gpu}, {kind}{scaled}"
    return ""


@contextlib.contextmanager
def _module_path(model: Any) -> Iterator[Callable[[], str]]:
    """A function that returns the dotted path of the innermost module being called.

    It has `*` for numbers.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    names = {id(module): name for name, module in modules}
    called = ["(function)"]

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(id(module)) or type(module).__name__
        called.append(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", name))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        called.pop()

    hooks = nn.modules.module
    entering = hooks.register_module_forward_pre_hook(enter)
    with entering, hooks.register_module_forward_hook(leave, always_call=True):
        yield lambda: called[-1]
