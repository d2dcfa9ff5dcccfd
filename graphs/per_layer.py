"""`PerLayer`: the runner that compiles a layer once a kind, for all sizes and caches."""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..core.errors import AttnopsError, NotCapturable, SideEffect, find, one_line
from ..core.private_torch import shapes_config
from .as_it_runs import AsItRuns
from .buckets import Bucket
from .compile_pieces import Inner, Program, compile_parts, compiler_of, start_workers
from .cuda_graphs import Recorded
from .eager_capture import CaptureMode, capture_mode
from .options import Options, Values
from .report import Report
from .split import split
from .traced import tracing

MOST_KINDS = 4
"""Layers that Dynamo may tell apart within a step. Sliding and full attention, each before dense
layers and experts, are four."""

MOST_CODE = 64
"""Functions whose code is kept. A hook that is replaced before every call makes one a call."""

NUMBER = "layer_idx"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What a module and its twin do not share.
_APART = frozenset((*vars(nn.Module()), NUMBER, "forward"))


class NotRegional(AttnopsError):
    """The layers of a model cannot share compiled code; it is then traced whole. The message says
    why."""


class AnyNumber:
    """In place of the number or the name of a layer: it can be passed on, and fails where it would
    be compared or computed with, or be a part of a text, by which code may look something up."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotRegional("the layer computes with its own number or name")

    __eq__ = __bool__ = __hash__ = __str__ = __format__ = _refuse


ANY = AnyNumber()
Twin = tuple[Any, list[Any]]


def twin(module: nn.Module) -> Twin:
    """A module with the tensors and attributes of `module`, and its functions, in order.

    It has no numbers of layers, which tell equal layers apart, and hooks are numbered anew. Dynamo
    may take a function for another one with the same code. To trace a twin does not change the
    module, which other threads may use. Raises NotRegional for a submodule with a forward of its
    own.
    """
    made: dict[nn.Module | None, nn.Module | None] = {None: None}
    functions: list[Any] = []
    for part in module.modules():
        if part is not module and "forward" in vars(part):
            raise NotRegional(f"{type(part).__name__} has a forward of its own instance")
        made[part] = object.__new__(type(part))
        own = vars(made[part])
        own.update(vars(part))
        own.pop("forward", None)
        if type(own.get(NUMBER)) is int:
            own[NUMBER] = ANY
        for name in _HOOKS:
            functions += _number_hooks(own, name)
        functions += (value for value in own.values() if isinstance(value, FunctionType))
    for part in module.modules():
        children = {name: made[child] for name, child in part._modules.items()}
        vars(made[part])["_modules"] = children
    return made[module], functions


def _number_hooks(own: dict[str, Any], name: str) -> list[Any]:
    """Number the hooks of a kind among a module's attributes from 0, and list them."""
    order = {key: i for i, key in enumerate(own[name])}
    kinds = [kind for kind in own if kind.startswith(name)]
    listed: list[Any] = []
    for key, hook in own[name].items():
        listed += (name, hook, *(kind for kind in kinds if key in own[kind]))
    for kind in kinds:
        own[kind] = OrderedDict((order[key], hook) for key, hook in own[kind].items())
    return listed


def write_back(module: nn.Module, same: nn.Module) -> bool:
    """Give the module the attributes that a run of its twin `same` has set, as its own run would
    have. Returns whether there were any."""
    found = False
    for part, copy in zip(module.modules(), same.modules(), strict=True):
        own, run = vars(part), vars(copy)
        for name in (own.keys() | run.keys()) - _APART:
            if own.get(name) is run.get(name):
                continue
            found = True
            if name in run:
                own[name] = run[name]
            else:
                del own[name]
    return found


