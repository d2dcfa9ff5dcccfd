"""`measure`: times every kernel that can run over a grid of calls, after `compile_ahead`, and makes
a table of the times."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from attnops.core.errors import one_line
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.private_torch import dynamo_config, inductor_config, shapes_config
from attnops.core.problem import Target
from attnops.measured import Grid, Sizes, Table, cpu_name, work
from attnops.measured.digests import digests
from attnops.measured.table import version_of
from attnops.ops import OPS
from attnops.ops.sweeps import LARGEST_BYTES, Sweep
from attnops.testing.calls import Call, equip_as_used, planned
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import call_of, with_copies
from attnops.tune.clock import Clock, Run, host_clock, seconds
from attnops.tune.grids import sweeps_of
from attnops.tune.sweep_times import SweepTimes, Timing
from attnops.version import VERSION

T = TypeVar("T")
SLOW_FIRST_CALL_S = 0.5  # a first call that takes longer has compiled
COMPILED = ("triton", "aten")  # kernels with many small variants that the compiler caches on disk
SMALL_BYTES, SMALL_FLOPS = 4e8, 4e11
# Seconds that every kind of call gets, and the limit in budgets of all timing and compilation
# together
LEAST_S, HARD = 5.0, 1.2
# The share of a kind's points that must be timed: fewer, the smallest ones, say too little about
# large calls
ENOUGH = 0.5


def runner(kernel: Kernel, call: Call, backend: str = "inductor") -> Run:
    """A function that runs `kernel` on `call`: compiled, as in users' graphs, if the kernel is
    lowered in place, whole or around a call.

    backend: of torch.compile, for a kernel that is lowered in place as a whole.
    """
    if kernel.fused:
        from attnops.core.private_torch import mark_static

        mark_static(call.args[0], -1)  # as a model's code knows the width of a norm
        statics = tuple(
            (name, value)
            for name, value in call.arguments.items()
            if not isinstance(value, torch.Tensor)
        )
        return functools.partial(_fused(kernel.op, kernel.name, statics, backend), call.tensors())
    if kernel.core is None:
        return functools.partial(kernel.run, call.record)
    # Decode and extend are separate graphs in users' code. Here the bound would become symbolic,
    # which kernels refuse.
    bounds = tuple(
        (n, str(call.kwargs[n]))
        for n in call.spec.roles.get("most_queries", ())
        if n in call.kwargs
    )
    kwargs = {n: value for n, value in call.kwargs.items() if n not in dict(bounds)}
    compiled = _compiled(call.op, bounds, call.spec.output if call.spec.output in kwargs else "")
    return functools.partial(compiled, call.args, kwargs, f"kernel={kernel.op}:{kernel.name}")


@functools.cache
def _compiled(op: str, bounds: tuple[tuple[str, str], ...], output: str) -> Callable[..., Any]:
    packet = OPS[op].packet.default

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], policy: str) -> Any:
        # With dynamic shapes, Dynamo specialises on a string, but not on an int from outside.
        given = {**kwargs, **{name: int(bound) for name, bound in bounds}}
        if output:  # the graph allocates it, and the foreign call writes it without a copy
            given[output] = torch.empty_like(given[output])
        result = packet(*args, **given, policy=policy)
        return given[output] if output else result

    return torch.compile(run, fullgraph=True, dynamic=True)


@functools.cache
def _fused(
    op: str, name: str, statics: tuple[tuple[str, Any], ...], backend: str
) -> Callable[..., Any]:
    kernel, record, written = kernels_of(op)[name], OPS[op].call, OPS[op].spec.output

    def run(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        output = torch.empty_like(tensors[written])
        kernel.run(record(**{**tensors, **dict(statics), written: output}))
        return output

    return torch.compile(run, fullgraph=True, dynamic=True, backend=backend)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Equal sizes stay separate symbols, so that one compilation of a kind serves most of its
    sizes."""
    limits = dynamo_config().patch(recompile_limit=256)
    with limits, shapes_config().patch(use_duck_shape=False):
        yield


