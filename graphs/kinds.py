"""`Kinds`: the layers of a step, rewritten by the passes and run as they are, without a
compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.errors import one_line
from ..core.fx_effects import storages
from ..core.op import not_lowered
from ..core.private_torch import OpOverload, TracingContext, under_context
from .as_it_runs import AsItRuns
from .buckets import Bucket
from .compile_pieces import Program
from .eager_capture import capture_mode
from .options import Options, Values
from .per_layer import NotRegional, PerLayer, Regions, Twin, twin
from .record_functions import (
    Form,
    Recording,
    Slot,
    mapped,
    own_tensors,
    record,
    tensors_of,
)
from .report import Report
from .stale import in_force

MOST_KEPT = 256
"""Recorded layers that are kept: those of all buckets."""

MOST_COMPARED = 2**26
"""Bytes of pages that are compared: those of a server may take most of the memory."""

Kept = dict[Any, tuple[Recording, Program]]
"""Recordings by form, which keeps what it knows by identity. Those that served last come last."""


class Kinds(Regions):
    """One graph a kind of equal layers and sizes of a step, recorded without Dynamo.

    A graph serves for modules and arguments of its form, under one policy. It does not know whether
    the code has changed, which its caller compares. Functions run as they are.

    Raises NotRegional as `Regions`, and for a layer whose code does what a graph would not repeat,
    or whose graph does not give the layer's own numbers.

    kept: recordings of others, to share. plain: modules run their own code for now.
    """

    takes_twins = False

    def __init__(
        self,
        passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
        kept: Kept | None = None,
    ) -> None:
        super().__init__("eager", passes)
        self._kept: Kept = {} if kept is None else kept
        self.plain = False

    def varying(self, tensor: Tensor, *dims: int) -> Tensor:
        return tensor

    def __call__(
        self,
        call: Any,
        rows: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        apart: str = "",
        same: Twin | None = None,
    ) -> Any:
        if not isinstance(call, nn.Module):
            return call(*args, **kwargs)
        if self.plain:
            return type(call).forward(call, *args, **kwargs)
        mode = capture_mode()
        recording, program = self._of(call, args, kwargs, apart)
        flat = *tensors_of((args, kwargs)), *own_tensors(call).values()
        self.ran.append(program)
        if mode is None:
            results = program.run(flat)
        else:
            with mode.aside() as into:
                results = program.run(flat, into)
            mode.note(results)
        return _filled(recording, results)

    def _of(
        self, call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], apart: str
    ) -> tuple[Recording, Program]:
        with _refused(call):
            same, _ = twin(call)
            form = Form()
            given, own = form.of((args, kwargs)), form.of_module(same)
            key = apart, in_force(), given, own
            found = self._kept.pop(key, None)
            if found is None:
                began = time.perf_counter()
                found = self._recorded(call, same, args, kwargs)
                self.seconds += time.perf_counter() - began
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return found

    def _recorded(
        self, call: nn.Module, same: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Recording, Program]:
        self._kind, name = type(call), type(call).__name__
        if capture_mode() is not None:
            # Its results could not be compared with the module's.
            raise NotRegional(f"{name} was called otherwise than before the capture")
        found = record(same, args, kwargs)
        if _differs(found, call, args, kwargs):
            raise NotRegional(f"what was recorded of {name} has other results")
        with _unguarded(found), not_lowered():
            return found, self._program(found.module)


@contextmanager
def _refused(call: nn.Module) -> Iterator[None]:
    """Errors of the block are reasons not to record: the model itself may run all the same, and
    raises errors of its own. Memory that is short now may be there later."""
    try:
        yield
    except (NotRegional, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"{type(call).__name__} cannot be recorded: {one_line(error)}"
        raise NotRegional(why) from error


class PerKind(PerLayer):
    """Runs recorded layers. A model whose layers cannot be recorded runs as it is."""

    def __init__(self, kinds: Kinds, layered: Callable[..., Any]) -> None:
        super().__init__(kinds, layered, AsItRuns())
        self._watched = False

    def trace(self, bucket: Bucket) -> str:
        """Each bucket is recorded by itself, for its sizes."""
        return str(bucket)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Also run the model itself once, to see whether it changes more than tensors: a capture
        does not run the code of its layers."""
        super().prepare(options, bucket, values)
        if self._watched or self.regions.refusal:
            return  # a capture that runs the model's own code is watched
        with options.watch():
            self.whole.run(options, bucket, values)
        self._watched = True

    def changes(self, error: Exception) -> bool:
        """Other errors of a capture are those of the model as it runs, too."""
        if self.regions.refusal or not isinstance(error, NotRegional):
            return False
        self.regions.refusal = str(error)
        return True

    def told(self, report: Report) -> Report:
        if self.regions.refusal:
            return replace(report, not_recorded=self.regions.refusal)
        return replace(report, recorded=len({id(program) for program in self._latest}))


class OneSize(AsItRuns):
    """Runs code that calls its layers through `kinds` itself. Each bucket is recorded by itself."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    def trace(self, bucket: Bucket) -> str:
        return str(bucket)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Record the layers, and run their own code once more to see whether it changes more than
        tensors: a capture does not run it."""
        self.run(options, bucket, values)
        self._kinds.plain = True
        try:
            with options.watch():
                self.run(options, bucket, values)
        finally:
            self._kinds.plain = False


class _NoGuards:
    """Takes the guards of the passes: the recorded graph serves only modules and arguments of its
    form."""

    def add(self, guard: Any, **_: Any) -> None:
        """No effect."""


def _unguarded(found: Recording) -> AbstractContextManager[Any]:
    """A context in which passes find the trace that they ask for."""
    first = next(iter(found.module.graph.nodes))
    context: Any = TracingContext(first.meta["example_value"].fake_mode)
    context.guards_context.dynamo_guards = _NoGuards()
    return under_context(context)


def _differs(
    found: Recording, call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Does the graph, before it is rewritten, give other numbers than the module, or write other
    ones into pages?"""
    flat = *tensors_of((args, kwargs)), *own_tensors(call).values()
    pages = [flat[i] for i in _pages(found.module.graph) if flat[i].nbytes <= MOST_COMPARED]
    got = tensors_of(_filled(found, found.module(*flat)))
    written = [t.clone() for t in pages]
    want = tensors_of(type(call).forward(call, *args, **kwargs))
    alike = all(
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        for a, b in zip(got, want, strict=True)
    )
    return not (alike and all(map(_equal, got + written, want + pages)))


def _pages(graph: fx.Graph) -> list[int]:
    """Which inputs an op of ours takes as pages, which it may write."""
    taken: list[Any] = []
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "attnops":
            names = (argument.name for argument in node.target._schema.arguments)
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            taken += (x for name, x in given.items() if name.endswith("_pages"))
    found = {*_storages(x for x in taken if isinstance(x, fx.Node))}
    inputs = graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if not found.isdisjoint(_storages([node]))]


def _storages(nodes: Iterable[fx.Node]) -> Iterator[Any]:
    return storages([node.meta["example_value"] for node in nodes])


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        # torch compares few of the small floats on every device.
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _filled(found: Recording, results: Any) -> Any:
    return mapped(found.out, lambda x: results[x.index] if isinstance(x, Slot) else x)
