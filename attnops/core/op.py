"""`Op`: a record and its reference, and how they become a torch op with one overload a kernel."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from attnops.core.adapt import on_device_of
from attnops.core.arguments import REQUIRED
from attnops.core.checks import check_written
from attnops.core.eager_cache import Eager, direct, grad_fields
from attnops.core.errors import NoGradient, NotCapturable, NotRecordable, RegistrationError, fail
from attnops.core.foreign import answering
from attnops.core.kernel import Capture, Core, Kernel, fits_a_graph, on_register
from attnops.core.private_torch import (
    SingleLevelFunction,
    autocasting,
    below_autograd,
    capturing,
    parse_schema,
    single_level,
    tracing_context,
    transformed,
    uncast,
    without_modes,
)
from attnops.core.problem import Problem, hearing
from attnops.core.record import TYPES, Call, Spec, changed, check, fake, split, values
from attnops.core.refuse_layouts import refuse_others
from attnops.core.select import choose, parse_policy
from attnops.core.tracers import is_onnx

_LIB = torch.library.Library("attnops", "FRAGMENT")
_FAKE_LIB = torch.library.Library("attnops", "IMPL")

OPS: dict[str, Op] = {}
"""Every op by name, in order of definition."""

UNREAD = "unread"
"""`<op>__unread` is what a compiled graph calls for an op whose data decide a size, where nothing
reads the result."""

_WATCHERS: list[Callable[[Op, Problem, Any], None]] = []
_TRACE_HOOKS: list[Callable[[], None]] = []
_LOWERED: ContextVar[bool] = ContextVar("_LOWERED", default=True)
_REPLACED: list[Any] = []
"""Functions of packets that a further overload has replaced.

torch.jit knows an op by the address of such a function, and never forgets one. Each stays here, so
that no other object gets its address: a list of a module that did would be "a builtin" to
torch.jit.script.
"""


@dataclass(eq=False)
class Op(Eager):
    """A contract: the arguments and the result, not the way there.

    call: the record of its arguments. reference: the op in plain torch, a function of a call.
    autograd: takes (a function that runs a call, the call) where an input requires grad; without it
    such a call raises NoGradient.
    once: inputs may require grad, and the backward raises NoGradient: torch.func.grad has the
    inputs of every gradient require grad.
    flops: the operations of its products, as an expression of the names in the record's layouts; ""
    for an op without products.
    per_layer: a model calls it once a layer, and no compiler fuses it. A compiled step is cut
    there: the pieces of all layers are equal.
    typical: Problems of usual calls, by the fields of a Problem, the most usual first.
    shown: features by name that tables of kernels have for it beside those of its optional
    arguments, which all have.
    by_torch: a function of a call in torch's own ops, for torch.onnx.export, which knows no others.
    """

    call: type[Call]
    reference: Callable[..., Any]
    autograd: Callable[[Callable[[Any], Any], Any], Any] | None = None
    once: bool = False
    flops: str = ""
    about: str = ""
    per_layer: bool = False
    typical: tuple[Mapping[str, Any], ...] = ()
    shown: tuple[str, ...] = ()
    by_torch: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__init__(self.call.spec)

    @property
    def schema(self) -> str:
        """Arguments and results as torch.library writes them."""
        return schema(self.spec)

    def of_family(self, file: str, table: str) -> Any:
        """What a module of the op's family says of the op in a dict by op; None where there is no
        such module, or not this op in it.

        They are imported when they are first asked for: `cases.CASES`, `bound.BOUNDS`,
        `bound.COMPARED`, `timed.TIMED`, `timed.VALUES`, `timed.MADE`, `vendors.VENDORS`.
        """
        module = f"{self.call.__module__.rpartition('.')[0]}.{file}"
        try:
            return getattr(import_module(module), table, {}).get(self.name)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return None

    def in_torchs_ops(self, call: Any) -> Any:
        """The op's results for torch.onnx.export. Raises NotRecordable, InvalidInput."""
        if self.by_torch is None:
            want = "the model without attnops: after unpatch(), or with torch's own modules"
            fail(NotRecordable, self.name, "torch.onnx.export", want)
        check(call)
        return self.by_torch(call)