@dataclass
class Stopwatch:
    """Times kernels, and limits the time of first calls.

    A kernel compiles once for each `kind` of call, which the caller names. After slow first calls
    of `first_calls_s` in all, a kernel stops at kinds whose last two first calls were slow. It
    starts on another kind only if at least half of its kinds started fast (as prebuilt kernels do),
    and never after three times that long: flex_attention would compile for hours.

    names: kernels to time; () is all. equip: adds plans and workspaces to a call. starting_s:
    seconds of all first calls. first_s: those of each kernel and kind that may give up. unplanned:
    errors of plans by kernel.
    """

    clock: Clock = host_clock
    first_calls_s: float = 20.0
    names: tuple[str, ...] = ()
    equip: Callable[[Kernel, Call], Call] = equip_as_used
    starting_s: float = 0.0
    first_s: dict[str, dict[Hashable, list[float]]] = field(default_factory=dict)
    unplanned: dict[str, str] = field(default_factory=dict)

    def candidates(self, call: Call) -> list[tuple[Kernel, Call, float | None]]:
        """The kernels that can answer `call`, each with the call as layers make it, and the
        microseconds of a plan made on the host."""
        out: list[tuple[Kernel, Call, float | None]] = []
        for kernel in kernels_of(call.op).values():
            # The cost of plain torch lowered in place depends on the fusions of Inductor, except
            # for ops that hold all that fuses.
            left = kernel.judge if OPS[call.op].spec.weights else kernel.fused
            if left or (self.names and kernel.name not in self.names):
                continue
            reasons = {r.field for r in kernel.refusals(call.problem)}
            try:
                found = self._equipped(kernel, call, reasons)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a plan may raise any error: the kernel is no candidate
                self.unplanned[kernel.name] = one_line(error)
            else:
                if found is not None:
                    out.append((kernel, *found))
        return out

    def _equipped(
        self, kernel: Kernel, call: Call, reasons: set[str]
    ) -> tuple[Call, float | None] | None:
        """The call as layers make it, and the microseconds of a plan made on the host. None: the
        kernel cannot answer it. reasons: fields of `call` that the kernel refuses."""
        if not reasons:
            return call if kernel.plan.device is None else self.equip(kernel, call), None
        if not reasons <= {"plan", "workspace"}:
            return None
        given = self.equip(kernel, call)
        if kernel.refusals(given.problem):
            return None
        if call.problem.step.plan != "none" or given.problem.step.plan != "host":
            return given, None
        start = time.perf_counter()  # once more, in the buffers that there are now
        planned(kernel, call, buffers=(given.arguments["plan"], given.arguments["workspace"]))
        return given, (time.perf_counter() - start) * 1e6

    def time(
        self, kernel: Kernel, call: Call, kind: Hashable, copies: Sequence[Call] = ()
    ) -> Timing:
        """Time `kernel` on `call`. An error of the kernel becomes the Timing's reason. copies: run
        after `call`, and counted with it."""
        if self._given_up(kernel.name, kind):
            return Timing(
                None, f"its first calls took over {self.first_calls_s:g} s", given_up=True
            )
        runs = [runner(kernel, one) for one in (call, *copies)]
        run = runs[0] if len(runs) == 1 else lambda: [one() for one in runs]
        try:
            with torch.no_grad(), tracing():
                self.starting_s += (first_s := seconds(run))
                if kernel.inline is None:
                    self.first_s.setdefault(kernel.name, {}).setdefault(kind, []).append(first_s)
                return Timing(self.clock(kernel, call, run) / len(runs))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Timing(None, "out of memory")
        except (
            Exception
        ) as error:  # a foreign kernel may raise any error: the other kernels are timed
            return Timing(None, one_line(error), broken=True)

    def slow_s(self, name: str) -> float:
        """Seconds of the kernel's slow first calls."""
        return sum(
            s
            for taken in self.first_s.get(name, {}).values()
            for s in taken
            if s > SLOW_FIRST_CALL_S
        )

    def _given_up(self, name: str, kind: Hashable) -> bool:
        if (spent := self.slow_s(name)) <= self.first_calls_s:
            return False
        if last := (kinds := self.first_s[name]).get(kind, [])[-2:]:
            return len(last) == 2 and min(last) > SLOW_FIRST_CALL_S
        return (
            2 * sum(taken[0] > SLOW_FIRST_CALL_S for taken in kinds.values()) >= len(kinds)
            or spent > 3 * self.first_calls_s
        )


