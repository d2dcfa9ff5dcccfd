"""`Kinds`: the layers of a step, rewritten by the passes and run as they are, without a
compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from ..core.errors import one_line
from ..core.fx_effects import storages
from ..core.op import not_lowered
from ..core.private_torch import OpOverload, TracingContext, under_context
from ..core.problem import hearing
from .any_size import AnySize, Differ, Sample, Sizes, choices_of
from .as_it_runs import AsItRuns
from .buckets import Bucket
from .compile_pieces import Program
from .eager_capture import capture_mode
from .forms import Form, Slot, mapped, own_tensors, tensors_of
from .options import Options, Values
from .per_layer import NotRegional, PerLayer, Regions, Twin, twin
from .record_functions import Recording, follow, record
from .report import Report
from .stale import in_force

MOST_KEPT = 256
"""Recorded layers that are kept: those of all buckets."""

MOST_SAMPLES = 4
"""Recordings of a layer that together serve other sizes: each may show a size that varies."""

MOST_COMPARED = 2**26
"""Bytes of pages that are compared: those of a server may take most of the memory."""

Way = Literal["each", "once", "own", "ahead"]
"""How the layers of a step run: each of them, or one of each kind, whose results stand for those of
the others; by their own code; or not at all, with results that hold no numbers."""


@dataclass(eq=False)
class Kind:
    """What equal layers share.

    out: the result, with slots. fakes: its tensors. numbers: the recording as it was before it was
    rewritten, until its numbers are compared with a layer's own. sizes: the program's inputs beside
    tensors. sample: for kinds of other sizes. any_size: what it and earlier ones made.
    """

    out: Any
    fakes: list[Tensor]
    program: Program
    numbers: Recording | None
    sizes: Sizes = ()
    sample: Sample | None = None
    any_size: AnySize | None = None


@dataclass(frozen=True)
class _Own:
    """A layer, apart from what it is given. tensors: see `own_tensors`."""

    form: Any
    known: Form
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Called:
    """A call of a layer in a step of so many rows. key: of its kind, the form of the arguments
    last."""

    key: tuple[Any, ...]
    rows: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        return *tensors_of((self.args, self.kwargs)), *own_tensors(self.module).values()


Kept = dict[Any, Kind]
"""Kinds by form, which keeps what it knows by identity. Those that served last come last."""


class Kinds(Regions):
    """One graph a kind of equal layers and sizes of a step, recorded without Dynamo, or several
    recordings of other sizes as one (`AnySize`).

    A graph serves for modules and arguments of its form, under one policy. It does not know whether
    the code has changed, which its caller compares. Functions run as they are.

    Raises NotRegional as `Regions`, and for a layer whose code does what a graph would not repeat,
    or whose graph does not give the layer's own numbers.

    kept: recordings of others, to share.
    shares_sizes: do two recordings of a layer serve steps of other rows, too?
    """

    takes_twins = False
    shares_sizes = False

    def __init__(
        self,
        passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
        kept: Kept | None = None,
    ) -> None:
        super().__init__("eager", passes)
        self._kept: Kept = {} if kept is None else kept
        self._way: Way = "each"
        self._results: dict[Kind, Any] = {}  # of the kinds that ran in this step, way "once"
        self._owns: dict[nn.Module, _Own] | None = None  # in a session
        self._forms: dict[int, tuple[Any, Any]] = {}  # of objects that layers share, in a session

    def varying(self, tensor: Tensor, *dims: int) -> Tensor:
        return tensor

    def begin(self) -> None:
        super().begin()
        self._results.clear()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The block looks at a layer once: the model does not change."""
        self._owns = {}
        try:
            yield
        finally:
            self._owns = None
            self._results.clear()
            self._forms.clear()

    @contextmanager
    def way(self, way: Way) -> Iterator[None]:
        """The layers of the block run in this way."""
        before, self._way = self._way, way
        try:
            yield
        finally:
            self._way = before

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
        if self._way == "own":
            return type(call).forward(call, *args, **kwargs)
        own, kind = self._of(call, rows, args, kwargs, apart)
        if self._way == "ahead":
            return _filled(kind.out, list(map(_blank, kind.fakes)))
        flat = *tensors_of((args, kwargs)), *own.tensors, *kind.sizes
        self.ran.append(kind.program)
        return _filled(kind.out, self._run(kind, flat))

    def _run(self, kind: Kind, flat: tuple[Any, ...]) -> Any:
        """The results of the kind's program, which are captured where a capture is under way."""
        if (mode := capture_mode()) is not None:
            with mode.aside() as into:
                results = kind.program.run(flat, into)
            mode.note(results)
            return results
        if self._way == "each":
            return kind.program.run(flat)
        if kind in self._results:
            # Copies, as no two layers have the same results.
            return [t.clone() for t in self._results[kind]]
        results = kind.program.run(flat)
        if _are_apart(results, flat):
            self._results[kind] = [t.clone() for t in results]
        return results

    def _of(
        self,
        call: nn.Module,
        rows: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        apart: str,
    ) -> tuple[_Own, Kind]:
        with _refused(call):
            own = self._own(call)
            given = own.known.further().of((args, kwargs))
            key = apart, in_force(), own.form, given
            ahead = self._way == "ahead"
            found = known = self._kept.pop(key, None)
            if found is None or (found.numbers is not None and not ahead):
                began = time.perf_counter()
                found = self._recorded(known, _Called(key, rows, call, args, kwargs))
                self.seconds += time.perf_counter() - began
        if known is None and found.sizes and ahead:
            return own, found  # not kept: whether the layer's code agrees is seen when it runs
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return own, found

    def _own(self, call: nn.Module) -> _Own:
        if self._owns is not None and call in self._owns:
            return self._owns[call]
        known = Form(None if self._owns is None else self._forms)
        found = _Own(known.of_module(twin(call)[0]), known, (*own_tensors(call).values(),))
        if self._owns is not None:
            self._owns[call] = found
        return found

    def _recorded(self, found: Kind | None, called: _Called) -> Kind:
        """A kind, whose numbers are compared by now unless it is recorded ahead."""
        module = called.module
        name = type(module).__name__
        if capture_mode() is not None:
            # Its results could not be compared with the module's.
            raise NotRegional(f"{name} was called otherwise than before the capture")
        ahead = self._way == "ahead"
        if found is None and (known := self._of_other_sizes(called)) is not None:
            return known
        same = twin(module)[0]
        numbers = record(same, called.args, called.kwargs) if found is None else found.numbers
        assert numbers is not None
        forward = partial(type(module).forward, module, *called.args, **called.kwargs)
        if not ahead and _differs(numbers, called.flat, forward):
            raise NotRegional(f"what was recorded of {name} has other results")
        if found is None:
            self._kind = type(module)
            found = self._rewritten(numbers, called, keep=ahead or self.shares_sizes)
        if not ahead:
            found.numbers = None
            self._share(found, called)
        return found

    def _rewritten(self, numbers: Recording, called: _Called, keep: bool) -> Kind:
        """The kind of a recording, which is itself rewritten unless it is to be kept."""
        results: Any = numbers.module.graph.output_node().args[0]
        fakes = [node.meta["example_value"] for node in results]
        recording = replace(numbers, module=_copied(numbers.module)) if keep else numbers
        with _unguarded(recording), not_lowered(), hearing() as heard:
            found = Kind(numbers.out, fakes, self._program(recording.module), numbers)
        if self.shares_sizes:
            choices = choices_of(heard)
            found.sample = Sample(
                called.rows, called.key[-1], fakes, numbers, found.program, choices
            )
        return found

    def _alike(self, called: _Called) -> list[Kind]:
        """The kinds of such layers that are samples of other sizes, the latest first."""
        *form, _ = called.key
        samples = ((k, kind) for k, kind in self._kept.items() if kind.sample is not None)
        return [kind for (*other, _), kind in samples if other == form][::-1]

    def _share(self, found: Kind, called: _Called) -> None:
        """Have a kind serve other sizes with earlier ones that differ in sizes alone."""
        if (own := found.sample) is None:
            return
        proven = (kind.sample for kind in self._alike(called) if kind.numbers is None)
        others = [each for each in proven if each is not None and each.chosen == own.chosen]
        del others[MOST_SAMPLES - 1 :]
        for each in (others, *([other] for other in others)) if others else ():
            with suppress(Differ):
                found.any_size = AnySize(own, *each)
                return

    def _of_other_sizes(self, called: _Called) -> Kind | None:
        """A kind that recordings of other sizes serve, whose numbers are compared by now unless the
        layers run ahead."""
        for kind in self._alike(called):
            found, ahead = kind.any_size, self._way == "ahead"
            if found is not None and (sizes := _served(found, called, ahead)) is not None:
                return Kind(kind.out, found.fakes(sizes), found.program, None, sizes)
        return None


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
    """Runs recorded layers, or the whole model where its layers cannot be recorded."""

    def __init__(self, kinds: Kinds, layered: Callable[..., Any]) -> None:
        super().__init__(kinds, layered, AsItRuns())
        self._kinds, self._watched = kinds, False
        kinds.shares_sizes = True

    def trace(self, bucket: Bucket) -> str:
        """Each bucket is recorded by itself, for its sizes, or served by recordings of others."""
        return str(bucket)

    def session(self) -> AbstractContextManager[None]:
        return self._kinds.session()

    def begin(self, options: Options, bucket: Bucket, values: Values) -> None:
        if not self.regions.refusal:
            with self._kinds.way("ahead"):
                self._in_layers(options, bucket, values)

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        with self._kinds.way("once"):
            return super().run(options, bucket, values)

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
    """Runs code that calls its layers through `kinds` itself. Each bucket is recorded by itself,
    or served by recordings of others, see `AnySize`."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds, self._watched = kinds, False
        kinds.shares_sizes = True

    def trace(self, bucket: Bucket) -> str:
        return str(bucket)

    def session(self) -> AbstractContextManager[None]:
        return self._kinds.session()

    def begin(self, options: Options, bucket: Bucket, values: Values) -> None:
        with self._kinds.way("ahead"):
            super().run(options, bucket, values)

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        with self._kinds.way("once"):
            return super().run(options, bucket, values)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Record the layers. Also run their own code once, of the first bucket, to see whether it
        changes more than tensors: a capture does not run it."""
        self.run(options, bucket, values)
        if self._watched:
            return
        with self._kinds.way("own"), options.watch():
            super().run(options, bucket, values)
        self._watched = True


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


