"""Records the torch functions that a module calls, in a graph of the form that Dynamo gives to a
backend, without Dynamo.

The module's Python code runs once, on fake tensors of the sizes at hand. So the graph holds for
these sizes, and for modules and arguments of the same form (`Form`), which code cannot tell apart.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..core.errors import AttnopsError
from ..core.fx_effects import comparable, may_write, storages, written_by
from ..core.private_torch import (
    SET_GRAD,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    autocasting,
)
from .forms import PLAIN, VALUES, Form, Slot, mapped, own_tensors, tensors_of

_OF_FORM = frozenset(
    (
        "__len__",
        "device",
        "dim",
        "dtype",
        "element_size",
        "is_contiguous",
        "is_cpu",
        "is_cuda",
        "is_floating_point",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "numel",
        "requires_grad",
        "shape",
        "size",
        "stride",
    )
)
"""Facts of a tensor that follow from its form."""

_UNKNOWN = frozenset(
    (
        "__cuda_array_interface__",
        "__dlpack__",
        "_base",
        "_typed_storage",
        "_version",
        "data_ptr",
        "grad",
        "grad_fn",
        "is_inference",
        "is_pinned",
        "is_shared",
        "storage",
        "storage_offset",
        "untyped_storage",
    )
)
"""Facts of a tensor that its form does not have, or that a fake tensor does not."""


class NotRecorded(AttnopsError):
    """The code does something that a graph of torch functions would not repeat. The message says
    what."""


@dataclass(frozen=True)
class Recording:
    """The graph of a call.

    module: of the tensors of `inputs`, in their order. It returns a tuple of tensors.
    out: the result, with a `Slot` for each tensor.
    facts: the questions of the code, each with the values that it was about, in order. Questions
        that the form of a tensor answers are left out.
    """

    module: fx.GraphModule
    out: Any
    facts: tuple[Any, ...]


@dataclass(frozen=True)
class Followed:
    """A call that was run. graph, out, facts: as a `Recording` has them, without values of nodes.
    result: the call's own."""

    graph: fx.Graph
    out: Any
    facts: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class Source:
    """Where an input of the graph comes from, for passes that ask Dynamo's inputs for it."""

    name: str


def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """The graph of `module.forward(*args, **kwargs)`.

    Its inputs are the tensors of the arguments and then those of the module, each in order.

    Args:
        module: a twin. Its tensors are replaced by fake ones.

    Raises:
        NotRecorded: the code reads data of a tensor, uses one that is neither an argument nor the
            module's own, changes what the module, its arguments or tensors hold, writes a tensor
            that it did not make by another op than ours, or calls an op by other means than a torch
            function; a tensor is of a subclass, or autocast is on.
    """
    mode = FakeTensorMode()
    mode.cache_enabled = False  # to look for results of other sizes takes longer than it saves
    recorder = _Recorder()

    def fake(name: str, t: Tensor) -> Tensor:
        if type(t) not in PLAIN:
            raise NotRecorded(f"{name} is a {type(t).__name__}")
        return recorder.input(name, mode.from_tensor(t, static_shapes=True))

    numbers = iter(range(len(tensors_of((args, kwargs)))))
    args, kwargs = mapped(
        (args, kwargs), lambda x: fake(f"l_{next(numbers)}_", x) if isinstance(x, Tensor) else x
    )
    fakes = {name: fake(name, t) for name, t in own_tensors(module).items()}
    _replace(module, iter(fakes.values()))
    graph, out = recorder.finished(_run(recorder, module, args, kwargs, mode))
    return Recording(fx.GraphModule(nn.Module(), graph), out, tuple(recorder.facts))


def follow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Followed:
    """What `module.forward(*args, **kwargs)` calls, while it runs on these tensors.

    The result is that of the module only where it calls what it called on fake tensors: a caller
    compares the two. module, and errors, as of `record`: nothing is written that it refuses.
    """
    recorder, own = _Follower(), own_tensors(module)
    for number, t in enumerate(tensors_of((args, kwargs))):
        recorder.input(f"l_{number}_", t)
    for name, t in own.items():
        recorder.input(name, t)
    _replace(module, iter(own.values()))
    result = _run(recorder, module, args, kwargs, nullcontext())
    return Followed(*recorder.finished(result), tuple(recorder.facts), result)