def compile_ahead(
    grid: str,
    device: torch.device,
    ops: Sequence[str],
    kernels: Sequence[str],
    workers: int,
    limit_s: float,
) -> int:
    """Compile the `kernels` that are installed for every sweep of `grid`. Returns the number of
    calls made; others compile later."""
    names = tuple(
        dict.fromkeys(
            k.name for k in all_kernels() if k.name in kernels and not k.absences(Target.of(device))
        )
    )
    sweeps = sweeps_of(grid, ops) if names else ()
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    jobs = [
        pool.submit(compile_for, sweeps[at::workers], names, device)
        for at in range(min(workers, len(sweeps)))
    ]
    return sum(job.result() for job in done_within(limit_s, pool, jobs) if job.exception() is None)


def done_within(
    limit_s: float, pool: ProcessPoolExecutor, jobs: Sequence[Future[T]]
) -> set[Future[T]]:
    """Those of a pool's `jobs` that ended within `limit_s` seconds. The pool is shut down;
    processes that still run are killed."""
    done, late = wait(jobs, timeout=limit_s)
    running = list((getattr(pool, "_processes", None) or {}).values()) if late else []
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in running:  # a compiler that still runs would disturb the clock
        process.kill()
    return done


def kinds(sweep: Sweep) -> Iterator[Sizes]:
    """Small sizes that cover the launch variants: one request and many, few and many queries, few
    and many keys; all rows of a linear."""
    if OPS[sweep.kind.op].spec.weights:
        yield from filter(sweep.allows, sweep.points())
        return
    batches, ratios = (
        dict.fromkeys((axis[0], axis[len(axis) // 2], axis[-1]))
        for axis in (sweep.batch, sweep.ratio)
    )
    for at in (
        Sizes(batch, queries, ratio)
        for queries in sweep.queries
        for batch in batches
        for ratio in ratios
    ):
        done = work(sweep.kind, at)
        if sweep.allows(at) and done.bytes <= SMALL_BYTES and done.flops <= SMALL_FLOPS:
            yield at


def compile_for(sweeps: Sequence[Sweep], names: tuple[str, ...], device: torch.device) -> int:
    """Call each of the kernels at the `kinds` of every sweep, ignoring their errors. Returns the
    number of calls made."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        inductor_config().compile_threads = 1  # this process is one of many
    pool, stopwatch, made = Pool(device), Stopwatch(names=names), 0
    for kind, at in ((sweep.kind, at) for sweep in sweeps for at in kinds(sweep)):
        for kernel, given, _ in stopwatch.candidates(call_of(kind, at, pool)):
            with contextlib.suppress(Exception), torch.no_grad(), tracing():
                runner(kernel, given)()
                made += 1
    return made


@dataclass
class Report:
    """Counts. late: points left out for lack of time or memory. broken: by kernel that raised, the
    error."""

    points: int = 0
    timings: int = 0
    seconds: float = 0.0
    late: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    def add(self, kernel: str, at: Sizes, timing: Timing) -> None:
        """Count a timing of a kernel, named with its op."""
        self.timings += timing.us is not None
        if timing.broken:
            size = f"(batch {int(at.batch)}, queries {int(at.queries)}, ratio {at.ratio:g})"
            self.broken[kernel] = f"{timing.reason} {size}"


def measure(
    sweeps: Sequence[Sweep],
    stopwatch: Stopwatch,
    device: torch.device,
    budget_s: float = 150.0,
    progress: Callable[[str], object] = lambda text: None,
    keep: Callable[[Table], object] = lambda table: None,
) -> tuple[Table, Report]:
    """Time every kernel of `stopwatch` that can run, at every size of every sweep, smaller sizes
    first.

    Each kind gets its share of the rest of `budget_s` by its number of points, LEAST_S or more,
    first calls not counted; with them all kinds together take at most HARD budgets. A late point
    has no time, and a table scales the time of its smaller neighbour. A kind is left out if fewer
    than ENOUGH of its points were timed, or if one kernel alone answers it. progress: called with a
    line before every point. keep: called with the table so far after every kind.
    """
    start, report, pool, grids = time.monotonic(), Report(), Pool(device), list[Grid]()
    began, total, done = _timed_s(stopwatch), sum(p.allowed for p in sweeps), 0
    if device.type == "cuda" and sweeps:
        with contextlib.suppress(torch.OutOfMemoryError):  # the pool then grows as far as it can
            pool.reserve(torch.bfloat16, int(LARGEST_BYTES * 1.1 / 2))

    def table() -> Table:
        report.seconds = round(time.monotonic() - start, 1)
        launch = getattr(stopwatch.clock, "launch_us", None)
        made: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "attnops": VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        made |= {"seconds": report.seconds, "timings": report.timings} | (
            {} if launch is None else {"launch_us": round(launch, 2)}
        )
        timed = {f"{g.kind.op}.{name}": kernels_of(g.kind.op)[name] for g in grids for name in g.us}
        versions = {name: version_of(kernel) for name, kernel in timed.items()}
        made |= {"code": digests(timed.values())}
        return Table(
            gpu_name(device),
            str(Target.of(device)),
            dict(sorted(versions.items())),
            tuple(grids),
            made,
        )

    for sweep in sweeps:
        rest = budget_s - (_timed_s(stopwatch) - began)
        share = min(max(rest * 1.5 * sweep.allowed / max(total - done, 1), LEAST_S), rest)

        def step(within: int, sweep: Sweep = sweep, before: int = done) -> None:
            progress(f"{sweep.kind.op}: {before + within} of {total} sizes")

        grid, cut = _measure(sweep, stopwatch, pool, (share, start + HARD * budget_s), report, step)
        if len(grid.us) > 1 and cut <= (1 - ENOUGH) * sweep.allowed:
            grids.append(grid)
            keep(table())
        done += sweep.allowed
    report.broken |= {f"plan of {name}": why for name, why in stopwatch.unplanned.items()}
    return table(), report


def _timed_s(stopwatch: Stopwatch) -> float:
    """A clock that stops during first calls: compilation must not cost a kind its other points."""
    return time.monotonic() - stopwatch.starting_s


def _measure(
    sweep: Sweep,
    stopwatch: Stopwatch,
    pool: Pool,
    limits: tuple[float, float],
    report: Report,
    step: Callable[[int], None],
) -> tuple[Grid, int]:
    """The grid of a sweep, and the number of its late points. limits: seconds without first calls,
    and the end of the whole measurement."""
    rows, cut, (share_s, end), start = SweepTimes(sweep), 0, limits, _timed_s(stopwatch)
    allowed = [(index, at) for index, at in enumerate(sweep.points()) if sweep.allows(at)]
    for done, (index, at) in enumerate(allowed, 1):
        step(done)
        if _timed_s(stopwatch) - start > share_s or time.monotonic() > end:
            cut += 1
            continue
        try:
            call = call_of(sweep.kind, at, pool)
            candidates, copies = stopwatch.candidates(call), with_copies(call, pool)[1:]
        except torch.OutOfMemoryError:
            pool.drop()
            report.late += 1
            continue
        if len(candidates) < 2:
            continue
        report.points += 1
        for kernel, given, plan_us in candidates:
            if rows.wants(kernel.name, index):
                timing = stopwatch.time(kernel, given, sweep.kind, copies)
                rows.add(kernel.name, index, timing, plan_us)
                report.add(f"{sweep.kind.op}.{kernel.name}", at, timing)
    report.late += cut
    return rows.grid(), cut


def gpu_name(device: torch.device) -> str:
    """The name of a device in tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
