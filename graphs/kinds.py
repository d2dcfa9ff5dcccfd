"""`Kinds`: the layers of a step, rewritten by the passes and run as they are, without a
compiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from ..core.errors import AttnopsError, one_line
from ..core.fx_effects import storages
from ..core.op import not_lowered
from ..core.precompile import beginning
from ..core.private_torch import TracingContext, under_context
from ..core.problem import hearing
from .any_size import AnySize, Sample, Sizes, choices_of
from .as_it_runs import AsItRuns
from .buckets import Bucket
from .compared import Before, differs
from .compile_pieces import Program
from .eager_capture import capture_mode
from .forms import filled, tensors_of
from .looks import Looks, Own, nameless, own_of
from .options import Options, Values
from .per_layer import NotRegional, PerLayer, Regions, Twin
from .record_functions import Followed, Recording, follow, record
from .report import Report
from .stale import in_force

log = logging.getLogger(__name__)

MOST_KEPT = 256
"""Recorded layers that are kept: those of all buckets."""

MOST_SAMPLES = 4
"""Recordings of a layer that together serve other sizes: each may show a size that varies."""


class Dropped(NotRegional):
    """A capture met a layer that is not recorded."""


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
class _Called:
    """A call of a layer in a step of so many rows.

    key: of its kind, the form of the arguments last. tensors: its own, see `own_tensors`.
    """

    key: tuple[Any, ...]
    rows: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        return *tensors_of((self.args, self.kwargs)), *self.tensors

    def forward(self) -> Any:
        return type(self.module).forward(self.module, *self.args, **self.kwargs)

    def record(self) -> Recording:
        return record(nameless(self.module), self.args, self.kwargs)

    def differs_from(self, found: Recording) -> bool:
        """As `differs`."""
        before = Before(found.module.graph, self.flat)
        return differs(found, self.flat, self.forward(), before)

    def follow(self) -> Followed:
        return follow(nameless(self.module), self.args, self.kwargs)


@dataclass(frozen=True)
class Kept:
    """What the graphs of one model share.

    kinds: by form, which keeps what it knows by identity. Those that served last come last.
    watched: the steps, each with its bucket, whose own code was seen to change tensors alone.
    ran: the steps that ran, each with its bucket, the kind of its pages, and what was in force.
    """

    kinds: dict[Any, Kind] = field(default_factory=dict)
    watched: set[Any] = field(default_factory=set)
    ran: set[Any] = field(default_factory=set)
    looks: Looks = field(default_factory=Looks)


class Kinds(Regions):
    """One graph a kind of equal layers and sizes of a step, recorded without Dynamo, or several
    recordings of other sizes as one (`AnySize`).

    A graph serves for modules and arguments of its form, under one policy. It does not know whether
    the code has changed, which its caller compares. Functions run as they are.

    Raises NotRegional as `Regions`, and for a layer whose code does what a graph would not repeat,
    or whose graph does not give the layer's own numbers.

    kept: what others have recorded and watched, to share: of one model, whose layers are the same
        in all sessions. watched: see `Kept`.
    pages: equal where layers get arguments of the same forms over the pages; None: nowhere else.
    """

    takes_twins = False

    def __init__(
        self,
        passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
        kept: Kept | None = None,
        pages: Hashable = None,
    ) -> None:
        super().__init__("eager", passes)
        kept = Kept() if kept is None else kept
        self._kept, self.watched = kept.kinds, kept.watched
        self._runs, self._looks, self._pages = kept.ran, kept.looks, pages
        self._way: Way = "each"
        self._results: dict[Kind, Any] = {}  # of the kinds that ran in this step, way "once"
        self._ahead: dict[Any, Kind] = {}  # of this step, whose layers' code was not followed
        self._owns: dict[nn.Module, Own] | None = None  # in a session

    def varying(self, tensor: Tensor, *dims: int) -> Tensor:
        return tensor

    def begin(self) -> None:
        super().begin()
        self._results.clear()
        self._ahead.clear()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The block looks at a layer once: the model does not change."""
        self._owns = {}
        try:
            yield
        finally:
            self._owns = None
            self._results.clear()
            self._ahead.clear()

    def ran_alike(self, options: Options, bucket: Bucket) -> bool:
        """Did such a step run over pages like these? Its kernels are then loaded, and its layers
        recorded and compared, but for those that were dropped since, see `Dropped`."""
        return (self._pages, options.requests, bucket, in_force()) in self._runs

    def note_run(self, options: Options, bucket: Bucket) -> None:
        """Note that such a step has run."""
        if self._pages is not None:
            self._runs.add((self._pages, options.requests, bucket, in_force()))

    def runs_again(self, error: Exception) -> bool:
        """Will steps run before their captures because of this error?"""
        dropped = isinstance(error, Dropped) and bool(self._runs)
        if dropped:
            self._runs.clear()
        return dropped

    @contextmanager
    def watching(self, options: Options, bucket: Bucket) -> Iterator[bool]:
        """Watch what the block runs, the own code of a step. False: it ran in this bucket before,
        as over other pages."""
        step = options.requests, bucket
        if step in self.watched:
            yield False
            return
        with options.watch():
            yield True
        self.watched.add(step)

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
            return filled(kind.out, list(map(_blank, kind.fakes)))
        flat = *tensors_of((args, kwargs)), *own.tensors, *kind.sizes
        self.ran.append(kind.program)
        return filled(kind.out, self._run(kind, flat))

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
    ) -> tuple[Own, Kind]:
        with _refused(call):
            own = self._own(call)
            given = own.known.further().of((args, kwargs))
            key = apart, in_force(), own.form, given
            ahead = self._way == "ahead"
            known = self._kept.pop(key, None)
            found = self._ahead.get(key) if ahead and known is None else known
            if found is None or (found.numbers is not None and not ahead):
                began = time.perf_counter()
                found = self._recorded(known, _Called(key, rows, call, args, kwargs, own.tensors))
                self.seconds += time.perf_counter() - began
        if known is None and found.sizes and ahead:
            self._ahead[key] = found  # for this step: its first run sees whether the code agrees
            return own, found
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return own, found

    def _own(self, call: nn.Module) -> Own:
        if self._owns is None:
            return own_of(call)
        if call not in self._owns:
            self._owns[call] = self._looks.own(call)
        return self._owns[call]

    def _recorded(self, found: Kind | None, called: _Called) -> Kind:
        """A kind, whose numbers are compared by now unless it is recorded ahead."""
        module = called.module
        name = type(module).__name__
        if capture_mode() is not None:
            # Its results could not be compared with the module's.
            raise Dropped(f"{name} was called otherwise than before the capture")
        ahead = self._way == "ahead"
        if found is None and (known := self._of_other_sizes(called)) is not None:
            return known
        # Also what the layer's own code launches, which is compared with the recording.
        with beginning() if ahead else nullcontext():
            numbers = called.record() if found is None else found.numbers
        assert numbers is not None
        if not ahead and called.differs_from(numbers):
            raise NotRegional(f"what was recorded of {name} has other results")
        if found is None:
            self._kind = type(module)
            found = self._rewritten(numbers, called)
        if not ahead:
            found.numbers = None
            self._share(found, called)
        return found

    def _rewritten(self, numbers: Recording, called: _Called) -> Kind:
        """Rewrite a copy of a recording. Returns the kind."""
        results: Any = numbers.module.graph.output_node().args[0]
        fakes = [node.meta["example_value"] for node in results]
        recording = replace(numbers, module=_copied(numbers.module))
        with _unguarded(recording), not_lowered(), hearing() as heard:
            found = Kind(numbers.out, fakes, self._program(recording.module), numbers)
        choices = choices_of(heard, found.program)
        if choices is not None:
            given = called.key[-1]
            found.sample = Sample(called.rows, given, fakes, numbers, found.program, choices)
        return found

    def _alike(self, called: _Called) -> list[tuple[Any, Kind]]:
        """The kinds of such layers that are samples of other sizes, by key, the latest first."""
        *form, _ = called.key
        samples = ((k, kind) for k, kind in self._kept.items() if kind.sample is not None)
        return [(key, kind) for key, kind in samples if [*key[:-1]] == form][::-1]

    def _share(self, found: Kind, called: _Called) -> None:
        """Have a kind serve other sizes with earlier ones that differ in sizes alone."""
        if (own := found.sample) is None:
            return
        proven = (kind.sample for _, kind in self._alike(called) if kind.numbers is None)
        others = [each for each in proven if each is not None and each.chosen == own.chosen]
        del others[MOST_SAMPLES - 1 :]
        for each in (others, *([other] for other in others)) if others else ():
            with _unshared():
                found.any_size = AnySize(own, *each)
                return

    def _of_other_sizes(self, called: _Called) -> Kind | None:
        """A kind that recordings of other sizes serve, whose numbers are compared by now unless the
        layers run ahead."""
        with _unshared():
            return self._served(called)
        return None

    def _served(self, called: _Called) -> Kind | None:
        ran = before = None  # the layer's own code runs once, for all that may serve
        for key, kind in self._alike(called):
            found = kind.any_size
            sizes = None if found is None else found.sizes(called.rows, called.key[-1])
            if found is None or sizes is None:
                continue
            if self._way != "ahead":
                before = before or Before(found.numbers.module.graph, called.flat)
                ran = ran or called.follow()
                if not found.follows(sizes, ran):
                    continue  # it is not run: a kernel may trust the sizes that it is given
                if differs(found.numbers, (*called.flat, *sizes), ran.result, before):
                    return None
            self._kept[key] = self._kept.pop(key)
            return Kind(kind.out, found.fakes(sizes), found.program, None, sizes)
        return None


