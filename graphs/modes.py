"""`piecewise` and `breakable`: graphs of a model with and without a compiler, split at the same calls."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..cache.batch import PagedBatch
from ..core.errors import AttnopsError, InvalidInput, NotCapturable, fail, find
from .buckets import Bucket
from .device import Recorded
from .graphed import Graphed
from .guard import shape_env
from .inputs import Values
from .pieces import INNER, Inner, Program, compile_parts, start_workers
from .report import Report
from .split import split


@dataclass(eq=False, repr=False, kw_only=True)
class Piecewise(Graphed):
    """`piecewise`: compile `model` once and capture it once a bucket: one graph a step, split only where a kernel may not be captured.

    Dynamo traces the whole model, once for decode steps, once for verify steps of each number of queries, and once for mixed steps. The
    kernel of every call is chosen at the trace, for all of its sizes. Code between attention calls is compiled, equal pieces once, with
    weights as inputs.

    Args:
        model: a module or function. Its arguments and results may be structures.
        buckets: the sizes to capture.
        batch: the name of the argument that is the PagedBatch. None: padding rows are zeros, which other rows may not depend on, and a
            call with as many tokens as requests, or without tensors by token, is a decode step if `buckets` has decode sizes.
        tokens: names of the arguments with a row for every new token, copied at every call.
        requests: names of the arguments with a row for every request, copied at every call. All other arguments must be the same
            objects at every call, for instance a cache's pages.
        returns: the rows of the results, "tokens" or "requests"; padding rows are cut off tensors as long as the bucket. "whole": no rows.
        cache: the cache of the model's batches. Its pages have static addresses, and captured page tables are as wide as its own.
        prepare: makes metadata outside of graphs, once a step for the padded batch, for instance a Planner. Without it the plan that
            `cache` would make is made in the graph, once a step.
        eager: names of ops, by kind of batch, to run between graphs although their kernel may be captured.
        inner: the compiler of pieces: "inductor"; "tuned", slower to compile, for steps of one row; "eager": no compiler; or a function of
            a module and fake inputs.
        one_differs: trace a bucket of one row by itself, for models that specialise on it, as most that broadcast do. Without it the
            first compilation of such a model is discarded.
        passes: functions that change the traced module in place before the split, for instance
            `attnops.lowering.merge_linears_pass`.
        budget_bytes: the most memory of all graphs, checked before each capture.
        over_budget: "raise" OverBudget, or "drop" the bucket.
        check_every: compare every so many replays of a bucket with the eager model, which writes the same slots again; 0: never.
        tolerance: of that comparison, relative to the largest number; default by dtype.
        graphs: the device side; default CUDA's.
        state: further tensors that a step changes in place, for instance of recurrent layers. Their addresses are static. Captures and
            comparisons run the model several times and restore them.
        watch: returns a context for the run that is captured. It may raise SideEffect at its end, for a run that a replay cannot repeat.
        draws: does the model draw random numbers? Those of captures are then drawn again later, and so are those that other threads
            draw meanwhile.

    Raises:
        InvalidInput: an argument is out of its range, or is not the name of an argument of the model.
    """

    inner: str | Inner = "inductor"
    one_differs: bool = False
    passes: Sequence[Callable[[fx.GraphModule], Any]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, str) and self.inner not in INNER:
            fail(InvalidInput, "inner", repr(self.inner), f"a function, or one of {', '.join(INNER)}")
        self._inner = INNER[self.inner] if isinstance(self.inner, str) else self.inner
        self.programs: dict[str, Program] = {}
        self.traces: dict[str, int] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._into: Recorded | None = None
        self._specialising = {b.trace for b in self.buckets.all()} if self.one_differs else set()

    def report(self) -> Report:
        """The captured buckets with their graphs, time, memory and pieces."""
        pieces = {trace: len(program.pieces) for trace, program in self.programs.items()}
        return replace(super().report(), compiled={trace: program.compiled for trace, program in self.programs.items()}, parts=pieces)

    def _prepare(self, bucket: Bucket, values: Values) -> None:
        """Trace and compile. Raises NotCapturable for a model with graph breaks, and NoKernel."""
        if self._inner in (INNER["inductor"], INNER["tuned"]):
            start_workers()
        # Dynamo keeps a backend forever, so the backend may not keep the model.
        ours = weakref.proxy(self)
        self._compiled[bucket.trace] = torch.compile(self._traced(bucket), backend=lambda gm, _: ours._backend(bucket, gm), fullgraph=True)
        try:
            self._plain(bucket, values)
        except (ConstraintViolationError, _SizeSpecialises):
            pass  # an error of the second trace must not have the first's in its context, where `find` would take it for the cause
        else:
            return
        # Some size specialises, mostly 1. Such a size gets its own trace at its first call.
        self._specialising.add(bucket.trace)
        self.traces[bucket.trace] = 0
        self._plain(bucket, values)

    def _plain(self, bucket: Bucket, values: Values) -> Any:
        from torch._dynamo.exc import Unsupported, UserError

        began, before = time.perf_counter(), sum(self.traces.values())
        try:
            with tracing():
                out = self._compiled[bucket.trace](self._given(bucket, values))
            if sum(self.traces.values()) != before:
                self._compile_seconds += time.perf_counter() - began
            return out
        except ConstraintViolationError as e:
            if bucket.trace in self._specialising:
                lines = [line.strip() for line in str(e).splitlines()]
                reason = next((line for line in lines if line.startswith("- ")), lines[0])
                raise NotCapturable("the model", f"it takes one size only: {reason.removeprefix('- ')}") from e
            raise
        except Exception as e:
            if (ours := find(e)) is not None and ours is not e:
                raise ours from e
            if isinstance(e, (Unsupported, UserError)):
                if self._into is None:
                    self.model(**self._planned(bucket, values))  # an error of its own comes first
                raise NotCapturable("the model", f"it cannot be traced whole: {str(e).strip().splitlines()[0]}") from e
            raise

    def _record(self, bucket: Bucket, values: Values, into: Recorded) -> Any:
        self._into = into
        try:
            return self._plain(bucket, values)
        finally:
            self._into = None

    def _traced(self, bucket: Bucket) -> Callable[[Values], Any]:
        """The traced function, without int inputs: max_seqlen_q is a constant, or a tensor's length in mixed batches."""
        model, name, make = self.model, self.batch, self.plan_maker(bucket)
        queries = 0 if bucket.kind == "mixed" else bucket.queries

        def step(values: Values) -> Any:
            if name is not None:
                batch = replace(values[name], max_seqlen_q=queries or values[name].slots.shape[0])
                values = {**values, name: batch if make is None else replace(batch, plan=make(batch))}
            return model(**values)

        return step

    def _given(self, bucket: Bucket, values: Values) -> Values:
        """The arguments of the traced function, with the sizes that differ by bucket marked dynamic."""
        served, specialising = self.buckets.of_trace(bucket.trace), bucket.trace in self._specialising
        tokens, requests = {b.tokens for b in served}, {b.requests for b in served}

        def marked(tensor: Tensor, sizes: set[int], more: int = 0) -> Tensor:
            # Marks stay on a tensor object, so every call marks a new one.
            found = tensor.detach()
            # A symbol with one possible value specialises wherever code reads its range, so a single size is not marked.
            several = len(sizes - {1} if specialising else sizes) > 1
            # A size of one with its own trace stays a constant: a symbol would not equal the other sizes of one.
            alone = specialising and tensor.shape[0] == 1 + more
            if several and not alone:
                # One above the largest: otherwise the guard "at least the largest" specialises, and cached code keeps it.
                bounds = {} if specialising else {"min": min(sizes) + more, "max": max(sizes) + 1 + more}
                torch._dynamo.mark_dynamic(found, 0, **bounds)
            return found

        found = values | {n: marked(values[n], tokens) for n in self.tokens} | {n: marked(values[n], requests) for n in self.requests}
        if self.batch is not None:
            b: PagedBatch = values[self.batch]
            found[self.batch] = replace(
                b, page_table=marked(b.page_table, requests), seq_lens=marked(b.seq_lens, requests), slots=marked(b.slots, tokens),
                cu_seqlens_q=marked(b.cu_seqlens_q, requests, 1), positions=marked(b.positions, tokens), max_seqlen_q=0,
            )  # fmt: skip
        return found

    def _backend(self, bucket: Bucket, gm: fx.GraphModule) -> Callable[..., Any]:
        trace, least = bucket.trace, min(b.tokens for b in self.buckets.of_trace(bucket.trace))
        guards = [] if trace in self._specialising else [guard.expr for guard in getattr(shape_env(), "guards", ())]
        if any(len(g.free_symbols) == 1 and g.subs(dict.fromkeys(g.free_symbols, least)) == False for g in guards):  # noqa: E712
            raise _SizeSpecialises
        for change in self.passes:
            change(gm)
        program = self.programs[trace] = compile_parts(split(gm, (self.eager or {}).get(bucket.kind, ())), self._inner)
        self.traces[trace] = self.traces.get(trace, 0) + 1
        ours = weakref.proxy(self)
        return lambda *flat: ours._ran(program, flat)

    def _ran(self, program: Program, flat: tuple[Any, ...]) -> Any:
        results = program.run(flat, self._into)
        if self._into is not None:
            # Dynamo's code after the graph is not captured.
            self._into.end()
        return results


class _SizeSpecialises(AttnopsError):
    """The smallest size of a trace breaks one of its guards. Raised before the trace is compiled."""


@contextmanager
def tracing() -> Iterator[None]:
    """Trace sizes of 1 as symbols and values of tensors as unbacked ones, without a limit of recompilations that other models count to."""
    from torch._dynamo import config as dynamo
    from torch.fx.experimental import _config

    shapes: Any = _config  # torch adds `patch` when the module is loaded

    # The code of a trace is one object for all models of a process, and torch counts its compilations as well, freed ones included.
    traced = dynamo.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, automatic_dynamic_shapes=False,
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16,
    )  # fmt: skip
    with shapes.patch(backed_size_oblivious=True), traced:
        yield


breakable, piecewise = Graphed, Piecewise
