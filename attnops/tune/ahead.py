"""Compiles kernels before they are timed, in worker processes that fill the compilers' caches on disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from attnops.inputs import Call, Pool, build, lengths
from attnops.kernel import Kernel, all_kernels
from attnops.measured import Sizes
from attnops.problem import Target
from attnops.tune.clock import Run
from attnops.tune.pool import side_by_side
from attnops.tune.shapes import Plan, plans_of
from attnops.tune.timing import Stopwatch, runner

COMPILED = ("triton",)
"""Kernels with many small variants that the compiler caches on disk."""

SMALL_BYTES, SMALL_FLOPS = 4e8, 4e11


def compile_ahead(
    grid: str, device: torch.device, ops: Sequence[str] = (), kernels: Sequence[str] = COMPILED, workers: int = 8, limit_s: float = 60.0
) -> float:
    """Compile for every plan of `grid` on `device`. Returns seconds. Variants that fail or come too late compile when they are timed.

    No process starts if none of `kernels` is installed.
    """
    start, target = time.monotonic(), Target.of(device)
    names = tuple(dict.fromkeys(k.name for k in all_kernels() if k.name in kernels and not k.absences(target)))
    if not names:
        return 0.0
    plans = plans_of(grid, ops)
    side_by_side({at: (compile_for, (plans[at::workers], names, device)) for at in range(min(workers, len(plans)))}, workers, limit_s)
    return time.monotonic() - start


def kinds(plan: Plan) -> Iterator[Sizes]:
    """Small sizes that cover the launch variants: one request and many, few and many queries, few and many keys."""
    for queries in plan.queries:
        for batch in dict.fromkeys((plan.batch[0], plan.batch[len(plan.batch) // 2], plan.batch[-1])):
            for ratio in dict.fromkeys((plan.ratio[0], plan.ratio[len(plan.ratio) // 2], plan.ratio[-1])):
                at = Sizes(batch, queries, ratio)
                work = plan.shape.work(at)
                if plan.allows(at) and work.bytes <= SMALL_BYTES and work.flops <= SMALL_FLOPS:
                    yield at


def _no_clock(kernel: Kernel, call: Call, run: Run) -> float:
    return 0.0


def compile_for(plans: Sequence[Plan], names: tuple[str, ...], device: torch.device) -> int:
    """Call each of the kernels at the `kinds` of every plan, ignoring their errors. Returns the number of calls made."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool, stopwatch, made = Pool(device), Stopwatch(_no_clock, names=names), 0
    for plan in plans:
        for at in kinds(plan):
            for kernel, given, _ in stopwatch.candidates(build(plan.shape, *lengths(plan.shape, at), pool)):
                with contextlib.suppress(Exception), torch.no_grad():
                    runner(kernel, given)()
                    made += 1
    return made
