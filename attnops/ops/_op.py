"""`Op`: a contract, and how it becomes a torch op with one overload a kernel."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from attnops.errors import NoGradient, NotCapturable, RegistrationError, fail
from attnops.kernel import Capture, Core, Kernel, generation, on_register
from attnops.ops.layouts import refuse_others
from attnops.ops.watched import direct
from attnops.problem import Problem, Target, pretended
from attnops.select import choose, parse_policy

_LIB = torch.library.Library("attnops", "FRAGMENT")
_FAKE_LIB = torch.library.Library("attnops", "IMPL")

OPS: dict[str, Op] = {}
"""Every op by name, in order of definition."""

_WATCHERS: list[Callable[[Op, Problem, str], None]] = []
_TRACE_HOOKS: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Op:
    """A contract: what is asked, never how.

    schema: arguments and results as torch.library writes them, mutation declared.
    check: raises InvalidInput on arguments that break the contract; also runs on fake tensors, so it may look at shapes,
        dtypes and devices only. fake: the results' shapes, strides and dtypes. problem: the Problem of a call.
    differentiable: the op's `autograd` is used when a gradient is asked for; without it such a call raises NoGradient.
    once: a gradient of it is refused when it is worked out, not when it is asked for: torch.func.grad asks for one of every gradient.
    """

    name: str
    schema: str
    check: Callable[..., None]
    fake: Callable[..., Any]
    problem: Callable[..., Problem]
    reference: Callable[..., Any]
    autograd: Callable[..., Any] | None = None
    once: bool = False
    about: str = ""

    @property
    def packet(self) -> Any:
        """`torch.ops.attnops.<name>`."""
        return getattr(torch.ops.attnops, self.name)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the arguments that are tensors, in the schema's order."""
        return tuple(a.name for a in self.packet.default._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def define(op: Op) -> Op:
    """Define the torch op, its fake, its eager dispatch, and an overload for every kernel that is or will be registered."""
    OPS[op.name] = op
    _define_overload(op, op.name, _eager(op), check=op.check)
    refuse_others(_LIB, op.packet)
    return op


def check_binding(kernel: Kernel) -> None:
    """Raise RegistrationError for a kernel that can have no overload."""
    if kernel.op not in OPS:
        fail(RegistrationError, f"kernel {kernel.name}: op got {kernel.op!r}, want one of {', '.join(OPS)}")
    if hasattr(OPS[kernel.op].packet, kernel.name) or keyword.iskeyword(kernel.name):
        fail(RegistrationError, f"kernel name: got {kernel.name!r}, want no word of Python and no attribute of torch ops")
    if kernel.core is not None:
        try:
            torch._C.parse_schema(f"attnops::{kernel.op}__{kernel.name}{kernel.core.schema}")
        except RuntimeError as error:
            raise RegistrationError(f"kernel {kernel.name}: core.schema got {kernel.core.schema!r}, want a schema ({error})") from None


def bind(kernel: Kernel) -> None:
    """Give `kernel` its overload, so that a compiled graph says which kernel it calls."""
    op = OPS[kernel.op]
    # The partitioner of CUDA graphs splits around what bears this tag.
    never = kernel.capture is Capture.NEVER
    tags = (torch.Tag.cudagraph_unsafe,) if never else ()
    run = _outside_of_captures(kernel) if never else kernel.run
    _define_overload(op, f"{op.name}.{kernel.name}", run, check=None, tags=tags)
    overload = getattr(op.packet, kernel.name)
    overload.run = direct(overload, run)
    if kernel.core is not None:
        # Not an overload: when overloads of two schemas are taken down at exit, PyTorch asks one that is gone for its schema.
        _define_core(f"{op.name}__{kernel.name}", kernel.core, tags)


def bind_all() -> None:
    """Bind the kernels there are, and those to come."""
    on_register(bind, check_binding)


def watch(watcher: Callable[[Op, Problem, str], None]) -> Callable[[], None]:
    """Call `watcher(op, problem, policy_key)` for every call traced with fake tensors. Returns what ends it."""
    _WATCHERS.append(watcher)
    return lambda: _WATCHERS.remove(watcher)


def _define_overload(
    op: Op, name: str, run: Callable[..., Any], check: Callable[..., None] | None, tags: tuple[torch.Tag, ...] = ()
) -> None:
    # A custom lowering loses the default constraint on strides; the tag brings it back.
    _LIB.define(f"{name}{op.schema}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag, *tags))
    _LIB.impl(name, _without_grad(op, run) if op.autograd is None else run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnops::{name}", _fake(op, check), lib=_FAKE_LIB)
    overload = getattr(op.packet, name.partition(".")[2] or "default")
    _LIB.impl(name, _autograd(op, overload), "Autograd")


def _define_core(name: str, core: Core, tags: tuple[torch.Tag, ...]) -> None:
    _LIB.define(f"{name}{core.schema}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag, *tags))
    _LIB.impl(name, core.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnops::{name}", core.fake, lib=_FAKE_LIB)


def _eager(op: Op) -> Callable[..., Any]:
    # Checks and selection look at shapes, strides, dtypes, devices and numbers only, so a call like one seen before needs neither.
    seen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*args: Any, policy: str = "", **kwargs: Any) -> Any:
        key = (policy, generation(), pretended(), *map(_likeness, args), *kwargs, *map(_likeness, kwargs.values()))
        kernel_run = seen.get(key)
        if kernel_run is None:
            op.check(*args, **kwargs)
            kernel_run = uncaptured(op.problem(*args, **kwargs), policy)
            if len(seen) >= _SEEN_LIMIT:
                seen.clear()
            seen[key] = kernel_run
        return kernel_run(*args, policy=policy, **kwargs)

    return run


def uncaptured(problem: Problem, policy: str) -> Callable[..., Any]:
    """What runs the kernel chosen for `problem`, and where that may not be captured, another one while the current stream is.

    Only such a kernel's calls ask, so that all others cost nothing more. Raises NoKernel.
    """
    kernel = choose(problem, policy)
    if kernel.capture is not Capture.NEVER:
        return kernel.run

    def run(*args: Any, **kwargs: Any) -> Any:
        answers = choose(replace(problem, capturing=True), policy) if capturing(args[0]) else kernel
        return answers.run(*args, **kwargs)

    return run


def capturing(tensor: Tensor) -> bool:
    """Does a call on `tensor` become part of a CUDA graph?"""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _outside_of_captures(kernel: Kernel) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if capturing(args[0]):
            fail(NotCapturable, f"{kernel.op}.{kernel.name}", "its work on the host is not repeated at a replay; call it between graphs")
        return kernel.run(*args, **kwargs)

    return run


_SEEN_LIMIT = 4096


def _likeness(x: Any) -> Any:
    # The type keeps 1, 1.0 and True apart.
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x)


def _fake(op: Op, check: Callable[..., None] | None) -> Callable[..., Any]:
    def run(*args: Any, policy: str = "", **kwargs: Any) -> Any:
        if op.autograd is None and not op.once:
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
            _notify_compiler()
        return op.fake(*args, **kwargs)

    return run


def on_trace(hook: Callable[[], None]) -> None:
    """Call `hook` when a compiler first traces an op: what teaches Inductor our ops stands above this module."""
    _TRACE_HOOKS.append(hook)


def _notify_compiler() -> None:
    if _TRACE_HOOKS and TracingContext.try_get() is not None:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            while _TRACE_HOOKS:
                _TRACE_HOOKS.pop()()


def _grad_fields(args: tuple[Any, ...], kwargs: dict[str, Any], op: Op) -> tuple[str, ...]:
    names = [a.name for a in op.packet.default._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    return tuple(n for n, v in given if isinstance(v, Tensor) and v.requires_grad)


def _refuse_forward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NoGradient where an argument has a tangent, of torch.func.jvp or of forward_ad: it would be lost without a word."""
    names = [a.name for a in op.packet.default._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    if fields := tuple(n for n, v in given if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None):
        fail(NoGradient, op.name, fields, True)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, from below the dispatcher, where torch.func has chosen one of its levels already."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def below(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """`overload` in the forward of a Function that is `applied`: the levels of torch.func below its own record their gradients, too."""
    if not torch._C._are_functorch_transforms_active():
        return overload(*args, **kwargs)
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return overload(*args, **kwargs)


class _Once(torch.autograd.Function):
    """A result that has no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, overload: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.name = name
        return below(overload, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fail(NoGradient, ctx.name, ("its arguments",))


def _refuse_grad(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled() and (fields := _grad_fields(args, kwargs, op)):
        fail(NoGradient, op.name, fields)


def _without_grad(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    # Under grad mode a kernel's writes would make the cache require a gradient, and the next compile would clone it.
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        _refuse_grad(op, args, kwargs)
        with torch.no_grad():
            return call(*args, **kwargs)

    return run


def _autograd(op: Op, overload: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_forward(op, args, kwargs)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())):
            if op.autograd is not None:
                return op.autograd(overload, *args, **kwargs)
            if op.once:
                return applied(_Once, op.name, overload, kwargs, *args)
            _refuse_grad(op, args, kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return run


def target_of(tensor: Tensor) -> Target:
    """The Target a call on `tensor` is made for."""
    return Target.of(tensor.device)
