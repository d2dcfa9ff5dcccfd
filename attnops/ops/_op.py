"""`Op`: a contract, and how it becomes a torch op with one overload a kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops.errors import NoGradient, RegistrationError
from attnops.kernel import Kernel, on_register
from attnops.problem import Problem, Target
from attnops.select import choose, parse_policy

_LIB = torch.library.Library("attnops", "FRAGMENT")
_FAKE_LIB = torch.library.Library("attnops", "IMPL")

OPS: dict[str, Op] = {}
"""Every op by name, in order of definition."""

_WATCHERS: list[Callable[[Op, Problem, str], None]] = []


@dataclass(frozen=True)
class Op:
    """A contract: what is asked, never how.

    schema: arguments and results as torch.library writes them, mutation declared.
    check: raises InvalidInput on arguments that break the contract; also runs on fake tensors, so it may look at shapes,
        dtypes and devices only. fake: the results' shapes, strides and dtypes. problem: the Problem of a call.
    differentiable: the op's `autograd` is used when a gradient is asked for; without it such a call raises NoGradient.
    """

    name: str
    schema: str
    check: Callable[..., None]
    fake: Callable[..., Any]
    problem: Callable[..., Problem]
    reference: Callable[..., Any]
    autograd: Callable[..., Any] | None = None
    about: str = ""

    @property
    def packet(self) -> Any:
        """`torch.ops.attnops.<name>`."""
        return getattr(torch.ops.attnops, self.name)


def define(op: Op) -> Op:
    """Define the torch op, its fake, its eager dispatch, and an overload for every kernel that is or will be registered."""
    OPS[op.name] = op
    _define_overload(op, op.name, _eager(op), op.fake, check=op.check)
    return op


def bind(kernel: Kernel) -> None:
    """Give `kernel` its overload, so that a compiled graph says which kernel it calls."""
    if kernel.op not in OPS:
        raise RegistrationError(f"kernel {kernel.name}: op got {kernel.op!r}, want one of {', '.join(OPS)}")
    op = OPS[kernel.op]
    _define_overload(op, f"{op.name}.{kernel.name}", kernel.run, op.fake, check=None)


def bind_all() -> None:
    """Bind the kernels there are, and those to come."""
    on_register(bind)


def watch(watcher: Callable[[Op, Problem, str], None]) -> Callable[[], None]:
    """Call `watcher(op, problem, policy_key)` for every call traced with fake tensors. Returns what ends it."""
    _WATCHERS.append(watcher)
    return lambda: _WATCHERS.remove(watcher)


def _define_overload(
    op: Op, name: str, run: Callable[..., Any], fake: Callable[..., Any], check: Callable[..., None] | None
) -> None:
    _LIB.define(f"{name}{op.schema}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    call = torch.no_grad()(run) if op.autograd is None and check is None else run
    _LIB.impl(name, _guard_grad(op, call) if op.autograd is None else call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnops::{name}", _fake(op, fake, check), lib=_FAKE_LIB)
    if op.autograd is not None:
        overload = getattr(op.packet, name.partition(".")[2] or "default")
        _LIB.impl(name, _autograd(op, overload), "Autograd")


def _eager(op: Op) -> Callable[..., Any]:
    def run(*args: Any, policy: str = "", **kwargs: Any) -> Any:
        op.check(*args, **kwargs)
        kernel = choose(op.problem(*args, **kwargs), policy)
        with torch.no_grad():
            return kernel.run(*args, policy=policy, **kwargs)

    return run


def _fake(op: Op, fake: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    def run(*args: Any, policy: str = "", **kwargs: Any) -> Any:
        if op.autograd is None:
            _refuse_grad(op, args, kwargs)
        if check is not None:
            check(*args, **kwargs)
            parsed = parse_policy(policy)
            if parsed.forced(op.name) or _WATCHERS:
                problem = op.problem(*args, **kwargs)
                for watcher in tuple(_WATCHERS):
                    watcher(op, problem, policy)
                if not _WATCHERS:
                    choose(problem, policy)
            _install_lowerings()
        return fake(*args, **kwargs)

    return run


def _install_lowerings() -> None:
    """Teach Inductor our ops, once, and only in a process that compiles."""
    if "attnops.lowering.install" not in sys.modules and torch._guards.TracingContext.try_get() is not None:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            import importlib

            importlib.import_module("attnops.lowering.install").install()


def _grad_fields(args: tuple[Any, ...], kwargs: dict[str, Any], op: Op) -> tuple[str, ...]:
    names = [a.name for a in op.packet.default._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    return tuple(n for n, v in given if isinstance(v, Tensor) and v.requires_grad)


def _refuse_grad(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled() and (fields := _grad_fields(args, kwargs, op)):
        raise NoGradient(op.name, fields)


def _guard_grad(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_grad(op, args, kwargs)
        return call(*args, **kwargs)

    return run


def _autograd(op: Op, overload: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())):
            assert op.autograd is not None
            return op.autograd(overload, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return run


def target_of(tensor: Tensor) -> Target:
    """The Target a call on `tensor` is made for."""
    return Target.of(tensor.device)
