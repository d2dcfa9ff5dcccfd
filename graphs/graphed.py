"""`Graphed`: a model whose calls replay graphs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..cache.batch import PagedBatch
from ..cache.paged import ordinary
from ..core.errors import InvalidInput, NotCapturable, OverBudget, StaleGraph, fail
from ..core.kernel import replanned
from ..core.record import need
from .as_it_runs import AsItRuns
from .buckets import Bucket
from .capturing import as_captured, drew
from .cuda_graphs import CAPTURING, CudaGraphs, Device, Recorded, drawing_nothing, frozen
from .inputs import Inputs
from .options import Options, Values, path
from .report import Report, Row
from .stale import compare, described, restore, uncached_casts, unchanged

Progress = Callable[[int, int, str], None]
"""Called with (buckets captured so far, all buckets, the bucket just captured)."""


@dataclass
class Entry:
    """A captured bucket.

    rows: has an output the bucket's rows, so that padding rows are cut off?
    """

    bucket: Bucket
    values: Values
    recorded: Recorded
    outputs: list[Any]
    spec: Any
    rows: tuple[bool, ...]
    seconds: float
    planned: PagedBatch | None
    replays: int = 0

    @property
    def row(self) -> Row:
        made = self.recorded
        breaks, took = tuple(made.breaks), tuple(made.bytes_of)
        return Row(self.bucket, len(made.graphs), breaks, took, self.seconds, self.replays)


@dataclass(eq=False, repr=False, kw_only=True)
class Graphed(Options):
    """A model that is called as before and replays graphs.

    `breakable` is another name of this class. It captures the model as it runs, without a compiler:
    capture stops at every call that a graph may not contain, and resumes after it. Every bucket
    chooses its own kernels. Python runs at capture only, so control flow may not depend on data;
    mark functions where it does with `outside`.

    The results of a call are views of memory that the next call writes: use or copy them before.
    Calls from two threads are unsafe.

    Args:
        model: a module or function. Its arguments and results may be structures.
        buckets: the sizes to capture.
        batch: the name of the argument that is the PagedBatch. None: padding rows are zeros, which
            other rows may not depend on, and a call with as many tokens as requests, or without
            tensors by token, is a decode step if `buckets` has decode sizes.
        tokens: names of the arguments with a row for every new token, copied at every call.
        requests: names of the arguments with a row for every request, copied at every call. All
            other arguments must be the same objects at every call, for instance a cache's pages.
        returns: the rows of the results, "tokens" or "requests"; padding rows are cut off tensors
            as long as the bucket. "whole": no rows.
        cache: the cache of the model's batches. Its pages have static addresses, and captured page
            tables are as wide as its own.
        prepare: makes metadata outside of graphs, once a step for the padded batch, for instance a
            Planner. Without it the plan that `cache` would make is made in the graph, once a step.
        eager: names of ops, by kind of batch, to run between graphs although their kernel may be
            captured.
        budget_bytes: the most memory of all graphs, checked before each capture.
        over_budget: "raise" OverBudget, or "drop" the bucket.
        check_every: compare every so many replays of a bucket with the eager model, which writes
            the same slots again; 0: never.
        tolerance: of that comparison, relative to the largest number; default by dtype.
        graphs: the device side; default CUDA's.
        state: further tensors that a step changes in place, for instance of recurrent layers. Their
            addresses are static. Captures and comparisons run the model several times and restore
            them.
        watch: returns a context for the run that is captured. It may raise SideEffect at its end,
            for a run that a replay cannot repeat.
        draws: does the model draw random numbers? Those of captures are then drawn again later, and
            so are those that other threads draw meanwhile.
        ahead: plans a step on the host before it runs.
        runner: how a step runs, see `AsItRuns`.

    Raises:
        InvalidInput: an argument is out of its range, or is not the name of an argument of the
            model.
    """

    runner: AsItRuns = field(default_factory=AsItRuns)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state = tuple({id(t): t for t in self.state}.values())
        signature = inspect.signature(getattr(self.model, "forward", self.model))
        parameters = signature.parameters.values()
        by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        self._names = tuple(p.name for p in parameters if p.kind in by_name)
        given = (self.batch, *self.tokens, *self.requests)
        unknown = [n for n in given if n is not None and n not in self._names]
        known = not unknown or any(p.kind is p.VAR_KEYWORD for p in parameters)
        want = f"arguments of the model: {', '.join(self._names)}"
        need(known, "batch, tokens, requests", unknown, want)
        self._entries: dict[Bucket, Entry] = {}
        self._prepared: set[str] = set()
        self._inputs: Inputs | None = None
        self._eager_calls = self._compared = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for this call.

        Raises InvalidInput, BatchTooLarge, StaleGraph, NotCapturable, OverBudget, ReplayMismatch,
        and errors of the model during compile or capture. All but errors of the model leave the
        cache as it was.
        """
        with torch.no_grad():
            values = self._named(args, kwargs)
            kind, tokens, requests, queries, shared = self.sizes(values)
            bucket = self.buckets.find(kind, tokens, requests, queries, shared)
            if bucket is None:
                self._eager_calls += 1
                return self.model(**values)
            if self._inputs is not None:
                self._inputs.check(values)
            entry = self._entries.get(bucket) or self._captured(bucket, values)
            if entry is None:  # the budget dropped the bucket just now
                return self(**values)
            if self.graphs is not None:
                self.graphs.follow()
            return self._replay(entry, values, tokens, requests)

    def begin(self, **values: Any) -> None:
        """Begin to build what the first such call will wait for. Nothing is captured, and no value
        is read. Raises as a call does."""
        with torch.no_grad():
            bucket = self.buckets.find(*self.sizes(values))
            if bucket is None or self.runner.trace(bucket) in self._prepared:
                return
            self._initialised(values)[0].follow()
            with self._as_captured(bucket, values), frozen():
                self.runner.begin(self, bucket, self._static(bucket, values)[0])

    def capture(self, *args: Any, progress: Progress | None = None, **kwargs: Any) -> Report:
        """Capture every bucket now, largest first.

        Args:
            args: arguments of any call; only their dtypes, devices and row shapes matter, and no
                value is stored. A batch with a shared prefix captures the buckets of such batches,
                any other those of batches without.
            progress: called after every bucket; `attnops.graphs.bar()` draws a bar.
            kwargs: arguments by name.

        Raises as a call does.
        """
        with torch.no_grad():
            values = self._named(args, kwargs)
            *_, shared = self.sizes(values)
            if self._inputs is not None:
                self._inputs.check(values)
            wanted = self.buckets.all(shared)
            missing = [bucket for bucket in wanted if bucket not in self._entries]
            for bucket in missing:
                if self.runner.trace(bucket) not in self._prepared:
                    with self._capturing(bucket, values):
                        self._prepare_for(bucket, values)
            # One session for all buckets, begun after the compiler, which leaves much garbage.
            session = self._initialised(values)[0].session() if missing else nullcontext()
            with CAPTURING, session:
                for done, bucket in enumerate(wanted, 1):
                    if bucket not in self._entries and bucket not in self.buckets.dropped:
                        self._captured(bucket, values)
                    if progress is not None:
                        progress(done, len(wanted), str(bucket))
        return self.report()

    def report(self) -> Report:
        """The captured buckets with their graphs, time and memory."""
        report = Report(
            tuple(entry.row for entry in self._entries.values()),
            self.runner.seconds,
            self._input_bytes,
            self._eager_calls,
            tuple(sorted(self.buckets.dropped, reverse=True)),
            self.budget_bytes,
            self._compared,
        )
        return self.runner.told(report)

    def holds(self, bucket: Bucket | None) -> bool:
        """Is this bucket captured?"""
        return bucket in self._entries

    @property
    def captured(self) -> int:
        """The number of captured buckets."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs and their buffers hold."""
        return self._graph_bytes + self._input_bytes

    @property
    def _graph_bytes(self) -> int:
        return sum(sum(entry.recorded.bytes_of) for entry in tuple(self._entries.values()))

    @property
    def _input_bytes(self) -> int:
        return 0 if self._inputs is None else self._inputs.bytes

    def free(self) -> None:
        """Free all graphs and buffers, which invalidates earlier results.

        Compiled code is kept, and the next call captures again.
        """
        if self.graphs is not None and self._entries:
            self.graphs.settle()
            for entry in self._entries.values():
                entry.recorded.reset()
            self._entries.clear()
            self.graphs.release()
        self._inputs = None
        self.buckets = replace(self.buckets, dropped=frozenset())

    def _named(self, args: tuple[Any, ...], kwargs: Values) -> Values:
        if not args:
            return kwargs
        if len(args) > len(self._names):
            want = f"at most {len(self._names)}: {', '.join(self._names)}"
            fail(InvalidInput, "arguments", f"{len(args)} without a name", want)
        values = dict(zip(self._names, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            fail(InvalidInput, "arguments", sorted(twice), "each once")
        return {**values, **kwargs}

    # Replay -------------------------------------------------------------------------------------

    def _replay(self, entry: Entry, values: Values, tokens: int, requests: int) -> Any:
        assert self._inputs is not None
        due = self.check_every > 0 and (entry.replays + 1) % self.check_every == 0
        if due:
            self._check_lengths(values, self._inputs.widths)
        self._inputs.load(entry.bucket, values, tokens, requests)
        if entry.planned is not None:
            self._plan_again(entry, entry.planned, values)
        if self.ahead is not None:
            self.ahead.plan_step(entry.bucket.requests, requests)
        before = [t.detach().clone() for t in self.state] if due else []
        for step in entry.recorded.steps:
            step()
        if self.ahead is not None and not due:  # a comparison plans this step again
            self.ahead.stepped()
        entry.replays += 1
        kept_rows = tokens if self.returns == "tokens" else requests
        cut = zip(entry.outputs, entry.rows, strict=True)
        out = pytree.tree_unflatten([x[:kept_rows] if has else x for x, has in cut], entry.spec)
        if not due:
            return out
        self._compared += 1
        # The eager run starts from the same state and may overwrite the outputs, so they are
        # copied first.
        out = pytree.tree_map_only(Tensor, torch.clone, out)
        with unchanged(self.state), as_captured():
            restore(self.state, before)
            if self.ahead is not None:
                self.ahead.plan_step(requests, requests)
            compare(entry.bucket, out, self.model(**values), self.tolerance)
        return out

    def _check_lengths(self, values: Values, widths: Sequence[int]) -> None:
        """Raise StaleGraph for a request that is longer than a page table. Waits for the device."""
        if self.cache is None or self.batch is None:
            return
        batch: PagedBatch = values[self.batch]
        for at, width in enumerate(widths):
            lengths, most = batch.of(at).seq_lens, width * self.cache.page_size
            if lengths.numel() and (longest := int(lengths.max())) > most:
                want = f"at most {most}, the page table's width"
                fail(StaleGraph, f"{path(self.batch, at)}.seq_lens", f"{longest} tokens", want)

    def _plan_again(self, entry: Entry, batch: PagedBatch, values: Values) -> None:
        """Make the metadata of the padded batch outside of graphs, in the captured buffers."""
        assert self.prepare is not None and self.batch is not None and self._inputs is not None
        given: PagedBatch = values[self.batch]
        for table, own in zip((batch, *batch.others), (given, *given.others), strict=True):
            table.known(self._inputs.host_lengths(entry.bucket, own))
        new, old = self.prepare(batch), entry.values[self.batch]
        if len(new.others) != len(old.others):
            self._fail_of_tables(new, old)
        device = batch.page_table.device.type
        for at, own in enumerate((old, *old.others)):
            made = new.others[at - 1] if at else new
            for name in ("plan", "workspace"):
                got, want = getattr(made, name), getattr(own, name)
                if got is not want:
                    field = f"{path(self.batch, at)}.{name} of prepare"
                    self._take(field, got, want, device, stays=name == "workspace")

    def _take(self, field: str, got: Any, want: Any, device: str, stays: bool) -> None:
        """Take what `prepare` made into the captured buffer. device: the type of the batch's.
        stays: the buffer must be the captured one, without a copy."""
        if (now := described(got)) != (then := described(want)):
            fail(StaleGraph, field, now, then)
        if got.data_ptr() == want.data_ptr():
            return
        if stays or got.device.type == "cpu" != device:
            told = f"address {got.data_ptr():#x}", f"{want.data_ptr():#x}"
            fail(StaleGraph, field, *told)
        want.copy_(got)

    def _fail_of_tables(self, planned: PagedBatch, given: PagedBatch) -> NoReturn:
        got, want = len(planned.others), len(given.others)
        field = f"{self.batch}.others of prepare"
        fail(InvalidInput, field, f"{got} tables", f"{want}, as it was given")

    # Capture ------------------------------------------------------------------------------------

    def _captured(self, bucket: Bucket, values: Values) -> Entry | None:
        """Capture one bucket on padding rows. None where the budget drops it."""
        while True:
            try:
                return self._captured_once(bucket, values)
            except Exception as error:
                if not self._changes(error):
                    raise

    def _changes(self, error: Exception) -> bool:
        """Will the capture be another one, if it is tried again after this error?"""
        if isinstance(error, NotCapturable) and not self.draws and drew(error):
            self.draws = True
            return True
        return self.runner.changes(error)

    def _captured_once(self, bucket: Bucket, values: Values) -> Entry | None:
        with self._capturing(bucket, values) as device:
            ran = self._prepare_for(bucket, values)
            began, compiled = time.perf_counter(), self.runner.seconds
            static, planned = self._static(bucket, values)
            need = self._measured(device, bucket, static, ran)
            if self.runner.seconds != compiled:
                # The run compiled a size that specialises. Memory of the compiler is no need of
                # the bucket.
                need = self._measured(device, bucket, static)
            if not self._fits(bucket, need):
                return None
            recorded = Recorded(device)
            with recorded.whole(), self.watch():
                out = self.runner.record(self, bucket, static, recorded)
            leaves, spec = pytree.tree_flatten(out)
            # The next bucket's graphs may reuse the memory of the outputs.
            outputs = [device.weak(x) if isinstance(x, Tensor) else x for x in leaves]
            del out, leaves
        count = {"tokens": bucket.tokens, "requests": bucket.requests, "whole": -1}[self.returns]
        rows = tuple(isinstance(x, Tensor) and x.shape[:1] == (count,) for x in outputs)
        seconds = time.perf_counter() - began - (self.runner.seconds - compiled)
        entry = Entry(bucket, static, recorded, outputs, spec, rows, seconds, planned)
        self._entries[bucket] = entry
        return entry

    def _prepare_for(self, bucket: Bucket, values: Values) -> bool:
        """Prepare all buckets of a bucket's trace once, on the largest. Returns whether that has
        run the bucket itself, as later runs do."""
        trace = self.runner.trace(bucket)
        if trace in self._prepared:
            return False
        wanted = self.buckets.all(bucket.shared)
        largest = next(b for b in wanted if self.runner.trace(b) == trace)
        self.runner.prepare(self, largest, self._static(largest, values)[0])
        self._prepared.add(trace)
        return largest == bucket and self.runner.repeats

    def _initialised(self, values: Values) -> tuple[Device, Inputs]:
        """The first capture makes the device and the input buffers, like this call's tensors."""
        if self.graphs is None:
            self.graphs = CudaGraphs(self._device_of(values))
        if self._inputs is None:
            pools = () if self.cache is None else self.cache.pools
            watched = {f"cache.pages[{i}]": t for i, t in enumerate(pools)}
            watched |= {f"state[{i}]": t for i, t in enumerate(self.state)}
            self._inputs = Inputs(self, values, watched)
        if self.batch is not None and values[self.batch].shared is not None:
            self._inputs.make_shared()  # on the caller's stream, as all buffers
        return self.graphs, self._inputs

    def _device_of(self, values: Values) -> torch.device:
        found: torch.device = values[(*self.tokens, *self.requests)[0]].device
        return found

    @contextmanager
    def _capturing(self, bucket: Bucket, values: Values) -> Iterator[Device]:
        device, _ = self._initialised(values)
        device.follow()
        with self._as_captured(bucket, values), device.session():
            yield device

    @contextmanager
    def _as_captured(self, bucket: Bucket, values: Values) -> Iterator[None]:
        """The model runs as in a graph. Its state is the same afterwards."""
        drawn = drawing_nothing(self._device_of(values)) if self.draws else nullcontext()
        plans = self.prepare is not None or self.ahead is not None
        try:
            with (
                CAPTURING,
                replanned(bucket.queries if plans else 0),
                drawn,
                ordinary(),
                uncached_casts(),
                as_captured(),
                unchanged(self.state),
                self.runner.session(),
            ):
                yield
        except BaseException:
            # Without the buffers of a first capture that failed, later calls may differ from it.
            if not self._entries:
                self._inputs = None
            raise

    def _static(self, bucket: Bucket, values: Values) -> tuple[Values, PagedBatch | None]:
        """The bucket's inputs, all padding rows, and the batch for `prepare`, if any."""
        _, inputs = self._initialised(values)
        inputs.clear(bucket)
        if self.ahead is not None:
            self.ahead.plan_step(bucket.requests, 0)
        static = {**self.fixed(values), **inputs.of(bucket)}
        name = self.batch
        if self.prepare is None or name is None:
            return static, None
        planned = self.prepare(bare := static[name])
        if len(planned.others) != len(bare.others):
            self._fail_of_tables(planned, bare)
        tables = zip((bare, *bare.others), (planned, *planned.others), strict=True)
        first, *others = (replace(b, plan=p.plan, workspace=p.workspace) for b, p in tables)
        static[name] = replace(first, others=tuple(others))
        return static, bare

    def _measured(self, device: Device, bucket: Bucket, values: Values, ran: bool = False) -> int:
        """Run the bucket without a graph, unless it ran so and is not measured. Returns the bytes
        that it needs.

        0 without a budget, where torch's statistics stay as they are.
        """
        if self.budget_bytes is not None:
            return device.measured(lambda: self.runner.run(self, bucket, values))
        # Also where it ran: this may empty the allocator's cache, which a capture cannot use.
        device.warm(lambda: None if ran else self.runner.run(self, bucket, values))
        return 0

    def _fits(self, bucket: Bucket, need: int) -> bool:
        budget, held = self.budget_bytes, self._graph_bytes
        # Graphs share one pool, so a bucket takes more memory only if it needs more than the pool
        # has.
        if budget is None or max(need, held) <= budget:
            return True
        if self.over_budget == "raise":
            fail(OverBudget, bucket, need, held, budget)
        self.buckets = replace(self.buckets, dropped=self.buckets.dropped | {bucket})
        return False


breakable = Graphed