@contextmanager
def _unshared() -> Iterator[None]:
    """Errors of the block are reasons to record a layer for its sizes alone. Those of its own code
    come again."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except AttnopsError:
        pass
    except Exception:
        log.debug("recordings of other sizes serve no others", exc_info=True)


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

    @property
    def repeats(self) -> bool:
        return not self.regions.refusal

    def trace(self, bucket: Bucket) -> str:
        """Each bucket is recorded by itself, for its sizes, or served by recordings of others."""
        return str(bucket)

    def session(self) -> AbstractContextManager[None]:
        return self._kinds.session()

    def begin(self, options: Options, bucket: Bucket, values: Values) -> None:
        if not (self.regions.refusal or self._kinds.ran_alike(options, bucket)):
            with self._kinds.way("ahead"):
                self._in_layers(options, bucket, values)

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        with self._kinds.way("once"):
            return super().run(options, bucket, values)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Also run the model itself once, to see whether it changes more than tensors: a capture
        does not run the code of its layers. Nothing runs where such a step ran over pages like
        these."""
        if not self.regions.refusal and self._kinds.ran_alike(options, bucket):
            return
        super().prepare(options, bucket, values)
        if self.regions.refusal:
            return  # a capture that runs the model's own code is watched
        self._kinds.note_run(options, bucket)
        if self._watched:
            return
        with self._kinds.watching(options, bucket) as runs:
            if runs:
                self.whole.run(options, bucket, values)
        self._watched = True

    def changes(self, error: Exception) -> bool:
        """Other errors of a capture are those of the model as it runs, too."""
        if self._kinds.runs_again(error):
            return True
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

    @property
    def repeats(self) -> bool:
        return True

    def trace(self, bucket: Bucket) -> str:
        return str(bucket)

    def session(self) -> AbstractContextManager[None]:
        return self._kinds.session()

    def begin(self, options: Options, bucket: Bucket, values: Values) -> None:
        if not self._kinds.ran_alike(options, bucket):
            with self._kinds.way("ahead"):
                super().run(options, bucket, values)

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        with self._kinds.way("once"):
            return super().run(options, bucket, values)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Record the layers. Also run their own code once, of the first bucket, to see whether it
        changes more than tensors: a capture does not run it. Nothing runs where such a step ran
        over pages like these."""
        if self._kinds.ran_alike(options, bucket):
            return
        self.run(options, bucket, values)
        self._kinds.note_run(options, bucket)
        if self._watched:
            return
        with self._kinds.way("own"), self._kinds.watching(options, bucket) as runs:
            if runs:
                super().run(options, bucket, values)
        self._watched = True

    def changes(self, error: Exception) -> bool:
        return self._kinds.runs_again(error)


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
