"""`piecewise` and `breakable`: two ways to the same graphs, around the same calls."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..cache.batch import PagedBatch
from ..cache.paged import Pages
from ..errors import AttnopsError, InvalidInput, NotCapturable
from . import breaks
from .buckets import Bucket, Buckets, Kind
from .device import Device
from .graphed import Graphed, Options
from .inputs import Roles, Values
from .pieces import INNER, Inner, Program, Recorded, compile_parts, start_workers
from .split import Split, split

Prepare = Callable[[PagedBatch], PagedBatch]
Planning = Callable[[Bucket], Callable[[PagedBatch], Tensor] | None]


def piecewise(
    model: Callable[..., Any],
    buckets: Buckets,
    *,
    batch: str | None = "batch",
    tokens: Sequence[str],
    requests: Sequence[str] = (),
    returns: Literal["tokens", "requests", "whole"] = "tokens",
    cache: Pages | None = None,
    prepare: Prepare | None = None,
    eager: Mapping[Kind, Sequence[str]] | None = None,
    inner: str | Inner = "inductor",
    one_differs: bool = False,
    passes: Sequence[Callable[[fx.GraphModule], Any]] = (),
    budget_bytes: int | None = None,
    over_budget: Literal["raise", "drop"] = "raise",
    check_every: int = 0,
    tolerance: float | None = None,
    graphs: Device | None = None,
    state: Sequence[Tensor] = (),
) -> Graphed:
    """`model` compiled once and captured once a bucket. One graph a step, ended only where a kernel may not be captured.

    The model is traced whole, once for decode steps, once for verify steps of so many queries, and once for all others. The kernel of
    every call is chosen then, for all sizes of the trace, and forced. What lies between calls of attention is compiled, pieces that do
    the same once; weights are their inputs.

    Args:
        model: a module or function. Its arguments and results may be structures.
        buckets: the sizes to capture.
        batch: the name of the argument that is the PagedBatch. None: the model takes none, and rows of a bucket that a call does not fill
            are zeros, which must not matter to the others, as under causal attention they do not. A call of as many tokens as requests
            is then a decode step, where `buckets` has any; and so is every call of a model with no argument by token.
        tokens, requests: names of the arguments that have a row for every new token, or request. They are copied at every call. All other
            arguments have to be the same at every call, e.g. a cache's pages.
        returns: what the first dim of results counts; rows of nobody are cut off of all tensors that are as long as the bucket. "whole":
            nothing is.
        cache: the cache that the model's batches come from. Its pages may then not move, and captured page tables are as wide as its own.
        prepare: what makes the metadata that is made outside of graphs, e.g. a Planner: it is called once a step with the batch as padded.
            Without it, the plan that `cache` would bring is made in the graph, once a step.
        eager: names of ops, by kind of batch, that shall run between graphs though their kernel may be captured.
        inner: what compiles a piece: "inductor"; "tuned", which takes longer and is for steps of one row; "eager" for not at all; or a
            function of a module and fake inputs.
        one_differs: the model is known to tell one row from several, as most do that broadcast. A bucket of one is then traced by itself
            from the start; to find it out costs a compilation that is thrown away.
        passes: functions that change the traced module in place before it is cut, e.g. `attnops.lowering.fuse_linears`.
        budget_bytes: what all graphs may take, measured before each capture. over_budget: "raise" OverBudget, or "drop" the bucket.
        check_every: compare every so many replays of a bucket with the model called plainly, which writes the same slots again; 0: none.
        tolerance: of that comparison, relative to the largest number; default by dtype.
        graphs: the device's side; default CUDA's.
        state: tensors that a step changes in place beside the cache's pages, e.g. those of recurrent layers. They may not move; a capture,
            which runs the model some times on rows of nobody, leaves them as they were, and a comparison with eager as after one step.

    Raises:
        InvalidInput: an argument is out of its range, or names no argument of the model.
    """
    roles = Roles(batch, tuple(tokens), tuple(requests))
    if isinstance(inner, str) and inner not in INNER:
        raise InvalidInput("inner", repr(inner), f"a function, or one of {', '.join(INNER)}")
    method = Compiled(
        model, roles, buckets, INNER[inner] if isinstance(inner, str) else inner, _by_kind(eager), tuple(passes), one_differs,
        planning=_planning(cache, prepare),
    )  # fmt: skip
    options = Options(returns, budget_bytes, over_budget, check_every, tolerance)
    return Graphed(model, method, roles, buckets, options, cache=cache, prepare=prepare, device=graphs, state=state)


def breakable(
    model: Callable[..., Any],
    buckets: Buckets,
    *,
    batch: str | None = "batch",
    tokens: Sequence[str],
    requests: Sequence[str] = (),
    returns: Literal["tokens", "requests", "whole"] = "tokens",
    cache: Pages | None = None,
    prepare: Prepare | None = None,
    eager: Mapping[Kind, Sequence[str]] | None = None,
    budget_bytes: int | None = None,
    over_budget: Literal["raise", "drop"] = "raise",
    check_every: int = 0,
    tolerance: float | None = None,
    graphs: Device | None = None,
    state: Sequence[Tensor] = (),
) -> Graphed:
    """`model` captured as it runs, with no compiler: capture stops at every call that may not be captured, and goes on after it.

    Kernels are chosen for every bucket by itself. Python runs at capture and not at a replay, so control flow may not depend on data;
    functions where it does are marked with `outside`. The arguments are those of `piecewise`.
    """
    roles = Roles(batch, tuple(tokens), tuple(requests))
    options = Options(returns, budget_bytes, over_budget, check_every, tolerance)
    method = Broken(model, roles, _by_kind(eager), _planning(cache, prepare))
    return Graphed(model, method, roles, buckets, options, cache=cache, prepare=prepare, device=graphs, state=state)


def _by_kind(eager: Mapping[Kind, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    found = {str(k): tuple(v) for k, v in (eager or {}).items()}
    if unknown := found.keys() - {"decode", "verify", "mixed"}:
        raise InvalidInput("eager", sorted(unknown), "'decode', 'verify' and 'mixed' as keys")
    return found


def _planning(cache: Pages | None, prepare: Prepare | None) -> Planning:
    """The plan that a cache's batches bring is of their own lengths; a graph makes that of the lengths it is replayed with."""

    def of(bucket: Bucket) -> Callable[[PagedBatch], Tensor] | None:
        if cache is None or prepare is not None or bucket.kind == "mixed":
            return None
        return cache.plan_maker(bucket.tokens, bucket.requests, bucket.queries)

    return of