def schema(spec: Spec) -> str:
    """Arguments and results as torch.library writes them."""
    letters, parts, keyword = iter("abcdefgh"), [], False
    for a in spec.args:
        if a.keyword and not keyword:
            parts.append("*")
            keyword = True
        kind = "SymInt" if a.symbolic else TYPES[a.kind]
        kind = kind.replace("Tensor", f"Tensor({next(letters)}!)") if a.written else kind
        default = (
            ""
            if a.default is REQUIRED
            else f'="{a.default}"'
            if isinstance(a.default, str)
            else f"={a.default}"
        )
        parts.append(f"{kind} {a.name}{default}")
    names = [f"Tensor {r.name}".strip() for r in spec.results]
    return (
        f"({', '.join(parts)}) -> {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}"
    )


def define(op: Op) -> Op:
    """Define the torch op, its fake, its eager dispatch, and an overload for every kernel that is
    or will be registered."""
    OPS[op.name] = op
    _define_overload(op, op.name, op.run, chooses=True)
    refuse_others(_LIB, op.packet)
    return op


def check_binding(kernel: Kernel) -> None:
    """Raise RegistrationError for a kernel that can have no overload."""
    if kernel.op not in OPS:
        fail(
            RegistrationError,
            f"kernel {kernel.name}: op got {kernel.op!r}, want one of {', '.join(OPS)}",
        )
    spec = OPS[kernel.op].spec
    listable = spec.optional | {
        a.name for a in spec.args if a.hint
    }  # `holes`: the kernel looks for ids of no page itself
    if wrong := sorted(kernel.takes - listable):
        want = f"arguments of {kernel.op}: {', '.join(sorted(listable))}"
        fail(RegistrationError, f"kernel {kernel.name}: takes got {wrong[0]!r}, want {want}")
    if hasattr(OPS[kernel.op].packet, kernel.name) or keyword.iskeyword(kernel.name):
        fail(
            RegistrationError,
            f"kernel name: got {kernel.name!r}, want no word of Python and no attribute of torch "
            "ops",
        )
    if kernel.core is not None:
        try:
            parse_schema(f"attnops::{kernel.op}__{kernel.name}{kernel.core.schema}")
        except RuntimeError as error:
            raise RegistrationError(
                f"kernel {kernel.name}: core.schema got {kernel.core.schema!r}, want a schema "
                f"({error})"
            ) from None


def bind(kernel: Kernel) -> None:
    """Give `kernel` its overload, so that a compiled graph says which kernel it calls."""
    op = OPS[kernel.op]
    # The partitioner of CUDA graphs splits around nodes with this tag.
    never = kernel.capture is Capture.NEVER
    tags = (torch.Tag.cudagraph_unsafe,) if never else ()
    run = _outside_of_captures(kernel) if never else answering(kernel)
    _define_overload(op, f"{op.name}.{kernel.name}", run, tags=tags)
    if kernel.core is not None:
        # Not an overload: when overloads of two schemas are taken down at exit, PyTorch asks one
        # that is gone for its schema.
        define_core(f"{op.name}__{kernel.name}", kernel.core, tags)


def bind_all() -> None:
    """Bind the kernels there are, and those to come."""
    on_register(bind, check_binding)


def watch(watcher: Callable[[Op, Problem, Any], None]) -> Callable[[], None]:
    """Call `watcher(op, problem, call)` for every call traced with fake tensors. Returns a function
    that ends it."""
    _WATCHERS.append(watcher)
    return lambda: _WATCHERS.remove(watcher)


def on_trace(hook: Callable[[], None]) -> None:
    """Call `hook` when a compiler first traces an op: the lowering, which imports this module,
    installs itself then."""
    _TRACE_HOOKS.append(hook)


@contextmanager
def not_lowered() -> Iterator[None]:
    """The block traces for no Inductor: the hooks of `on_trace`, which import it, wait for another
    trace."""
    before = _LOWERED.set(False)
    try:
        yield
    finally:
        _LOWERED.reset(before)


