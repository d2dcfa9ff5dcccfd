"""`piecewise`: graphs of a model that is traced whole and compiled in pieces."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..cache.batch import PagedBatch
from ..core.errors import AttnopsError, NotCapturable, find
from ..core.op import not_lowered
from ..core.private_torch import dynamo_config, shapes_config
from .as_it_runs import AsItRuns
from .buckets import Bucket, Buckets
from .cached_guards import shape_env
from .compile_pieces import Inner, Program, compile_parts, compiler_of, eager, start_workers
from .cuda_graphs import Recorded
from .graphed import Graphed
from .options import Options, Shared, Values
from .report import Report
from .split import split

if TYPE_CHECKING:
    from typing_extensions import Unpack


def piecewise(
    model: Callable[..., Any],
    buckets: Buckets,
    *,
    inner: str | Inner = "inductor",
    one_differs: bool = False,
    passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
    **options: Unpack[Shared],
) -> Graphed:
    """Compile `model` once and capture it once a bucket.

    A step is one graph, split only where a kernel may not be captured. Dynamo traces the whole
    model, once for decode steps, once for verify steps of each number of queries, and once for
    mixed steps. The kernel of every call is chosen at the trace, for all of its sizes. Code between
    attention calls is compiled, equal pieces once, with weights as inputs.

    Args:
        model: a module or function. Its arguments and results may be structures.
        buckets: the sizes to capture.
        inner: the compiler of pieces: "inductor"; "tuned", slower to compile, for steps of one row;
            "eager": no compiler; or a function of a module and fake inputs.
        one_differs: trace a bucket of one row by itself, for models that specialise on it, as most
            that broadcast do. Without it the first compilation of such a model is discarded.
        passes: functions that change the traced module in place before the split, for instance
            `attnops.lowering.merge_linears_pass`.
        options: all other arguments of `Graphed`, by name.

    Returns:
        The model in graphs.

    Raises:
        InvalidInput: as `Graphed`, and for an unknown `inner`.
    """
    return Graphed(model, buckets, runner=Traced(inner, one_differs, passes), **options)


class Traced(AsItRuns):
    """Runs pieces of a trace of the whole model. The arguments are those of `piecewise`.

    programs: what was compiled, by trace.
    traces: how many times Dynamo traced the model, by trace.
    """

    def __init__(
        self,
        inner: str | Inner = "inductor",
        one_differs: bool = False,
        passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
    ) -> None:
        self._inner, self._one_differs, self._passes = compiler_of(inner), one_differs, passes
        self.programs: dict[str, Program] = {}
        self.traces: dict[str, int] = {}
        self._compiled: dict[str, Callable[[Values], Any]] = {}
        self._specialising: set[str] = set()
        self._into: Recorded | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    def told(self, report: Report) -> Report:
        compiled = {trace: program.compiled for trace, program in self.programs.items()}
        parts = {trace: len(program.pieces) for trace, program in self.programs.items()}
        return replace(report, compiled=compiled, parts=parts)

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Trace and compile.

        Raises NotCapturable for a model with graph breaks, and NoKernel.
        """
        start_workers(self._inner)
        trace = bucket.trace
        least = min(b.tokens for b in options.buckets.of_trace(trace))
        # Dynamo keeps a backend forever, so the backend may not keep the model.
        ours, kept_out = weakref.proxy(self), options.kept_out(bucket)
        self._compiled[trace] = torch.compile(
            _step_of(options, bucket),
            backend=lambda gm, _: ours._backend(trace, least, kept_out, gm),
            fullgraph=True,
        )
        try:
            self.run(options, bucket, values)
        except (ConstraintViolationError, _SizeSpecialises):
            # An error of the second trace must not have this one in its context, where `find`
            # would take it for the cause.
            pass
        else:
            return
        # Some size specialises, mostly 1. Such a size gets its own trace at its first call.
        self._specialising.add(trace)
        self.traces[trace] = 0
        self.run(options, bucket, values)

    def prepared(self, bucket: Bucket) -> bool:
        return bucket.trace in self.traces

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        from ..core.private_torch import Unsupported, UserError

        began, before = time.perf_counter(), sum(self.traces.values())
        try:
            with tracing(self._inner):
                out = self._compiled[bucket.trace](self._marked(options, bucket, values))
        except ConstraintViolationError as e:
            if not self._specialises(bucket.trace):
                raise
            lines = [line.strip() for line in str(e).splitlines()]
            reason = next((line for line in lines if line.startswith("- ")), lines[0])
            why = f"it takes one size only: {reason.removeprefix('- ')}"
            raise NotCapturable("the model", why) from e
        except Exception as e:
            if (ours := find(e)) is not None and ours is not e:
                raise ours from e
            if not isinstance(e, (Unsupported, UserError)):
                raise
            if self._into is None:  # an error of the model's own comes first
                options.model(**options.planned(bucket, values))
            why = f"it cannot be traced whole: {str(e).strip().splitlines()[0]}"
            raise NotCapturable("the model", why) from e
        if sum(self.traces.values()) != before:
            self._seconds += time.perf_counter() - began
        return out

    def record(self, options: Options, bucket: Bucket, values: Values, into: Recorded) -> Any:
        self._into = into
        try:
            return self.run(options, bucket, values)
        finally:
            self._into = None

    def _specialises(self, trace: str) -> bool:
        return self._one_differs or trace in self._specialising

    def _marked(self, options: Options, bucket: Bucket, values: Values) -> Values:
        """The arguments of the traced function, with sizes that differ by bucket marked dynamic."""
        from ..core.private_torch import mark_dynamic

        served = options.buckets.of_trace(bucket.trace)
        specialises = self._specialises(bucket.trace)
        tokens, requests = {b.tokens for b in served}, {b.requests for b in served}

        def mark(tensor: Tensor, sizes: set[int], more: int = 0) -> Tensor:
            # Marks stay on a tensor object, so every call marks a new one.
            new = tensor.detach()
            # A symbol with one possible value specialises wherever code reads its range, so a
            # single size is not marked.
            single = len(sizes - {1} if specialises else sizes) < 2
            # A size of one with its own trace stays a constant: a symbol would not equal the other
            # sizes of one.
            if single or (specialises and tensor.shape[0] == 1 + more):
                return new
            # One above the largest: otherwise the guard "at least the largest" specialises, and
            # cached code keeps it.
            bounds = {"min": min(sizes) + more, "max": max(sizes) + 1 + more}
            mark_dynamic(new, 0, **({} if specialises else bounds))
            return new

        marked = values | {n: mark(values[n], tokens) for n in options.tokens}
        marked |= {n: mark(values[n], requests) for n in options.requests}

        def table(b: PagedBatch) -> PagedBatch:
            return replace(
                b,
                page_table=mark(b.page_table, requests),
                seq_lens=mark(b.seq_lens, requests),
                slots=mark(b.slots, tokens),
                cu_seqlens_q=mark(b.cu_seqlens_q, requests, 1),
                positions=mark(b.positions, tokens),
                max_seqlen_q=0,
                others=tuple(map(table, b.others)),
            )

        if options.batch is not None:
            batch = table(values[options.batch])
            if (shared := batch.shared) is not None:
                rest_table, rest_lens = (
                    mark(t, requests) for t in (shared.rest_table, shared.rest_lens)
                )
                shared = replace(shared, rest_table=rest_table, rest_lens=rest_lens)
            marked[options.batch] = replace(batch, shared=shared)
        return marked

    def _backend(
        self, trace: str, least: int, kept_out: Sequence[str], gm: fx.GraphModule
    ) -> Callable[..., Any]:
        """Compile a trace, whose smallest bucket has `least` tokens."""
        if not self._specialises(trace) and _refuses(least):
            raise _SizeSpecialises
        for change in self._passes:
            change(gm)
        program = self.programs[trace] = compile_parts(split(gm, kept_out), self._inner)
        self.traces[trace] = self.traces.get(trace, 0) + 1
        ours = weakref.proxy(self)
        return lambda *flat: ours._ran(program, flat)

    def _ran(self, program: Program, flat: tuple[Any, ...]) -> Any:
        results = program.run(flat, self._into)
        if self._into is not None:
            # Dynamo's code after the graph is not captured.
            self._into.end()
        return results


