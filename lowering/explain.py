"""`explain`: the kernel of every attention call of a model, on this machine or another, and the reasons against the others."""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..call import need
from ..kernel import all_kernels
from ..measured import in_force
from ..ops import Op
from ..ops.latent_form import FormDecision, watch_forms
from ..ops.op import watch
from ..problem import Problem, Target, altered, pretend
from ..select import Decision, select, workspace_bytes

D = TypeVar("D", Decision, FormDecision)


@dataclass(frozen=True)
class Site(Generic[D]):
    """One or more calls with the same decision: on the kernel or, of latent attention (MLA), between absorbed and expanded.

    where: module paths, with `*` for numbers.
    """

    where: str
    count: int
    decision: D


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` is the table.

    sites: call sites in order of first use.
    times: the measured times that the choices use; "" where all kernels are ranked by their own estimates.
    forms: decisions between absorbed and expanded latents, printed before the calls that follow from them.
    """

    target: str
    assumed: tuple[str, ...] | None
    sites: tuple[Site[Decision], ...]
    times: str = ""
    forms: tuple[Site[FormDecision], ...] = ()

    def __str__(self) -> str:
        assumed = "" if self.assumed is None else f", assuming packages: {', '.join(self.assumed) or 'none'}"
        lines = [f"target {self.target}{assumed}", *([self.times] if self.times else [])]
        first = {site.where: site for site in reversed(self.sites)}
        for site in self.sites:
            entries: tuple[Site[Any], ...] = (*(form for form in self.forms if first.get(form.where) is site), site)
            for entry in entries:
                lines += [f"\n{entry.where}  x{entry.count}", indent(str(entry.decision), "  ")]
        return "\n".join(lines if self.sites else [*lines, "no attnops call was made"])

    def chosen(self) -> tuple[str, ...]:
        """`op.kernel` of every call site, in order."""
        return tuple(f"{s.decision.problem.op}.{s.decision.kernel.name if s.decision.kernel else 'none'}" for s in self.sites)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace with which every call gets the kernel that selection prefers; 0 where no call needs one."""
        return max((workspace_bytes(s.decision.problem, s.decision.policy) for s in self.sites), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain data, for JSON."""
        forms = [
            {
                "where": f.where, "count": f.count, "form": f.decision.form, "new_tokens": f.decision.queries,
                "absorb_up_to": f.decision.absorb_up_to, "us": {n: _short(us) for n, us in f.decision.costs.items()},
            }
            for f in self.forms
        ]  # fmt: skip
        calls = [
            {
                "where": s.where, "count": s.count, "op": d.problem.op, "problem": d.problem.summary(),
                "kernel": d.kernel.name if d.kernel else None, "by_judge": d.by_judge, "can_run": list(d.passed_over),
                "never_run": [n for n in d.costs if d.untried(n)],
                "cost_us": {n: {"us": _short(c.us), "how": c.how} for n, c in d.costs.items()},
                "refused": {n: [{"field": r.field, "got": str(r.got), "want": r.want} for r in found] for n, found in d.refused.items()},
            }
            for s in self.sites for d in [s.decision]
        ]  # fmt: skip
        return {"target": self.target, "assumed": self.assumed, "times": self.times, "calls": calls, "forms": forms}


def _short(us: float) -> float:
    return float(f"{us:.4g}")


def packages_of_kernels() -> tuple[str, ...]:
    """The modules that kernels need, sorted."""
    return tuple(sorted({module for k in all_kernels() for p in k.packages for module in (each.module for each in p.each)}))


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
    compiled model runs uncompiled, with the Problems of compiled code: plain torch that a compiler fuses is priced so.

    Args:
        model: a module or function.
        args: its inputs, real or fake tensors.
        kwargs: its inputs by name.
        target: None for this machine, or, on any machine, "cpu", a GPU ("h100", "h200", "b200", "rtx4090") or an architecture ("sm80",
            "sm90", "sm100", "gfx942", ...). The two GPUs of SM90 have a table of measured times each.
        assume: modules to treat as installed on a named target; default: all that kernels need. Not allowed with target=None.
        quiet: do not print.

    Returns:
        An Explanation, printed unless quiet.

    Raises:
        InvalidInput: an unknown target, or assume without a target. Errors of the call itself pass through.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    need(target is None or isinstance(target, (str, Target)), "target", repr(target), 'a name such as "sm90", a Target, or None')
    need(target is not None or assume is None, "assume", assume, "None without a target: packages of this machine are looked up")
    named = Target.parse(target, assume) if isinstance(target, str) else target
    if named is not None and named.assume is None:
        named = dataclasses.replace(named, assume=packages_of_kernels())
    found: dict[Any, Site[Decision]] = {}
    formed: dict[Any, Site[FormDecision]] = {}
    call = getattr(model, "_orig_mod", model)
    compiled = call is not model or hasattr(model, "_torchdynamo_orig_callable")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(named))
        path = stack.enter_context(_module_path(call))
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # as without one, but for our own ops
        mode = detect_fake_mode(pytree.tree_leaves((args, kwargs))) or FakeTensorMode(shape_env=shapes, static_shapes=True)
        stack.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
        mode.allow_non_fake_inputs = True
        stack.enter_context(mode)

        def count(sites: dict[Any, Site[D]], decision: D, *facts: object) -> None:
            site = sites.setdefault((path(), facts), Site(path(), 0, decision))
            sites[path(), facts] = dataclasses.replace(site, count=site.count + 1)

        def on_call(op: Op, problem: Problem, call: Any) -> None:
            decision = select(altered(problem, compiled=compiled), call.policy)
            count(found, decision, problem, decision.policy.key)

        stack.callback(watch(on_call))
        stack.callback(watch_forms(lambda decision: count(formed, decision, decision.call, decision.queries)))
        if "torch._dynamo" in sys.modules:  # compiled submodules run uncompiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(call, nn.Module) and not call.training:
            stack.enter_context(torch.no_grad())
        given, rest = pytree.tree_map_only(torch.Tensor, lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), (args, kwargs))
        call(*given, **rest)
    here = named.title if named is not None else ("cuda" if torch.cuda.is_available() else "cpu") + " (this machine)"
    sites = tuple(found.values())
    explanation = Explanation(here, named.assume if named else None, sites, _times(sites), tuple(formed.values()))
    if not quiet:
        print(explanation)
    return explanation


def _times(sites: tuple[Site[Decision], ...]) -> str:
    """The source of the measured times, "" where no choice uses any."""
    for site in sites:
        if site.decision.measured and (table := (found := in_force(site.decision.problem.target)).table) is not None:
            kind = "the table shipped with attnops" if found.shipped else "this machine's table"
            return f"measured times: {table.source or table.gpu}, {kind}" + (f", scaled to {table.gpu}" if table.source else "")
    return ""


@contextlib.contextmanager
def _module_path(model: Any) -> Iterator[Callable[[], str]]:
    """A function that returns the dotted path of the innermost module being called, with `*` for numbers."""
    names = {id(m): n or type(m).__name__ for n, m in model.named_modules()} if isinstance(model, nn.Module) else {}
    called = ["(function)"]

    def enter(module: nn.Module, _: Any) -> None:
        called.append(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", names.get(id(module), type(module).__name__)))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        called.pop()

    hooks = nn.modules.module
    with hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True):
        yield lambda: called[-1]