def is_lowered() -> bool:
    """Will a compiler lower the graph that is traced here?"""
    return _LOWERED.get()


def _define_overload(
    op: Op,
    name: str,
    run: Callable[[Any], Any],
    chooses: bool = False,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    record = op.call

    def body(*args: Any, **kwargs: Any) -> Any:
        call = record(*args, **kwargs)
        if autocasting():
            with uncast():
                return run(call)
        return run(call)

    if hasattr(torch.ops.attnops, op.name):
        _REPLACED.append(op.packet._op)
    # A custom lowering loses the default constraint on strides; the tag brings it back.
    _LIB.define(
        f"{name}{schema(op.spec)}",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag, *tags),
    )
    _LIB.impl(
        name, _without_grad(op, body) if op.autograd is None else body, "CompositeExplicitAutograd"
    )
    torch.library.register_fake(f"attnops::{name}", _fake(op, chooses), lib=_FAKE_LIB)
    overload = getattr(op.packet, name.partition(".")[2] or "default")
    _LIB.impl(name, _autograd(op, overload), "Autograd")
    if any(a.written for a in op.spec.args):
        _LIB.impl(name, _without_negation(op, overload), "Negative")
        _LIB.impl(name, _not_mapped(op), "FuncTorchBatched")
    if not chooses:
        overload.run = direct(overload, body)


def _not_mapped(op: Op) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        want = "one call for the whole batch: it writes into its arguments"
        fail(NotRecordable, op.name, "torch.vmap", want)

    return run


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Ops in torch's own, for `torch.export.ExportedProgram.run_decompositions`.

    For programs that go to tools which know torch's ops alone, such as torch.onnx. Of attnops' ops
    it has `attention`; the results are empty where an lse would be.

    Returns:
        By overload, a function of its arguments. It raises NotRecordable for arguments that
        torch's scaled_dot_product_attention cannot say.
    """

    def decomposed(op: Op, by_torch: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: by_torch(op.call(*args, **kwargs))

    found = [(op, op.by_torch) for op in OPS.values() if op.by_torch is not None]
    return {op.packet.default: decomposed(op, by_torch) for op, by_torch in found}


def define_core(name: str, core: Core, tags: tuple[torch.Tag, ...] = ()) -> None:
    """Define a torch op that only compiled graphs call."""

    def run(first: Tensor, *others: Any) -> Any:
        with on_device_of(first):
            return core.run(first, *others)

    _LIB.define(
        f"{name}{core.schema}",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag, *tags),
    )
    _LIB.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnops::{name}", core.fake, lib=_FAKE_LIB)


def _outside_of_captures(kernel: Kernel) -> Callable[[Any], Any]:
    answers = answering(kernel)

    def run(call: Any) -> Any:
        if capturing(values(call)[0]) and not fits_a_graph(kernel):
            fail(
                NotCapturable,
                f"{kernel.op}.{kernel.name}",
                "its work on the host is not repeated at a replay; call it between graphs",
            )
        return answers(call)

    return run


def _fake(op: Op, chooses: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        call: Any = op.call(*args, **kwargs)
        if is_onnx():  # of a program that is captured already, or by Dynamo
            want = "the module itself, not strict, or attnops.ops.decompositions() run on a program"
            fail(NotRecordable, op.name, "torch.onnx.export", want)
        if op.autograd is None and not op.once:
            _refuse_grad(op, call)
        if chooses:
            check(call)
            parsed = parse_policy(call.policy)
            if parsed.forced(op.name) or _WATCHERS:
                # A block of hearing() around this one hears nothing of it: the Problem is made, or
                # not, for watchers in other threads.
                with hearing():
                    problem = op.problem(call)
                    for watcher in tuple(_WATCHERS):
                        watcher(op, problem, call)
                if not _WATCHERS:
                    choose(problem, call.policy)
            _notify_compiler()
        return fake(call)

    return run


def _notify_compiler() -> None:
    if _TRACE_HOOKS and _LOWERED.get() and tracing_context() is not None:
        with without_modes():
            while _TRACE_HOOKS:
                _TRACE_HOOKS.pop()()


# Gradients ----------------------------------------------------------------------------------------


def _refuse_grad(op: Op, call: Call) -> None:
    if torch.is_grad_enabled() and (fields := grad_fields(call)):
        fail(NoGradient, op.name, fields)


def _refuse_forward(op: Op, call: Call) -> None:
    """Raise NoGradient where an argument has a tangent, of torch.func.jvp or of forward_ad: it
    would be lost without a word."""
    given = zip(call.spec.names, values(call), strict=True)
    if fields := tuple(
        n
        for n, v in given
        if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None
    ):
        fail(NoGradient, op.name, fields, True)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, from below the dispatcher, where torch.func has chosen one of its
    levels already."""
    if not transformed():
        return function.apply(*args)
    with single_level():
        return _of_one_level(function).apply(*args)