@dataclass
class Broken:
    """Capture by `breakable`. eager: by kind. planning: what makes the device plan of a bucket's step, in its graph."""

    model: Callable[..., Any]
    roles: Roles
    eager: Mapping[str, tuple[str, ...]]
    planning: Planning
    compile_seconds: float = 0.0

    def prepare(self, bucket: Bucket, values: Values) -> None:
        """What starts once is started."""
        self.plain(bucket, values)

    def plain(self, bucket: Bucket, values: Values) -> Any:
        """The model."""
        name, make = self.roles.batch, self.planning(bucket)
        if name is None or make is None:
            return self.model(**values)
        return self.model(**{**values, name: replace(values[name], plan=make(values[name]))})

    def record(self, bucket: Bucket, values: Values, device: Device, into: Recorded) -> Any:
        """See `attnops.graphs.breaks`."""
        return breaks.record(lambda: self.plain(bucket, values), device, into, self.eager.get(bucket.kind, ()))

    def pieces(self) -> dict[str, tuple[int, int]]:
        """None: nothing is compiled."""
        return {}


@dataclass
class Compiled:
    """Capture by `piecewise`. programs: by trace, the last one; traces: how often, which is once unless a size of its own was met."""

    model: Callable[..., Any]
    roles: Roles
    buckets: Buckets
    inner: Inner
    eager: Mapping[str, tuple[str, ...]]
    passes: tuple[Callable[[fx.GraphModule], Any], ...] = ()
    one_differs: bool = False
    planning: Planning = lambda bucket: None
    compile_seconds: float = 0.0
    programs: dict[str, Program] = field(default_factory=dict)
    traces: dict[str, int] = field(default_factory=dict)
    _compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _into: tuple[Device, Recorded] | None = None

    def __post_init__(self) -> None:
        self._open: set[str] = {b.trace for b in self.buckets.all()} if self.one_differs else set()

    def splits(self) -> dict[str, Split]:
        """By trace: where the model was cut."""
        return {trace: program.split for trace, program in self.programs.items()}

    def prepare(self, bucket: Bucket, values: Values) -> None:
        """Trace and compile. Raises NotCapturable: the model cannot be traced whole. NoKernel."""
        if self.inner in (INNER["inductor"], INNER["tuned"]):
            start_workers()
        # Dynamo keeps a backend as long as the code it compiled, which is forever: it may not keep the model.
        ours: weakref.ref[Compiled] = weakref.ref(self)
        run = torch.compile(self._traced(bucket), backend=lambda gm, _: _alive(ours)._backend(bucket, gm), fullgraph=True)
        self._compiled[bucket.trace] = run
        try:
            self.plain(bucket, values)
        except (ConstraintViolationError, _SizeToldApart):
            # The model tells some size from the others, mostly 1: then such a size is traced by itself when it is met.
            self._open.add(bucket.trace)
            self.traces[bucket.trace] = 0
            self.plain(bucket, values)

    def plain(self, bucket: Bucket, values: Values) -> Any:
        """The compiled pieces and what lies between them."""
        from torch._dynamo.exc import Unsupported, UserError

        began, before = time.perf_counter(), sum(self.traces.values())
        try:
            with _tracing():
                out = self._compiled[bucket.trace](*self._given(bucket, values))
            if sum(self.traces.values()) != before:
                self.compile_seconds += time.perf_counter() - began
            return out
        except ConstraintViolationError as e:
            if bucket.trace in self._open:
                lines = [line.strip() for line in str(e).splitlines()]
                told = next((line for line in lines if line.startswith("- ")), lines[0])
                raise NotCapturable("the model", f"it takes one size only: {told.removeprefix('- ')}") from e
            raise
        except Exception as e:
            if (ours := _ours(e)) is not None and ours is not e:
                raise ours from e
            if isinstance(e, (Unsupported, UserError)):
                raise NotCapturable("the model", f"it cannot be traced whole: {str(e).strip().splitlines()[0]}") from e
            raise

    def record(self, bucket: Bucket, values: Values, device: Device, into: Recorded) -> Any:
        """The pieces into graphs."""
        self._into = device, into
        try:
            return self.plain(bucket, values)
        finally:
            self._into = None

    def pieces(self) -> dict[str, tuple[int, int]]:
        """How many differ, and how many there are."""
        return {trace: (p.compiled, len(p.pieces)) for trace, p in self.programs.items()}

    def _traced(self, bucket: Bucket) -> Callable[..., Any]:
        """What is compiled. The most queries of a request are a constant, or a tensor's length in mixed batches: no int is an input."""
        model, name, queries = self.model, self.roles.batch, 0 if bucket.kind == "mixed" else bucket.queries
        make = self.planning(bucket)

        def step(values: Values, tables: tuple[Any, ...], padded: bool, holes: bool, prefix: Any) -> Any:
            if name is not None:
                page_table, seq_lens, cu_seqlens_q, slots, positions, plan, workspace = tables
                longest = queries or slots.shape[0]
                whole = PagedBatch(page_table, seq_lens, cu_seqlens_q, slots, positions, longest, padded, holes, plan, workspace, prefix)
                if make is not None:
                    whole = replace(whole, plan=make(whole))
                values = {**values, name: whole}
            return model(**values)

        return step

    def _given(self, bucket: Bucket, values: Values) -> tuple[Any, ...]:
        """The values, with the sizes that differ by bucket marked."""
        alike, told_apart = self.buckets.alike(bucket.trace), bucket.trace in self._open
        tokens, requests = {b.tokens for b in alike}, {b.requests for b in alike}

        def marked(tensor: Tensor, sizes: set[int], more: int = 0) -> Tensor:
            # Marks are on an object, and one that was marked otherwise before would keep them.
            found = tensor.detach()
            # Of one size only nothing is dynamic: code that looks at the range of a symbol that can only be 2 takes it for a constant.
            several = len(sizes - {1} if told_apart else sizes) > 1
            # A size that is told apart is one to the compiler too, where others that are equal to it would stay symbols beside it.
            alone = told_apart and tensor.shape[0] == 1 + more
            if several and not alone:
                # One more than the largest: else "at least the largest" is a guard on a single size, and what is cached is bound to it.
                bounds = {} if told_apart else {"min": min(sizes) + more, "max": max(sizes) + 1 + more}
                torch._dynamo.mark_dynamic(found, 0, **bounds)
            return found

        rest = {n: v for n, v in values.items() if n != self.roles.batch}
        rest |= {n: marked(rest[n], tokens) for n in self.roles.tokens} | {n: marked(rest[n], requests) for n in self.roles.requests}
        tables: tuple[Any, ...] = ()
        padded, holes, prefix = True, True, None
        if self.roles.batch is not None:
            b: PagedBatch = values[self.roles.batch]
            tables = (
                marked(b.page_table, requests), marked(b.seq_lens, requests), marked(b.cu_seqlens_q, requests, 1),
                marked(b.slots, tokens), marked(b.positions, tokens), b.plan, b.workspace,
            )  # fmt: skip
            padded, holes, prefix = b.padded, b.holes, b.prefix
        return rest, tables, padded, holes, prefix

    def _backend(self, bucket: Bucket, gm: fx.GraphModule) -> Callable[..., Any]:
        trace = bucket.trace
        if trace not in self._open and (told := _outside_of(min(b.tokens for b in self.buckets.alike(trace)))):
            raise _SizeToldApart(told)
        for change in self.passes:
            change(gm)
        program = compile_parts(split(gm, self.eager.get(bucket.kind, ())), self.inner)
        self.programs[trace] = program
        self.traces[trace] = self.traces.get(trace, 0) + 1

        ours: weakref.ref[Compiled] = weakref.ref(self)

        def call(*flat: Any) -> Any:
            if (into := _alive(ours)._into) is None:
                return program.run(flat)
            return program.record(flat, *into)

        return call


