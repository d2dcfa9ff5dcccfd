"""Clocks: `triton.testing.do_bench` over CUDA graphs for the device, wall-clock time for the host.
Calls take turns, so drift is shared."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnops.core.kernel import Capture, Kernel
from attnops.core.private_torch import spin
from attnops.testing.calls import Call

Run = Callable[[], Any]
Times = dict[str, dict[str, float]]
Clock = Callable[[Kernel, Call, Run], float]
"""Microseconds of a run, which calls the kernel on the call and has run once. Raises the kernel's
errors."""

# The device spins for about 4 ms, while the host launches a measurement. `do_bench` makes six calls
# before its warm-up.
SPIN_CYCLES, BEFORE = int(8e6), 6
REP_MS = 3
"""Milliseconds of one measurement, cache clearing included."""

SHORTEST_S = 0.0005
"""Shorter calls are repeated until a measured interval is this long."""


@dataclass(frozen=True)
class Timed:
    """A call to time. before: runs before each measurement, untimed. per: divides the time, for
    example by the tokens of a call.

    waiting: the same call, which waits for the device after each of its `per` parts.
    """

    call: Run
    before: Run | None = None
    per: int = 1
    waiting: Run | None = None


def spread(us: Sequence[float]) -> dict[str, float]:
    """`median_us`, and half the interquartile range as `spread_us` (half the distance of two
    times)."""
    low, _, high = statistics.quantiles(us, n=4) if len(us) > 2 else (min(us), 0.0, max(us))
    return {"median_us": round(statistics.median(us), 2)} | (
        {"spread_us": round((high - low) / 2, 2)} if len(us) > 1 else {}
    )


def synchronize() -> None:
    """Wait for CUDA, if it is available."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Run, calls: int = 1, wait: bool = True) -> float:
    """Wall-clock seconds of `calls` calls. wait: with those of the device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        synchronize()
    return time.perf_counter() - start


def steps_us(
    steps: Mapping[str, Timed],
    rounds: int = 25,
    cap_s: float = 4.0,
    inner: int | None = None,
    wait: bool = True,
) -> Times:
    """Wall-clock microseconds of each step, measured in turn. Each has run before.

    At most `rounds`, of which three are sure and others end within `cap_s`. inner: calls in one
    measurement; None for as many as SHORTEST_S takes, one for steps with `before`. wait:
    synchronise before the clock stops; False measures the host alone.
    """
    calls = {
        n: inner or (1 if s.before else max(1, round(SHORTEST_S / max(seconds(s.call), 1e-7))))
        for n, s in steps.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    began, done = time.perf_counter(), 0
    while done < min(rounds, 3) or (
        done < rounds and (time.perf_counter() - began) * (1 + 1 / done) <= cap_s
    ):
        done += 1
        for name, step in steps.items():
            if step.before is not None:
                step.before()
            taken[name].append(seconds(step.call, calls[name], wait) / calls[name] / step.per * 1e6)
    return {name: spread(us) for name, us in taken.items()}


def host_us(
    calls: Mapping[str, Run], repeats: int = 15, inner: int = 400, wait: bool = True
) -> Times:
    """Microseconds of short calls, `inner` of them in one measurement, in turn, after a warm-up."""
    for call in calls.values():
        for _ in range(20):
            call()
    return steps_us(
        {name: Timed(call) for name, call in calls.items()}, repeats, float("inf"), inner, wait
    )


def kernels_us(
    device: torch.device, steps: Mapping[str, Timed], rounds: int = 5, launched: bool = False
) -> Times:
    """Microseconds of calls on the device, in turn. Each has run before. A GPU's L2 cache is
    cleared before every call.

    launched: without CUDA graphs, while the device spins until the host has launched them.
    """
    if device.type == "cuda":
        return {
            name: spread(us)
            for name, us in GraphClock(device).in_turn(steps, rounds, launched).items()
        }
    return steps_us(steps, cap_s=2.0)


def host_clock(kernel: Kernel, call: Call, run: Run) -> float:
    """The clock of CPU kernels: a median of at most 7 calls in about 20 ms."""
    return steps_us({"": Timed(run)}, rounds=7, cap_s=0.02, inner=1)[""]["median_us"]


class GraphClock:
    """Times replays of a CUDA graph of one call, `launch_us` included, with a cold L2 cache; or
    launches, if it cannot be captured."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        # A memory pool is freed with its last graph, so the clock keeps one graph.
        flag = torch.zeros(1, device=self.device)
        self._kept = self._capture(lambda: flag.zero_())
        self.launch_us = statistics.median(self._samples(self._kept.replay, self._kept))

    def __call__(self, kernel: Kernel, call: Call, run: Run) -> float:
        return statistics.median(
            self.in_turn({"": Timed(run)}, 1, kernel.capture is not Capture.WHOLE)[""]
        )

    def in_turn(
        self, steps: Mapping[str, Timed], rounds: int = 5, launched: bool = False
    ) -> dict[str, list[float]]:
        """Samples in microseconds of the whole call of each step, all of them in every round.
        launched: without graphs."""
        graphs: dict[str, torch.cuda.CUDAGraph | None] = {}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for name, step in steps.items():
            try:
                graphs[name] = None if launched else self._capture(step.call)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # capture raises errors of any type
                graphs[name] = None
        for _ in range(rounds):
            for name, graph in graphs.items():
                if (before := steps[name].before) is not None:
                    before()
                taken[name] += self._samples(steps[name].call, graph)
        return taken

    def _samples(self, run: Run, graph: torch.cuda.CUDAGraph | None) -> list[float]:
        from triton.testing import do_bench

        calls = itertools.count()

        def launch() -> None:
            if (
                next(calls) == BEFORE
            ):  # while the device spins, the host launches all calls that are measured
                spin(SPIN_CYCLES)
            run()

        times: Any = do_bench(
            launch if graph is None else graph.replay, warmup=0, rep=REP_MS, return_mode="all"
        )
        return [1e3 * ms for ms in times]

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph collects garbage and empties the allocator's cache every time, which
        # takes longer than the call.
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            run()  # keeps first allocations and lazily loaded modules out of the graph
            self._stream.synchronize()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GraphClock(device) if device.type == "cuda" else host_clock


def ceilings(device: torch.device, dtype: torch.dtype, quick: bool = False) -> dict[str, float]:
    """Of a device as measured: `bandwidth_tb_s`, TB/s read and written, and `matmul_tflop_s`,
    TFLOP/s in `dtype`."""
    nbytes, side = (
        (1 << 30, 8192) if device.type == "cuda" else (1 << 21, 256) if quick else (1 << 27, 1024)
    )
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source, target = (
        torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    # In a CUDA graph `copy_` is a copy node, which is slower than a kernel on an H200.
    runs = {
        "bandwidth_tb_s": Timed(lambda: torch.neg(source, out=target)),
        "matmul_tflop_s": Timed(lambda: x @ y),
    }
    for run in runs.values():
        run.call()
    found, work = kernels_us(device, runs), (2 * nbytes, 2 * side**3)
    return {
        name: round(done / found[name]["median_us"] / 1e6, 4)
        for name, done in zip(runs, work, strict=True)
    }