@functools.cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    """The Function for one level of torch.func, as torch makes it of a Function that has a
    `setup_context`."""
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (SingleLevelFunction,), methods)


def below(run: Callable[[Any], Any], call: Any) -> Any:
    """`run(call)` in the forward of a Function that is `applied`: the levels of torch.func below
    its own record their gradients, too."""
    if not transformed():
        return run(call)
    with torch.enable_grad(), below_autograd():
        return run(call)


class _Once(torch.autograd.Function):
    """A result that has no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, run: Callable[[Any], Any], call: Any, *tensors: Any) -> Any:
        ctx.name = name
        names = [a.name for a in call.spec.args if a.tensor]
        return below(run, changed(call, **dict(zip(names, tensors, strict=True))))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fail(NoGradient, ctx.name, ("its arguments",))


def _without_grad(op: Op, body: Callable[..., Any]) -> Callable[..., Any]:
    # Under grad mode a kernel's writes would make the cache require a gradient, and the next
    # compile would clone it.
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        _refuse_grad(op, op.call(*args, **kwargs))
        with torch.no_grad():
            return body(*args, **kwargs)

    return run


def _without_negation(op: Op, overload: Any) -> Callable[..., Any]:
    # torch's own way for such tensors fails after the call, when the memory has been written.
    def run(*args: Any, **kwargs: Any) -> Any:
        call = op.call(*args, **kwargs)
        for a, value in zip(op.spec.args, values(call), strict=True):
            if a.written and isinstance(value, Tensor):
                check_written(a.name, value)
        as_read = pytree.tree_map_only(Tensor, torch.resolve_neg, split(call))
        return overload(*as_read[0], **as_read[1])

    return run


def gradients(op: str, given: Mapping[str, Any], wants: Mapping[str, bool]) -> list[Tensor | None]:
    """Of each tensor of `op`, as `<op>_backward` finds them; None where `wants` does not ask.

    given: the arguments of `<op>_backward` by name, and others.
    """
    gradient = OPS[f"{op}_backward"]
    results = gradient(gradient.call(*(given[n] for n in gradient.names)))
    found = dict(zip(gradient.results, results, strict=True))
    return [found.get(f"grad_{n}") if wanted else None for n, wanted in wants.items()]


def blank(call: Any) -> Any:
    """The call without its tensors, for a Function that is given them beside it."""
    return changed(call, **{a.name: None for a in call.spec.args if a.tensor})


def tensors_of(call: Any) -> tuple[Tensor | None, ...]:
    """The call's tensors, None where one is absent, in the schema's order."""
    return tuple(value for a, value in zip(call.spec.args, values(call), strict=True) if a.tensor)


def _autograd(op: Op, overload: Any) -> Callable[..., Any]:
    def dispatched(call: Any) -> Any:
        args, kwargs = split(call)
        return overload(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_forward(op, op.call(*args, **kwargs))
        if torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())
        ):
            call = op.call(*args, **kwargs)
            if op.autograd is not None:
                return op.autograd(dispatched, call)
            if op.once:
                return applied(_Once, op.name, dispatched, blank(call), *tensors_of(call))
            _refuse_grad(op, call)
        with below_autograd():
            return overload(*args, **kwargs)

    return run
