"""`Graphed`: a model whose calls replay graphs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..cache.batch import PagedBatch
from ..cache.paged import ordinary
from ..core.errors import InvalidInput, NotCapturable, OverBudget, StaleGraph, fail
from ..core.record import need
from .buckets import Bucket
from .capturing import drew
from .device import CAPTURING, CudaGraphs, Device, Recorded, drawing_nothing
from .eager_capture import CaptureMode
from .guard import compare, described, restore, uncached_casts, unchanged
from .inputs import Inputs, Setup, Values
from .report import Report, Row

Progress = Callable[[int, int, str], None]
"""Called with (buckets captured so far, all buckets, the bucket just captured)."""


@dataclass
class Entry:
    """A captured bucket. rows: does an output have the bucket's rows, so that padding rows are cut off?"""

    bucket: Bucket
    values: Values
    recorded: Recorded
    outputs: list[Any]
    spec: Any
    rows: tuple[bool, ...]
    seconds: float
    planned: PagedBatch | None
    replays: int = 0


class Graphed(Setup):
    """`breakable`: a model that is called as before and replays graphs, captured as it runs.

    Capture stops at every call that a graph may not contain, and resumes after it. Every bucket chooses its own kernels. Python runs at
    capture only, so control flow may not depend on data; mark functions where it does with `outside`. The arguments are those of
    `Piecewise`, but for `inner`, `one_differs` and `passes`.

    The results of a call are views of memory that the next call writes: use or copy them before. Calls from two threads are unsafe.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state = tuple({id(t): t for t in self.state}.values())
        parameters = inspect.signature(getattr(self.model, "forward", self.model)).parameters.values()
        self._names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        unknown = [n for n in (self.batch, *self.tokens, *self.requests) if n is not None and n not in self._names]
        known = not unknown or any(p.kind is p.VAR_KEYWORD for p in parameters)
        need(known, "batch, tokens, requests", unknown, f"arguments of the model: {', '.join(self._names)}")
        want = "() where the model takes no batch: only a batch has the tokens of each request"
        need(self.batch is not None or not self.buckets.verify, "verify", self.buckets.verify, want)
        follows = self.graphs is None or hasattr(self.graphs, "follow")
        need(follows, "graphs", type(self.graphs).__name__, "a Device with a method follow(), which orders streams")
        self._entries: dict[Bucket, Entry] = {}
        self._prepared: set[str] = set()
        self._inputs: Inputs | None = None
        self._eager_calls = self._compared = 0
        self._compile_seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for this call.

        Raises InvalidInput, BatchTooLarge, StaleGraph, NotCapturable, OverBudget, ReplayMismatch, and errors of the model during compile
        or capture. All but errors of the model leave the cache as it was.
        """
        with torch.no_grad():
            values = self._named(args, kwargs)
            kind, tokens, requests, queries = self.sizes(values)
            bucket = self.buckets.find(kind, tokens, requests, queries)
            if bucket is None:
                self._eager_calls += 1
                return self.model(**values)
            if self._inputs is not None:
                self._inputs.check(values)
            entry = self._entries.get(bucket) or self._captured(bucket, values)
            if entry is None:  # the budget dropped the bucket just now
                return self(**values)
            return self._replay(entry, values, tokens, requests)

    def capture(self, *args: Any, progress: Progress | None = None, **kwargs: Any) -> Report:
        """Capture every bucket now, largest first.

        Args:
            args: arguments of any call; only their dtypes, devices and row shapes matter, and no value is stored.
            progress: called after every bucket; `attnops.graphs.bar()` draws a bar.
            kwargs: arguments by name.

        Raises as a call does.
        """
        with torch.no_grad():
            values = self._named(args, kwargs)
            self.sizes(values)
            if self._inputs is not None:
                self._inputs.check(values)
            wanted = self.buckets.all()
            missing = [bucket for bucket in wanted if bucket not in self._entries]
            for bucket in missing:
                if bucket.trace not in self._prepared:
                    with self._capturing(values):
                        self._compile(bucket, values)
            # One session for all buckets, begun after the compiler, which leaves much garbage.
            with CAPTURING, self._initialised(values)[0].session() if missing else nullcontext():
                for done, bucket in enumerate(wanted, 1):
                    if bucket not in self._entries and bucket not in self.buckets.dropped:
                        self._captured(bucket, values)
                    if progress is not None:
                        progress(done, len(wanted), str(bucket))
        return self.report()

    def report(self) -> Report:
        """The captured buckets with their graphs, time and memory."""
        rows = tuple(
            Row(e.bucket, len(e.recorded.graphs), tuple(e.recorded.breaks), tuple(e.recorded.bytes_of), e.seconds, e.replays)
            for e in self._entries.values()
        )
        held, dropped = self._inputs.bytes if self._inputs else 0, tuple(sorted(self.buckets.dropped, reverse=True))
        return Report(rows, {}, {}, self._compile_seconds, held, self._eager_calls, dropped, self.budget_bytes, self._compared)

    @property
    def captured(self) -> int:
        """The number of captured buckets."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs and their buffers hold."""
        held = 0 if self._inputs is None else self._inputs.bytes
        return held + sum(sum(entry.recorded.bytes_of) for entry in tuple(self._entries.values()))

    def free(self) -> None:
        """Free all graphs and buffers, which invalidates earlier results. Compiled code is kept, and the next call captures again."""
        if self.graphs is not None and self._entries:
            self.graphs.settle()
            for entry in self._entries.values():
                entry.recorded.reset()
            self._entries.clear()
            self.graphs.release()
        self._inputs = None
        self.buckets = replace(self.buckets, dropped=frozenset())

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        if not args:
            return kwargs
        if len(args) > len(self._names):
            fail(InvalidInput, "arguments", f"{len(args)} without a name", f"at most {len(self._names)}: {', '.join(self._names)}")
        values = dict(zip(self._names, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            fail(InvalidInput, "arguments", sorted(twice), "each once")
        return {**values, **kwargs}

    def _prepare(self, bucket: Bucket, values: Values) -> None:
        """Initialise or compile for all buckets of one trace, on the inputs of the largest."""
        self._plain(bucket, values)

    def _plain(self, bucket: Bucket, values: Values) -> Any:
        """Run the step on these inputs without graphs, as it will be captured."""
        return self.model(**self._planned(bucket, values))

    def _planned(self, bucket: Bucket, values: Values) -> Values:
        """The inputs with the plan that is made in the graph, if any."""
        name, make = self.batch, self.plan_maker(bucket)
        return values if name is None or make is None else {**values, name: replace(values[name], plan=make(values[name]))}

    def _record(self, bucket: Bucket, values: Values, into: Recorded) -> Any:
        """Capture the step into `into`. Returns the outputs that every replay writes."""
        return self._as_it_runs(bucket, into, lambda: self._plain(bucket, values))

    def _as_it_runs(self, bucket: Bucket, into: Recorded, run: Callable[[], Any]) -> Any:
        into.begin()
        with CaptureMode(into, (self.eager or {}).get(bucket.kind, ())):
            return run()

    def _replay(self, entry: Entry, values: Values, tokens: int, requests: int) -> Any:
        assert self._inputs is not None
        if self.graphs is not None:
            self.graphs.follow()
        every, name = self.check_every, self.batch
        due = every > 0 and (entry.replays + 1) % every == 0
        if due and self.cache is not None and name is not None:
            # Waits for the device.
            lengths, most = values[name].seq_lens, self._inputs.width * self.cache.page_size
            if lengths.numel() and (longest := int(lengths.max())) > most:
                fail(StaleGraph, f"{name}.seq_lens", f"{longest} tokens", f"at most {most}, the page table's width")
        self._inputs.load(entry.bucket, values, tokens, requests)
        if entry.planned is not None:
            self._plan_again(entry, entry.planned)
        before = [t.detach().clone() for t in self.state] if due else []
        for step in entry.recorded.steps:
            step()
        entry.replays += 1
        kept_rows = tokens if self.returns == "tokens" else requests
        out = pytree.tree_unflatten([x[:kept_rows] if cut else x for x, cut in zip(entry.outputs, entry.rows, strict=True)], entry.spec)
        if due:
            self._compared += 1
            # The eager run starts from the same state and may overwrite the outputs, so they are copied first.
            out = pytree.tree_map_only(Tensor, torch.clone, out)
            with unchanged(self.state):
                restore(self.state, before)
                compare(entry.bucket, out, self.model(**values), self.tolerance)
        return out

    def _plan_again(self, entry: Entry, batch: PagedBatch) -> None:
        """Make the metadata of the padded batch outside of graphs, in the captured buffers."""
        assert self.prepare is not None and self.batch is not None
        new, old = self.prepare(batch), entry.values[self.batch]
        for name in ("plan", "workspace"):
            field, got, want = f"{self.batch}.{name} of prepare", getattr(new, name), getattr(old, name)
            if (now := described(got)) != (then := described(want)):
                fail(StaleGraph, field, now, then)
            if got is not None and got.data_ptr() != want.data_ptr():
                if name == "workspace" or got.device.type == "cpu" != batch.page_table.device.type:
                    fail(StaleGraph, field, f"address {got.data_ptr():#x}", f"{want.data_ptr():#x}")
                want.copy_(got)

    def _captured(self, bucket: Bucket, values: Values) -> Entry | None:
        """Capture one bucket on padding rows. None where the budget drops it."""
        try:
            return self._captured_once(bucket, values)
        except NotCapturable as error:
            if self.draws or not drew(error):
                raise
        self.draws = True
        return self._captured_once(bucket, values)

    def _captured_once(self, bucket: Bucket, values: Values) -> Entry | None:
        with self._capturing(values) as device:
            self._compile(bucket, values)
            began, compiled = time.perf_counter(), self._compile_seconds
            static, planned = self._static(bucket, values)
            need = self._measured(device, bucket, static)
            if self._compile_seconds != compiled:
                # The run compiled a size that specialises. Memory of the compiler is no need of the bucket.
                need = self._measured(device, bucket, static)
            if not self._fits(bucket, need):
                return None
            recorded = Recorded(device)
            with recorded.whole(), self.watch():
                out = self._record(bucket, static, recorded)
            leaves, spec = pytree.tree_flatten(out)
            # The next bucket's graphs may reuse the memory of the outputs.
            outputs = [device.weak(x) if isinstance(x, Tensor) else x for x in leaves]
            del out, leaves
        count = {"tokens": bucket.tokens, "requests": bucket.requests, "whole": -1}[self.returns]
        rows = tuple((isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == count) for x in outputs)
        seconds = time.perf_counter() - began - (self._compile_seconds - compiled)
        entry = self._entries[bucket] = Entry(bucket, static, recorded, outputs, spec, rows, seconds, planned)
        return entry

    def _compile(self, bucket: Bucket, values: Values) -> None:
        """Compile once for all buckets of a trace, on the largest."""
        if bucket.trace not in self._prepared:
            largest = next(b for b in self.buckets.all() if b.trace == bucket.trace)
            self._prepare(largest, self._static(largest, values)[0])
            self._prepared.add(bucket.trace)

    def _initialised(self, values: Values) -> tuple[Device, Inputs]:
        """The first capture makes the device and the input buffers, like the tensors of this call."""
        if self.graphs is None:
            self.graphs = CudaGraphs(values[(*self.tokens, *self.requests)[0]].device)
        if self._inputs is None:
            pools = () if self.cache is None else self.cache.pools
            watched = {f"cache.pages[{i}]": t for i, t in enumerate(pools)} | {f"state[{i}]": t for i, t in enumerate(self.state)}
            self._inputs = Inputs(self, values, watched)
        return self.graphs, self._inputs

    @contextmanager
    def _capturing(self, values: Values) -> Iterator[Device]:
        device, _ = self._initialised(values)
        device.follow()
        drawn = drawing_nothing(values[(*self.tokens, *self.requests)[0]].device) if self.draws else nullcontext()
        try:
            with CAPTURING, drawn, device.session(), ordinary(), uncached_casts(), unchanged(self.state):
                yield device
        except BaseException:
            # Without the buffers of a first capture that failed, later calls may differ from it.
            if not self._entries:
                self._inputs = None
            raise

    def _static(self, bucket: Bucket, values: Values) -> tuple[Values, PagedBatch | None]:
        """The bucket's inputs, all padding rows, and the batch for `prepare`, if any."""
        _, inputs = self._initialised(values)
        inputs.clear(bucket)
        static = {**self.fixed(values), **inputs.of(bucket)}
        name = self.batch
        if self.prepare is None or name is None:
            return static, None
        planned = self.prepare(bare := static[name])
        return static | {name: replace(bare, plan=planned.plan, workspace=planned.workspace)}, bare

    def _measured(self, device: Device, bucket: Bucket, values: Values) -> int:
        """Run the bucket without a graph. Returns the bytes that it needs; without a budget 0, and torch's statistics stay as they are."""
        if self.budget_bytes is not None:
            return device.measured(lambda: self._plain(bucket, values))
        device.warm(lambda: self._plain(bucket, values))
        return 0

    def _fits(self, bucket: Bucket, need: int) -> bool:
        budget = self.budget_bytes
        held = sum(sum(e.recorded.bytes_of) for e in self._entries.values())
        # Graphs share one pool, so a bucket takes more memory only if it needs more than the pool has.
        if budget is None or max(need, held) <= budget:
            return True
        if self.over_budget == "raise":
            fail(OverBudget, bucket, need, held, budget)
        self.buckets = replace(self.buckets, dropped=self.buckets.dropped | {bucket})
        return False
