"""Has kernels that compile at first use compiled beforehand, by processes side by side that share the compilers' caches on disk.

    python -m attnops.tune.ahead DEVICE GRID OPS KERNELS AT OF

is one of them: every OF-th plan of the grid from the AT-th on, its smallest calls of every kind, each kernel called once.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attnops.kernel import Kernel, all_kernels
from attnops.measured import Sizes
from attnops.problem import Target
from attnops.testing import Call
from attnops.tune.calls import Pool, build
from attnops.tune.run import lengths
from attnops.tune.shapes import Plan, plans_of
from attnops.tune.timing import Stopwatch, runner

COMPILED = ("triton",)
"""Kernels whose variants are many, small and kept on disk."""

SMALL_BYTES, SMALL_FLOPS = 4e8, 4e11


def compile_ahead(
    grid: str,
    device: torch.device,
    ops: Sequence[str] = (),
    kernels: Sequence[str] = COMPILED,
    workers: int = 8,
    limit_s: float = 60.0,
) -> float:
    """Compile for every plan of `grid` on `device`; seconds that it took. What fails or comes too late is compiled when it is timed.

    Nothing is started where none of `kernels` is there.
    """
    start, target = time.monotonic(), Target.of(device)
    there = [k.name for k in all_kernels() if k.name in kernels and not k.absences(target)]
    if not there:
        return 0.0
    command = [sys.executable, "-m", "attnops.tune.ahead", str(device), grid, ",".join(ops), ",".join(dict.fromkeys(there))]
    started = [
        subprocess.Popen([*command, str(at), str(workers)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for at in range(workers)
    ]
    for process in started:
        try:
            process.wait(max(start + limit_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return time.monotonic() - start


def kinds(plan: Plan) -> Iterator[Sizes]:
    """Sizes that between them are launched in every way: one request and many, few and many queries, few and many keys."""
    for queries in plan.queries:
        for batch in dict.fromkeys((plan.batch[0], plan.batch[len(plan.batch) // 2], plan.batch[-1])):
            for ratio in dict.fromkeys((plan.ratio[0], plan.ratio[len(plan.ratio) // 2], plan.ratio[-1])):
                at = Sizes(batch, queries, ratio)
                work = plan.shape.work(at)
                if plan.allows(at) and work.bytes <= SMALL_BYTES and work.flops <= SMALL_FLOPS:
                    yield at


def _no_clock(kernel: Kernel, call: Call, run: Callable[[], Any]) -> float:
    return 0.0


def compile_for(plans: Sequence[Plan], names: tuple[str, ...], device: torch.device) -> int:
    """Call each of the kernels at the kinds of every plan. Returns how many calls were made; what a kernel raises is its own affair."""
    pool, stopwatch, made = Pool(device), Stopwatch(_no_clock, names=names), 0
    for plan in plans:
        for at in kinds(plan):
            call = build(plan.shape, *lengths(plan.shape, at), pool)
            for kernel, given, _ in stopwatch.candidates(call):
                with contextlib.suppress(Exception), torch.no_grad():
                    runner(kernel, given)()
                    made += 1
    return made


def main(where: str, grid: str, ops: str, kernels: str, at: str, of: str) -> None:
    """One process's share."""
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plans = plans_of(grid, tuple(filter(None, ops.split(","))))[int(at) :: int(of)]
    print(compile_for(plans, tuple(kernels.split(",")), device))


if __name__ == "__main__":
    main(*sys.argv[1:7])