def _step_of(options: Options, bucket: Bucket) -> Callable[[Values], Any]:
    """The function to trace, without int inputs.

    max_seqlen_q is a constant, or a tensor's length in mixed batches.
    """
    model, name, make = options.model, options.batch, options.plan_maker(bucket)
    queries = 0 if bucket.kind == "mixed" else bucket.queries

    def step(values: Values) -> Any:
        if name is not None:
            batch = values[name]
            most = queries or batch.slots.shape[0]
            others = tuple([replace(other, max_seqlen_q=most) for other in batch.others])
            batch = replace(batch, max_seqlen_q=most, others=others)
            batch = batch if make is None else replace(batch, plan=make(batch))
            values = {**values, name: batch}
        return model(**values)

    return step


class _SizeSpecialises(AttnopsError):
    """The smallest size of a trace breaks a guard. Raised before the trace is compiled."""


def _refuses(size: int) -> bool:
    """Does a guard of the current trace, which has one symbol, refuse this size?"""
    for guard in getattr(shape_env(), "guards", ()):
        symbols = guard.expr.free_symbols
        if len(symbols) == 1 and guard.expr.subs(dict.fromkeys(symbols, size)) == False:  # noqa: E712
            return True
    return False


@contextmanager
def tracing(inner: Inner) -> Iterator[None]:
    """Trace sizes of 1 as symbols and values of tensors as unbacked ones.

    There is no limit of recompilations, which other models count to. inner: the compiler of the
    pieces.
    """
    # The code of a trace is one object for all models of a process, and torch counts its
    # compilations as well, freed ones included.
    traced = dynamo_config().patch(
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        automatic_dynamic_shapes=False,
        recompile_limit=1 << 16,
        accumulated_recompile_limit=1 << 16,
    )
    lowered = not_lowered() if inner is eager else nullcontext()
    with shapes_config().patch(backed_size_oblivious=True), traced, lowered:
        yield
