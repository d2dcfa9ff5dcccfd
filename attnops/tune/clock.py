"""How long a call takes: on CUDA the medians of events around replays of a graph, the L2 cache flushed before each."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from attnops.kernel import Capture, Kernel
from attnops.testing import Call

Run = Callable[[], Any]

CYCLES_PER_NS = 2.0
"""Of a GPU's clock, roughly: a slower one spins longer."""


class Clock(Protocol):
    """Microseconds of `run`, which calls `kernel` on `call` and has been called before. Raises whatever the kernel raises."""

    def __call__(self, kernel: Kernel, call: Call, run: Run) -> float: ...


class HostClock:
    """The median of calls on the host, for CPU kernels. repeats: at most; cap_us: stop when they have taken as long."""

    def __init__(self, repeats: int = 7, cap_us: float = 20_000.0) -> None:
        self.repeats, self.cap_us = repeats, cap_us

    def __call__(self, kernel: Kernel, call: Call, run: Run) -> float:
        taken: list[float] = []
        while not taken or (len(taken) < self.repeats and sum(taken) < self.cap_us):
            start = time.perf_counter_ns()
            run()
            taken.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(taken)


class GraphClock:
    """The median over replays of a CUDA graph of the one call, each after a flush of the L2 cache.

    The device first spins for about as long as the host needs to launch all replays, so that none of them waits for a host that has
    other things to do. What is measured includes the start of a graph, alike for all kernels: `launch_us`. A kernel that may not be
    captured, or cannot, is launched instead.

    repeats: at most; cap_us: about how long they may take together, at least LEAST are made.
    """

    LEAST = 5
    HEAD_START_US = 200.0
    """What the device spins before the first replays of a kind, of which it is not known yet how long the host takes."""
    LONGEST_SPIN_US = 20_000.0

    def __init__(self, device: torch.device | str = "cuda", repeats: int = 21, cap_us: float = 15_000.0) -> None:
        self.device = torch.device(device)
        self.repeats, self.cap_us = repeats, cap_us
        cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._uncapturable: set[tuple[str, str]] = set()
        self._host_us = 0.0  # of the last replay and its flush
        with torch.cuda.stream(self._stream):
            # A pool dies with its last graph, so one is kept.
            self._kept = self._capture(lambda: self._flush[:1].zero_())
            self._times([self._kept.replay])
            self.launch_us = statistics.median(self._times([self._kept.replay] * repeats))

    def __call__(self, kernel: Kernel, call: Call, run: Run) -> float:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            run()  # what is allocated or loaded once a stream shall not be captured
            replay = self._replay(kernel, run)
            first = self._times([replay])[0]
            repeats = int(min(max(self.cap_us / max(first, 1.0), self.LEAST), self.repeats))
            taken = self._times([replay] * repeats)
        return statistics.median(taken)

    def in_turn(self, runs: Mapping[str, Run], rounds: int = 25, *, launched: bool = False) -> dict[str, list[float]]:
        """Microseconds of each of `runs` by round, all in every round, so that drift hits all alike.

        A run that cannot be captured is launched. launched: all are, for a launch and a replay are not to be compared.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        taken: dict[str, list[float]] = {name: [] for name in runs}
        with torch.cuda.stream(self._stream):
            for run in runs.values():
                run()
            replays, names = {name: run if launched else self._captured_or(run) for name, run in runs.items()}, list(runs)
            self._times([replays[names[0]]])
            for _ in range(rounds):
                for at in range(0, len(names), self.repeats):
                    some = names[at : at + self.repeats]
                    for name, us in zip(some, self._times([replays[n] for n in some]), strict=True):
                        taken[name].append(us)
        return taken

    def _captured_or(self, run: Run) -> Run:
        try:
            return self._capture(run).replay
        except Exception:  # whatever capture makes of what the call does
            return run

    def _replay(self, kernel: Kernel, run: Run) -> Run:
        who = (kernel.op, kernel.name)
        if kernel.capture is not Capture.WHOLE or who in self._uncapturable:
            return run
        try:
            return self._capture(run).replay
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever capture makes of what the kernel does
            self._uncapturable.add(who)
            return run

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would empty the allocator's cache every time, and the next call would wait for the driver.
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def _times(self, replays: Sequence[Run]) -> list[float]:
        """Microseconds of each, `repeats` of them at most."""
        pairs = list(zip(self._marks[0::2], self._marks[1::2], strict=True))[: len(replays)]
        spin_us = self.HEAD_START_US if len(replays) == 1 else min(1.5 * self._host_us * len(replays), self.LONGEST_SPIN_US)
        torch.cuda._sleep(int(spin_us * 1e3 * CYCLES_PER_NS))
        began = time.perf_counter()
        for replay, (start, end) in zip(replays, pairs, strict=True):
            self._flush.zero_()
            start.record(self._stream)
            replay()
            end.record(self._stream)
        self._host_us = (time.perf_counter() - began) * 1e6 / len(replays)
        self._stream.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GraphClock(device) if device.type == "cuda" else HostClock()