def _run(
    recorder: _Recorder,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> Any:
    before = _state(module, (args, kwargs), recorder.inputs)
    try:
        with _quiet(), torch.no_grad(), mode, _Unrecorded(recorder), recorder:
            out = module.forward(*args, **kwargs)
    except (AttnopsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotRecorded(f"{type(error).__name__}: {error}") from error
    _refuse_changes(before, _state(module, (args, kwargs), recorder.inputs))
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's log of an op without a result on fake tensors quiet: here it is a reason to
    record nothing, which `NotRecorded` tells."""
    log, here = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def of_others(line: logging.LogRecord) -> bool:
        return line.thread != here

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


def _replace(module: nn.Module, new: Any) -> None:
    """Put the tensors in place of those that `own_tensors` finds, in its order, and copies in place
    of containers, which are the module's own in its twin, too."""
    for part in module.modules():
        own = vars(part)
        for name in ("_parameters", "_buffers"):
            held = own[name]
            own[name] = {n: next(new) if isinstance(t, Tensor) else t for n, t in held.items()}
        own.update({n: next(new) for n, x in list(own.items()) if isinstance(x, Tensor)})
        own.update({n: _copied(x) for n, x in own.items()})


def _copied(x: Any) -> Any:
    """The structure of containers, with the same leaves."""
    if type(x) in (tuple, list):
        return type(x)(map(_copied, x))
    if type(x) in (dict, OrderedDict):
        return type(x)((name, _copied(value)) for name, value in x.items())
    return set(x) if type(x) is set else x


def _state(module: nn.Module, given: Any, inputs: list[Tensor]) -> dict[str, tuple[Any, Any]]:
    """What the module and its submodules hold, by name, each with its form. So of the arguments and
    of the attributes of tensors."""
    attributes = [Form().of(vars(t)) for t in inputs]
    found = {"its arguments": (None, Form().of(given)), "a tensor's attributes": (None, attributes)}
    for path, part in module.named_modules():
        own = vars(part)
        for name, value in {**own["_parameters"], **own["_buffers"], **own}.items():
            found[f"{path}.{name}".lstrip(".")] = value, Form().of(value)
    return found


def _refuse_changes(before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> None:
    missing = object(), None
    for name in before | after:
        value, form = before.get(name, missing)
        now, later = after.get(name, missing)
        if value is not now:
            raise NotRecorded(f"it sets {name}")
        if form != later:
            raise NotRecorded(f"it changes {name}")


def _written(node: fx.Node) -> Iterable[fx.Node]:
    """The tensors that a call may write: the first one alone, where its name says that it
    writes."""
    target: Any = node.target
    if isinstance(target, OpOverload) or not may_write(node):
        return written_by(node)
    named = isinstance(target, str) or target.__module__ == operator.add.__module__
    given = node.kwargs.get("out") or (node.args[:1] if named else node.all_input_nodes)
    return [x for x in pytree.tree_leaves(given) if isinstance(x, fx.Node)]


class _Recorder(TorchFunctionMode):
    """Adds a node for each torch function that is called. within: is one running? inputs: the
    tensors that the graph is given."""

    def __init__(self) -> None:
        super().__init__()
        self.within = False
        self.inputs: list[Tensor] = []
        self.facts: list[Any] = []
        self._graph, self._aside = fx.Graph(), fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._storages: dict[Any, fx.Node] = {}  # of inputs
        self._kept: list[Any] = []  # so that no other tensor has the id of one of these

    def input(self, name: str, value: Tensor) -> Tensor:
        node = self._graph.placeholder(name)
        node.meta["example_value"] = value
        node.meta["tensor_dict"] = {}
        node._dynamo_source = Source(name)
        if isinstance(value, nn.Parameter):
            node.meta["tensor_dict"]["_dynamo_static_input_type"] = "unguarded"
        self._number(node)
        if self._known(value) is None:
            self._keep(value, node)
        self.inputs.append(value)
        self._storages.update(dict.fromkeys(storages(value), node))
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if autocasting():
            raise NotRecorded("autocast is on")
        if not self.within and (name := _name(func)) in _UNKNOWN:
            raise NotRecorded(f"it asks for {name} of a tensor")
        # Before the call, for one that writes may return another object.
        given = map_aggregate((args, kwargs), self._node)
        if not self.within:
            self._refuse_writes(func, *given)
        before, self.within = self.within, True
        try:
            out = func(*args, **kwargs)
        finally:
            self.within = before
        if not before:
            self._note(func, *given, out)
        return out

    def finished(self, out: Any) -> tuple[fx.Graph, Any]:
        """The graph, and the result with slots."""
        results: list[fx.Node] = []

        def slot(x: Any) -> Any:
            if isinstance(x, VALUES):
                return x
            if not isinstance(x, Tensor):
                raise NotRecorded(f"it returns a {type(x).__name__}")
            results.append(self._node(x))
            return Slot(len(results) - 1)

        out = mapped(out, slot)
        self._graph.output(tuple(results))
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and "part" in node.meta and not node.users:
                self._graph.erase_node(node)
        return self._graph, out

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Before the call. The module runs once more to compare it, and to write twice may give
        another result. Our ops write the same again."""
        if getattr(func, "__name__", "") in ("__set__", "__delete__"):
            raise NotRecorded(f"it sets {func.__self__.__name__} of a tensor")
        node = self._aside.create_node(*_call(func, args, kwargs))
        ours = str(node.target).startswith("attnops.")
        written = [] if ours else list(map(self._held, _written(node)))
        self._aside.erase_node(node)
        for storage in storages(written):
            if storage in self._storages:
                raise NotRecorded(f"it writes {self._storages[storage].name}")

    def _number(self, node: fx.Node) -> None:
        self._numbers[node] = len(self._numbers)

    def _held(self, node: fx.Node) -> Any:
        """The tensor of a node."""
        return node.meta["example_value"]

    def _keep(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        self._kept.append(value)

    def _known(self, value: Any) -> fx.Node | None:
        return self._nodes.get(id(value))

    def _node(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if (node := self._known(x)) is None:
            raise NotRecorded("it uses a tensor that is neither an argument nor its own")
        return node

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        is_op = isinstance(func, (OpOverload, OpOverloadPacket))
        if func is SET_GRAD:
            if args[0]:
                raise NotRecorded("it switches gradients on")
            return
        if not (out is None or is_op or _holds_tensors(out)):
            # A size, a dtype or another fact, which holds for all calls of this form.
            if _name(func) not in _OF_FORM:
                of = comparable((args, kwargs), self._numbers.__getitem__)
                self.facts.append((_name(func), of))
            return
        node = self._graph.create_node(*_call(func, args, kwargs))
        known = isinstance(out, Tensor) and self._known(out) is not None
        if known and not may_write(node):
            # A conversion to what the tensor is already. Its users read the tensor itself.
            self._graph.erase_node(node)
            return
        self._value(node, out)

    def _value(self, node: fx.Node, out: Any) -> None:
        node.meta["example_value"] = out
        self._number(node)
        if isinstance(out, Tensor):
            self._keep(out, node)
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                one = self._graph.call_function(operator.getitem, (node, i))
                one.meta["part"] = True
                self._value(one, part)


class _Follower(_Recorder):
    """Of tensors that have numbers, which it does not keep in memory."""

    def _keep(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        node.meta["alive"] = weakref.ref(value)

    def _held(self, node: fx.Node) -> Any:
        return node.meta["alive"]()

    def _known(self, value: Any) -> fx.Node | None:
        node = super()._known(value)
        return None if node is None or node.meta["alive"]() is not value else node

    def _value(self, node: fx.Node, out: Any) -> None:
        super()._value(node, out)
        del node.meta["example_value"]


def _call(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, Any, Any]:
    """A node of this call."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if not _is_method(func, name):
        return "call_function", func, args, kwargs
    if name.startswith("__") and hasattr(operator, name):
        return "call_function", getattr(operator, name), args, kwargs
    return "call_method", name, args, kwargs


def _name(func: Any) -> str:
    """Of a property, where it is one."""
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def _holds_tensors(out: Any) -> bool:
    """Also of a tuple of a class of its own, as torch.topk returns."""
    if isinstance(out, (tuple, list)):
        return any(map(_holds_tensors, out))
    return isinstance(out, Tensor)


def _is_method(func: Any, name: str) -> bool:
    """Of tensors: of C, or in Python beside those."""
    of_c = getattr(func, "__objclass__", None) in (Tensor, Tensor.__mro__[1])
    return of_c or (
        getattr(func, "__module__", "") == Tensor.split.__module__ and hasattr(Tensor, name)
    )


class _Unrecorded(TorchDispatchMode):
    """Raises NotRecorded for an op that is called by other means than a torch function: the graph
    would not have it."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._recorder.within:
            raise NotRecorded(f"{func} is called by no torch function")
        return func(*args, **(kwargs or {}))