def _alive(found: weakref.ref[Compiled]) -> Compiled:
    """What a call of it keeps alive while it runs."""
    compiled = found()
    assert compiled is not None
    return compiled


class _SizeToldApart(Exception):
    """The model tells the smallest size of a trace from others: known before anything of it is compiled."""


def _outside_of(least: int) -> str:
    """A guard of the trace at hand that a size of `least` would break, or ""."""
    from torch._guards import TracingContext

    found = TracingContext.try_get()
    if found is None or found.fake_mode is None or found.fake_mode.shape_env is None:
        return ""
    for guard in found.fake_mode.shape_env.guards:
        if len(symbols := guard.expr.free_symbols) == 1 and guard.expr.subs(dict.fromkeys(symbols, least)) == False:  # noqa: E712
            return str(guard.expr)
    return ""


def _ours(error: BaseException | None) -> AttnopsError | _SizeToldApart | None:
    """The error of attnops that torch's compiler has wrapped, if there is one."""
    while error is not None and not isinstance(error, (AttnopsError, _SizeToldApart)):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


@contextmanager
def _tracing() -> Iterator[None]:
    """Sizes of 1 are sizes as any other, values of tensors are traced, and steps of other models change nothing for this one."""
    from torch._dynamo import config as dynamo
    from torch.fx.experimental import _config

    # torch adds `patch` when the module is loaded.
    shapes: Any = _config

    traced = dynamo.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, recompile_limit=1 << 16, automatic_dynamic_shapes=False
    )
    with shapes.patch(backed_size_oblivious=True), traced:
        yield
