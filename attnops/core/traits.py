"""The records of a kernel's traits besides its needs: how it is captured, planned, lowered in
place, and how far its results may be off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from attnops.core.adapt import takes_a_call
from attnops.core.errors import RegistrationError
from attnops.core.needs import Need, Package
from attnops.core.problem import Problem, Refusal

if TYPE_CHECKING:
    from attnops.core.kernel import Kernel


class Capture(Enum):
    """May the kernel live inside a CUDA graph? WHOLE: yes. NEVER: the graph is split around it."""

    WHOLE = "whole"
    NEVER = "never"


@dataclass(frozen=True)
class Core:
    """The foreign call amid the torch ops of an `Inline` kernel: an op `attnops::<op>__<kernel>`
    that writes nothing, which `run` calls."""

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]


@dataclass(frozen=True)
class Inline:
    """`run` is plain torch ops that the compiler may fuse, so it is lowered in place and not
    called.

    when: the Problems for which that is done; None: all. core: the one call that the compiler
    cannot look into.
    """

    when: Callable[[Problem], bool] | None = None
    core: Core | None = None


@dataclass(frozen=True)
class Invariant:
    """Under a deterministic policy a request's result does not depend, bit for bit, on the other
    requests of the batch.

    needs: further demands on the Problem for that. cost_us: as `Kernel.cost_us`, where the policy
    costs time. any_page: nor does that of a request of one token depend on the size of pages.
    """

    needs: tuple[Need, ...] = ()
    cost_us: Callable[[Problem], float] | None = None
    any_page: bool = False


@dataclass(frozen=True)
class Plan:
    """How a kernel plans for a batch.

    sizes: (length of a host's plan, bytes of the workspace) from its op's statics and the largest
    sizes; see `attnops.ops.plan_sizes`.
    device: takes the op's arguments by name and returns the `plan` that the kernel reads on the
        device, made once a step and timed with the kernel. Without one the kernel makes the same in
        every layer: `cost_us` tells the two apart by `Problem.step.plan`.
    last: takes a host's plan and its workspace and returns, as a part of the workspace, int32
        `[rows]`, the tokens in the last page of each row. A decode over the same pages needs no
        other plan once these are written. It returns None for a plan that needs more.
    fixed: has each host's plan of the same sizes the same header? A graph may then hold the kernel,
        and be replayed after another plan.
    fixed_steps: has each plan of a step of one new token a request?
    """

    sizes: Callable[..., tuple[int, int]] | None = None
    device: Callable[..., torch.Tensor] | None = None
    last: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None
    fixed: bool = False
    fixed_steps: bool = False


@dataclass(frozen=True)
class Unbuilt(Refusal):
    """The kernel can run once `modules` are built, which takes longer than a call may wait. want:
    the command that builds them."""

    modules: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.got, self.want, self.modules)


@dataclass(frozen=True)
class Built:
    """A kernel whose modules are built on the user's machine. An automatic choice takes it once
    they are there.

    lacks: what is not there of a Problem's modules; None: nothing. It may look at files, and is
    asked only of a kernel that no policy forces. state: what is there, as a word for cache keys.
    """

    lacks: Callable[[Problem], Unbuilt | None]
    state: Callable[[], str]


@dataclass(frozen=True)
class Tolerance:
    """How far results may be off. factor: on the numerics budget. rounded_sums: the lse adds up
    weights rounded to the query's dtype."""

    factor: float = 1.0
    rounded_sums: bool = False


def check_fields(kernel: Kernel) -> None:
    """Raise RegistrationError for a field of another type than it has."""

    def want(ok: bool, field: str, text: str) -> None:
        if not ok:
            raise RegistrationError(
                f"kernel {kernel.name}: {field} got {attrgetter(field)(kernel)!r}, want {text}"
            )

    kinds: dict[str, Any] = {"capture": Capture, "tolerance": Tolerance, "plan": Plan}
    kinds |= {"inline": Inline | None, "invariant": Invariant | None, "built": Built | None}
    for name, kind in kinds.items():
        want(
            isinstance(getattr(kernel, name), kind),
            name,
            f"a value of type {getattr(kind, '__name__', kind)}",
        )
    demands = ["invariant.needs"] * (kernel.invariant is not None)
    demands += ["repeats"] * (kernel.repeats is not None)
    for name in ("needs", *demands):
        needs = attrgetter(name)(kernel)
        want(
            isinstance(needs, tuple) and all(map(callable, needs)),
            name,
            "a tuple of functions of a Problem",
        )
    want(
        isinstance(kernel.packages, tuple) and all(isinstance(p, Package) for p in kernel.packages),
        "packages",
        "a tuple of Package",
    )
    factor = kernel.tolerance.factor
    want(isinstance(factor, Real) and 0 < factor < inf, "tolerance", "a factor > 0")
    want(isinstance(kernel.takes, frozenset | set), "takes", "a frozenset of names of arguments")
    want(callable(kernel.cost_us), "cost_us", "a function")
    optional = ["probe", "ahead", "again", "workspace_bytes", "plan.sizes", "plan.device"]
    optional += ["inline.when"] * (kernel.inline is not None) + ["invariant.cost_us"] * (
        kernel.invariant is not None
    )
    for name in optional:
        want(
            attrgetter(name)(kernel) is None or callable(attrgetter(name)(kernel)),
            name,
            "a function or None",
        )
    for name in ("lacks", "state"):
        function = getattr(kernel.built, name, None)
        want(kernel.built is None or callable(function), f"built.{name}", "a function")
    want(takes_a_call(kernel.run), "run", "a function of one parameter, the call (contract 2)")
    want(_dtypes(kernel.dtypes) and bool(kernel.dtypes), "dtypes", DTYPES)
    want(
        kernel.kv_dtypes is None or (_dtypes(kernel.kv_dtypes) and bool(kernel.kv_dtypes)),
        "kv_dtypes",
        f"{DTYPES}, or None",
    )


DTYPES = "a tuple of at least one torch.dtype"


def _dtypes(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(d, torch.dtype) for d in value)
