"""`Call`: an op with its arguments, before the call; and the plans and workspaces that a kernel
needs besides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg, evaluate
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, altered, leaf, value_of
from attnops.core.record import Spec, changed
from attnops.ops import OPS

Make = Callable[[Arg, list[int]], Tensor | None]


@dataclass(frozen=True)
class Call:
    """One call of an op, before it is made.

    Args:
        op: name of the op.
        arguments: by the schema's name, those that are not at their defaults; without `policy`.
        free: by argument, bool and broadcastable to it: entries that no kernel may read and that
            may hold anything, such as unused pages, keys outside a range, and padding.
        writes: arguments that the op writes without reading them.
    """

    op: str
    arguments: Mapping[str, Any]
    free: Mapping[str, Tensor] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, up to the last that is given."""
        names = [a.name for a in self.spec.args if not a.keyword]
        while names and self.arguments.get(names[-1]) is None:
            names.pop()
        return tuple(self.arguments.get(n) for n in names)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword-only arguments that are given."""
        return {
            a.name: self.arguments[a.name]
            for a in self.spec.args
            if a.keyword and a.name in self.arguments
        }

    @property
    def spec(self) -> Spec:
        """That of the op's record."""
        return OPS[self.op].spec

    @property
    def mutated(self) -> tuple[str, ...]:
        """Arguments given here that the record declares written."""
        return tuple(
            a.name for a in self.spec.args if a.written and self.arguments.get(a.name) is not None
        )

    @property
    def problem(self) -> Problem:
        """The Problem that selection would see."""
        return OPS[self.op].problem(self.record)

    @property
    def record(self) -> Any:
        """The op's record of these arguments."""
        return OPS[self.op].call(*self.args, **self.kwargs)

    @classmethod
    def of(cls, op: str, **arguments: Any) -> Call:
        """A call with these arguments, by name as a user gives them, which writes its output."""
        output = OPS[op].spec.output
        return cls(op, arguments, writes=(output,) if output in arguments else ())

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by name."""
        return {n: v for n, v in self.arguments.items() if isinstance(v, Tensor)}

    def held(self) -> dict[str, Any]:
        """The arguments whose record says what they hold, by that."""
        return {
            a.holds: self.arguments[a.name]
            for a in self.spec.args
            if a.holds and a.name in self.arguments
        }

    def with_(self, **arguments: Any) -> Call:
        """The same call with other arguments; None takes one away."""
        merged = {n: v for n, v in {**self.arguments, **arguments}.items() if v is not None}
        return replace(self, arguments=merged)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Call:
        """The same call with every tensor replaced by `change(name, tensor)`."""
        return self.with_(**{n: change(n, t) for n, t in self.tensors().items()})


def filled(
    op: str,
    sizes: Mapping[str, Any],
    given: Mapping[str, Any],
    make: Make,
    narrow: Sequence[str] = (),
) -> dict[str, Any]:
    """The arguments of a call of `op`: those given, and for each other tensor argument the tensor
    that `make` returns for its shape.

    sizes: by the layouts' letters. A tensor is left out if one of its sizes is unknown or `make`
    returns None.
    narrow: the sizes that a dim of several sizes ("1 | B") does not take.
    """
    arguments: dict[str, Any] = {}
    for a in OPS[op].spec.args:
        if a.name in given:
            arguments[a.name] = given[a.name]
        elif (
            a.tensor
            and (shape := _shape(a, {**given, **sizes}, narrow)) is not None
            and (value := make(a, shape)) is not None
        ):
            arguments[a.name] = value
    return arguments


def _shape(a: Arg, sizes: dict[str, Any], narrow: Sequence[str]) -> list[int] | None:
    shape = []
    for size in a.layout:
        first, *others = size.text.removeprefix(">=").split("|")
        try:
            shape.append(
                evaluate(
                    others[-1] if others and others[-1].strip() not in narrow else first, sizes
                )
            )
        except NameError:
            return None
    return shape


def equip(kernel: Kernel, call: Call) -> Call:
    """`call` with the host plan and the zeroed workspace that `kernel` needs, unless the call has
    them or the op has no such arguments."""
    call = planned(kernel, call)
    if (
        kernel.workspace_bytes is None
        or "workspace" not in call.spec.names
        or call.arguments.get("workspace") is not None
    ):
        return call
    if kernel.unmet(call.problem):
        return call  # the kernel refuses it, and its size function need not know such a problem
    device = next(iter(call.tensors().values())).device
    return call.with_(
        workspace=torch.zeros(
            kernel.workspace_bytes(call.problem), dtype=torch.uint8, device=device
        )
    )


def with_device_plan(kernel: Kernel, call: Call) -> Call:
    """`call` with the device plan that `kernel` reads, and `holes=False`, which the plan requires.

    Unchanged if the kernel reads no plan, the call has one, or the kernel refuses it.
    """
    if kernel.plan.device is None or call.arguments.get("plan") is not None:
        return call
    if kernel.refusals(altered(call.problem, plan="device")):
        return call
    with torch.no_grad():
        return call.with_(plan=kernel.plan.device(**call.arguments), holes=False)


def equip_as_used(kernel: Kernel, call: Call) -> Call:
    """As `equip`, with the optional device plan that layers make once a step. Kernels are timed on
    such calls."""
    return with_device_plan(kernel, equip(kernel, call))


def planned(
    kernel: Kernel, call: Call, policy: str = "", buffers: tuple[Tensor, Tensor] | None = None
) -> Call:
    """`call` with the host plan that `kernel` needs; unchanged if it needs no plan or refuses the
    call with one.

    buffers: plan and workspace to write into; None allocates the smallest ones.
    """
    maker = (
        None
        if call.arguments.get("plan") is not None
        else kernels_of(f"plan_{call.op}").get(kernel.name)
    )
    if (
        maker is None
        or maker.plan.sizes is None
        or kernel.refusals(altered(call.problem, plan="host"))
    ):
        return call
    made = plan_call(call, maker, buffers)
    with torch.no_grad():
        maker.run(changed(made.record, policy=policy))
    return call.with_(**{n: made.arguments[n] for n in made.writes})


def plan_call(call: Call, maker: Kernel, buffers: tuple[Tensor, Tensor] | None = None) -> Call:
    """The call of the plan op for `call`. The static arguments come from the call's Problem."""
    p, spec, held = call.problem, OPS[f"plan_{call.op}"].spec, call.held()
    held |= {"tokens": call.args[0].shape[0], "page_count": held["pages"].shape[0]}

    def value(a: Arg) -> Any:
        if a.holds:
            return held[a.holds]
        found = value_of(p, a.facts[0]) if a.facts else leaf(p, a.name)
        return str(found)[6:] if isinstance(found, torch.dtype) else found

    arguments = {
        a.name: value(a)
        for a in spec.args
        if not a.written and (a.holds or a.facts or a.default is REQUIRED)
    }
    if buffers is None:
        device, (requests, pages) = held["page_ids"].device, held["page_ids"].shape
        fixed = {n: x for n, x in arguments.items() if not (spec[n].tensor or spec[n].symbolic)}
        assert maker.plan.sizes is not None
        sizes = maker.plan.sizes(
            **fixed,
            max_tokens=held["tokens"],
            max_requests=requests,
            max_pages=pages,
            device=device,
        )
        buffers = (
            torch.zeros(sizes[0], dtype=torch.int64),
            torch.zeros(sizes[1], dtype=torch.uint8, device=device),
        )
    writes = tuple(a.name for a in spec.args if a.written)
    return Call(spec.op, arguments | dict(zip(writes, buffers, strict=True)), writes=writes)