class Regions:
    """Compiled code of layers and of what surrounds them, for steps of any rows: one trace a kind
    of layer, and one more for one row.

    A layer that Dynamo cannot trace alone, or that it tells from each other one, raises
    NotRegional.

    takes_twins: may a caller hand over a twin that it keeps?
    refusal: why the whole model is traced instead, set by `PerLayer`; "" while it is not.
    ran: the programs that ran since `begin`, in order.
    seconds: of tracing, choice of kernels and compilation.
    """

    takes_twins = True

    def __init__(
        self,
        inner: str | Inner = "inductor",
        passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
    ) -> None:
        self._inner, self._passes = compiler_of(inner), passes
        self._programs: list[weakref.ref[Program]] = []
        self.ran: list[Program] = []
        self.refusal, self.seconds = "", 0.0
        self._traces = 0
        self._kinds: Counter[type] = Counter()
        self._kind: type = type(None)
        self._into: Recorded | None = None
        # By the word and the identity of a layer's functions, which are kept beside.
        self._compiled: dict[tuple[str | int, ...], tuple[Any, Callable[..., Any]]] = {}
        start_workers(self._inner)

    @property
    def programs(self) -> list[Program]:
        """The programs of the traces whose code is kept."""
        return [program for ref in self._programs if (program := ref()) is not None]

    def varying(self, tensor: Tensor, *dims: int) -> Tensor:
        """The tensor, whose sizes in these dims differ from call to call."""
        return varying(tensor, *dims)

    def begin(self) -> None:
        """Begin a step."""
        self.ran = []
        self._kinds.clear()

    def __call__(
        self,
        call: Any,
        rows: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        apart: str = "",
        same: Twin | None = None,
    ) -> Any:
        """The result of a module's forward or of a function, run by compiled code and captured
        where a capture is under way.

        rows: of the step. Tensors with as many have them in their first dim.
        apart: calls share code with those of the same word.
        same: the twin of the module, from a caller who knows that the module has not changed since.
        """
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.dim() and t.shape[0] == rows:
                varying(t, 0)
        self._kind = type(call)
        mode, began, before = capture_mode(), time.perf_counter(), self._traces
        try:
            if mode is None:
                return self._traced(call, args, kwargs, apart, same)
            with mode.aside() as self._into:
                out = self._traced(call, args, kwargs, apart, same)
            mode.note(out)
            return out
        finally:
            self._into = None
            if self._traces != before:
                self.seconds += time.perf_counter() - began

    def _traced(
        self,
        call: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        apart: str,
        same: Twin | None,
    ) -> Any:
        own = twin(call) if same is None and isinstance(call, nn.Module) else None
        given = same or own or (call, [call])
        try:
            out = self._traced_once(given, args, kwargs, apart)
        except RuntimeError as e:
            # torch 2.13 counts the compiled frames of all threads at once, and may miss those of
            # this call.
            if "found no compiled frames" not in str(e):
                raise
            out = self._traced_once(given, args, kwargs, apart)
        if own is not None:
            write_back(call, own[0])
        return out

    def _traced_once(
        self, found: Twin, args: tuple[Any, ...], kwargs: dict[str, Any], apart: str
    ) -> Any:
        from ..core.private_torch import TorchDynamoException

        same, functions = found
        key = (apart, *(x if isinstance(x, str) else id(x) for x in functions))
        if key not in self._compiled:
            # Dynamo keeps compiled code with the code of the function, here one that goes with the
            # regions.
            run, ours = FunctionType(_run.__code__.replace(), globals()), weakref.proxy(self)
            self._compiled[key] = (
                functions,
                torch.compile(run, backend=lambda gm, _: ours._backend(gm), fullgraph=True),
            )
            if len(self._compiled) > MOST_CODE:
                self._compiled.pop(next(iter(self._compiled)))
        try:
            # Two sizes that happen to be equal are two symbols.
            with tracing(self._inner), shapes_config().patch(use_duck_shape=False):
                return self._compiled[key][1](same, args, kwargs)
        except TorchDynamoException as e:
            known = find(e)
            if known is not None and not isinstance(known, NotCapturable):
                raise known from e
            cause = known or getattr(e, "inner_exception", None) or e
            raise NotRegional(f"a layer cannot be traced alone: {one_line(cause)}") from e

    def _backend(self, gm: fx.GraphModule) -> Callable[..., Any]:
        program, ours = self._program(gm), weakref.proxy(self)
        return lambda *flat: ours._ran(program, flat)

    def _program(self, gm: fx.GraphModule) -> Program:
        self._kinds[self._kind] += 1
        if self._kinds[self._kind] > MOST_KINDS:
            raise NotRegional(f"more than {MOST_KINDS} layers of a step differ")
        for change in self._passes:
            change(gm)
        program = compile_parts(split(gm), self._inner)
        self._programs = [ref for ref in self._programs if ref() is not None] + [
            weakref.ref(program)
        ]
        self._traces += 1
        return program

    def _ran(self, program: Program, flat: tuple[Any, ...]) -> Any:
        self.ran.append(program)
        return program.run(flat, self._into)


class PerLayer(AsItRuns):
    """Runs compiled layers, where they can be compiled so, and the code outside of them as it is.

    regions: compiles the layers.
    layered: the model with its layers called through `regions`.
    whole: runs the steps where the layers cannot be compiled.
    """

    def __init__(self, regions: Regions, layered: Callable[..., Any], whole: AsItRuns) -> None:
        self.regions, self.layered, self.whole = regions, layered, whole
        self._latest: list[Program] = []
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds + self.whole.seconds

    def told(self, report: Report) -> Report:
        if self.regions.refusal:
            return replace(self.whole.told(report), whole=self.regions.refusal)
        compiled = sum({id(program): program.compiled for program in self._latest}.values())
        parts = sum(len(program.pieces) for program in self._latest)
        if not parts:
            return report
        return replace(report, compiled={"decode": compiled}, parts={"decode": parts})

    def trace(self, bucket: Bucket) -> str:
        if self.regions.refusal or bucket.requests > 1:
            return bucket.trace
        return f"{bucket.trace} of one row"

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        if not self.regions.refusal:
            try:
                return self._in_layers(options, bucket, values)
            except NotRegional as e:
                self.regions.refusal = str(e)
        if not self.whole.prepared(bucket):
            self.whole.prepare(options, bucket, values)
        return self.whole.run(options, bucket, values)

    def record(self, options: Options, bucket: Bucket, values: Values, into: Recorded) -> Any:
        if self.regions.refusal:
            return self.whole.record(options, bucket, values, into)
        into.begin()
        with CaptureMode(into, options.kept_out(bucket)):
            return self._in_layers(options, bucket, values)

    def changes(self, error: Exception) -> bool:
        traced = isinstance(error, (NotRegional, NotCapturable)) and not isinstance(
            error, SideEffect
        )
        if self.regions.refusal or not traced:
            return False
        # Code between layers that only a trace can capture.
        self.regions.refusal = str(error)
        return True

    def _in_layers(self, options: Options, bucket: Bucket, values: Values) -> Any:
        regions, before = self.regions, self.regions.seconds
        regions.begin()
        try:
            return self.layered(**options.planned(bucket, values))
        finally:
            self._latest = regions.ran
            self._seconds += regions.seconds - before


def varying(tensor: Tensor, *dims: int) -> Tensor:
    """Mark these dims of the tensor as varying for the compiler, except sizes of one. Returns the
    tensor."""
    from ..core.private_torch import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, [dim for dim in dims if tensor.shape[dim] > 1])
    return tensor


def _run(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call.forward(*args, **kwargs) if isinstance(call, nn.Module) else call(*args, **kwargs)