def _served(found: AnySize, called: _Called, ahead: bool) -> Sizes | None:
    """The sizes of a call that recordings of other sizes serve, if the layer's own code does what
    they do, and gives their numbers. ahead: it is not run."""

    def forward(sizes: Sizes) -> Any:
        ran = follow(twin(called.module)[0], called.args, called.kwargs)
        if not found.follows(sizes, ran):
            # The recordings are not run: a kernel may trust the sizes that it is given.
            raise Differ("the layer's own code goes another way")
        return ran.result

    try:
        sizes = found.sizes(called.rows, called.key[-1])
        if sizes is None or ahead:
            return sizes
        if _differs(found.numbers, (*called.flat, *sizes), partial(forward, sizes)):
            return None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # those of the layer's own code come again
        return None
    return sizes


def _differs(found: Recording, flat: tuple[Any, ...], forward: Callable[[], Any]) -> bool:
    """Does the graph, before it is rewritten, give other numbers than the module's forward, or
    write other ones into pages?"""
    pages = [flat[i] for i in _pages(found.module.graph) if flat[i].nbytes <= MOST_COMPARED]
    want = tensors_of(forward())
    written = [t.clone() for t in pages]
    got = tensors_of(_filled(found.out, found.module(*flat)))
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
    return storages([node.meta.get("example_value") for node in nodes])  # sizes have none


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        # torch compares few of the small floats on every device.
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Its graph, which holds no modules, on nodes of its own."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, values))
    for node in module.graph.find_nodes(op="placeholder"):
        values[node]._dynamo_source = node._dynamo_source
    return fx.GraphModule(nn.Module(), graph)


def _are_apart(results: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Has each result memory of its own, and no more than its numbers? A copy of a view has another
    layout, by which the next layer would be told apart."""
    taken = set(storages(given))
    for t in results:
        [own] = storages([t])
        if own in taken or t.untyped_storage().nbytes() != t.nbytes:
            return False
        taken.add(own)
    return True


def _blank(fake: Tensor) -> Tensor:
    """A tensor of this form, of any numbers."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _filled(out: Any, results: Any) -> Any:
    return mapped(out, lambda x: results[x.index] if isinstance(x, Slot) else x)
