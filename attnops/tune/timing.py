"""The kernels that can answer a call, each with the plan it needs, and their times."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attnops.errors import one_line
from attnops.inputs import Call, equip_as_used, planned
from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS
from attnops.tune.clock import Clock, Run, synchronize

SLOW_FIRST_CALL_S = 0.5
"""A first call that takes longer has compiled."""


def plan_us(kernel: Kernel, call: Call, given: Call) -> float | None:
    """Host microseconds to make the host plan of `given`, which `call` lacks, once more in its buffers; None without such a plan."""
    if call.problem.plan != "none" or given.problem.plan != "host":
        return None
    start = time.perf_counter()
    planned(kernel, call, buffers=(given.arguments["plan"], given.arguments["workspace"]))
    return (time.perf_counter() - start) * 1e6


def runner(kernel: Kernel, call: Call) -> Run:
    """A function that runs `kernel` on `call`. A kernel lowered in place around a foreign call runs compiled, as in users' graphs.

    The compiled graph allocates and returns its output, which the foreign call then writes without a copy.
    """
    args, kwargs = call.args, call.kwargs
    if kernel.core is None:
        record = call.record
        return lambda: kernel.run(record)
    # Decode and extend are separate graphs in users' code. Here the bound would become symbolic, which kernels refuse.
    compiled, policy = _compiled(call.op, str(kwargs.pop("max_seqlen_q", ""))), f"kernel={kernel.op}:{kernel.name}"
    return lambda: compiled(args, kwargs, policy)


@contextlib.contextmanager
def _one_compilation() -> Iterator[None]:
    """Let equal sizes stay separate symbols, so that one compilation of a shape serves most of its sizes."""
    symbolic: Any = importlib.import_module("torch.fx.experimental._config")
    with torch._dynamo.config.patch(recompile_limit=256), symbolic.patch(use_duck_shape=False):
        yield


@functools.cache
def _compiled(op: str, queries: str) -> Callable[..., Any]:
    packet = OPS[op].packet.default

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], policy: str) -> Any:
        # With dynamic shapes, Dynamo specialises on a string, but not on an int from outside.
        given = {**kwargs, **({"max_seqlen_q": int(queries)} if queries else {})}
        if "output" in given:
            given["output"] = torch.empty_like(given["output"])
        result = packet(*args, **given, policy=policy)
        return given.get("output", result)

    return torch.compile(run, fullgraph=True, dynamic=True)


class Timing(NamedTuple):
    """Device microseconds of one kernel at one size; None with the reason. broken: the kernel raised. given_up: it was not started."""

    us: float | None
    reason: str = ""
    broken: bool = False
    given_up: bool = False


@dataclass
class Stopwatch:
    """Times kernels, and limits the time of first calls, which may compile.

    A kernel compiles once for each `kind` of call, which the caller names. After slow first calls of `first_calls_s` in all, a kernel
    stops at kinds whose last two first calls were slow. It starts on another kind only if at least half of its kinds started fast (as
    prebuilt kernels do), and never after three times that long: flex_attention would compile for hours.

    Args:
        clock: times a call.
        first_calls_s: limit of slow first calls a kernel, in seconds.
        names: kernels to time; () is all.
        equip: adds plans and workspaces to a call.
        spent_s: seconds of slow first calls by kernel.
        starting_s: seconds of all first calls.
        unplanned: errors of plans by kernel.
    """

    clock: Clock
    first_calls_s: float = 20.0
    names: tuple[str, ...] = ()
    equip: Callable[[Kernel, Call], Call] = equip_as_used
    spent_s: dict[str, float] = field(default_factory=dict)
    starting_s: float = 0.0
    unplanned: dict[str, str] = field(default_factory=dict)
    _kinds: dict[str, dict[Hashable, tuple[bool, int]]] = field(default_factory=dict)
    """By kernel and kind: was its first call slow, and how many of its last ones in a row."""

    def candidates(self, call: Call) -> list[tuple[Kernel, Call, float | None]]:
        """The kernels that can answer `call`, each with the call as layers make it, and the host microseconds of a host plan.

        Device plans are made here, untimed, because layers share one a step. Raises torch.OutOfMemoryError.
        """
        out: list[tuple[Kernel, Call, float | None]] = []
        for kernel in kernels_of(call.op).values():
            # The cost of plain torch lowered in place depends on the fusions of Inductor.
            if kernel.fused or (self.names and kernel.name not in self.names):
                continue
            reasons = {r.field for r in kernel.refusals(call.problem)}
            try:
                if not reasons:
                    out.append((kernel, call if kernel.plan.device is None else self.equip(kernel, call), None))
                elif reasons <= {"plan", "workspace"} and not kernel.refusals((given := self.equip(kernel, call)).problem):
                    out.append((kernel, given, plan_us(kernel, call, given)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a plan may raise any error: the kernel is no candidate
                self.unplanned[kernel.name] = one_line(error)
        return out

    def time(self, kernel: Kernel, call: Call, kind: Hashable) -> Timing:
        """Time `kernel` on `call`. An error of the kernel becomes the Timing's reason."""
        if self._given_up(kernel.name, kind):
            return Timing(None, f"its first calls took over {self.first_calls_s:g} s", given_up=True)
        run = runner(kernel, call)
        try:
            with torch.no_grad(), _one_compilation():
                start = time.perf_counter()
                run()
                if any(t.is_cuda for t in call.tensors().values()):
                    synchronize()
                first_s = time.perf_counter() - start
                self.starting_s += first_s
                if kernel.core is None:
                    self._account(kernel.name, kind, first_s)
                return Timing(self.clock(kernel, call, run))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Timing(None, "out of memory")
        except Exception as error:  # a foreign kernel may raise any error: the other kernels are timed
            return Timing(None, one_line(error), broken=True)

    def _given_up(self, name: str, kind: Hashable) -> bool:
        spent, kinds = self.spent_s.get(name, 0.0), self._kinds.get(name, {})
        if spent <= self.first_calls_s or kind in kinds:
            return spent > self.first_calls_s and kinds[kind][1] >= 2
        return 2 * sum(started_slow for started_slow, _ in kinds.values()) >= len(kinds) or spent > 3 * self.first_calls_s

    def _account(self, name: str, kind: Hashable, first_s: float) -> None:
        slow, kinds = first_s > SLOW_FIRST_CALL_S, self._kinds.setdefault(name, {})
        started_slow, in_a_row = kinds.get(kind, (slow, 0))
        kinds[kind] = started_slow, in_a_row + 1 if slow else 0
        if slow:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + first_s
