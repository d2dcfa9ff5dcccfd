"""Which kernels can answer a call, each with its plan where it needs one, and how long each takes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS
from attnops.testing import Call, equip_as_used, planned
from attnops.tune.clock import Clock

Equip = Callable[[Kernel, Call], Call]

SLOW_FIRST_CALL_S = 0.5
"""A first call that takes longer has compiled something."""


def plan_us(kernel: Kernel, call: Call, given: Call) -> float | None:
    """Host microseconds of the host plan that `given` has and `call` has not, made again into its buffers; None without one."""
    if call.problem.plan != "none" or given.problem.plan != "host":
        return None
    start = time.perf_counter()
    planned(kernel, call, buffers=(given.arguments["plan"], given.arguments["workspace"]))
    return (time.perf_counter() - start) * 1e6


def runner(kernel: Kernel, call: Call) -> Callable[[], Any]:
    """What runs `kernel` on `call`. One that is lowered in place around a foreign call runs compiled, as its users have it.

    Its output is then the graph's own, and returned: the foreign call makes it, and users who leave it to do so have no copy.
    """
    args, kwargs = call.args, call.kwargs
    if kernel.core is None:
        return lambda: kernel.run(*args, **kwargs)
    # Decode and extend are two graphs to whoever says so in the code; here the bound would become symbolic, and a kernel refuse it.
    compiled, policy = _compiled(call.op, str(kwargs.pop("max_seqlen_q", ""))), f"kernel={kernel.op}:{kernel.name}"
    return lambda: compiled(args, kwargs, policy)


@contextlib.contextmanager
def _one_compilation() -> Iterator[None]:
    """Two sizes that happen to be equal are still two, so that one compilation of a shape serves most of its sizes."""
    symbolic: Any = importlib.import_module("torch.fx.experimental._config")
    with torch._dynamo.config.patch(recompile_limit=256), symbolic.patch(use_duck_shape=False):
        yield


@functools.cache
def _compiled(op: str, queries: str) -> Callable[..., Any]:
    packet = OPS[op].packet.default

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], policy: str) -> Any:
        # A string is constant to Dynamo, an int from outside is not when shapes are dynamic.
        bound = {"max_seqlen_q": int(queries)} if queries else {}
        given = dict(kwargs)
        if "output" in given:
            given["output"] = torch.empty_like(given["output"])
        result = packet(*args, **given, **bound, policy=policy)
        return given.get("output", result)

    return torch.compile(run, fullgraph=True, dynamic=True)


@dataclass(frozen=True)
class Timing:
    """Device microseconds of one kernel at one size; None with a reason when none were taken. plan_us: host microseconds of its plan.

    broken: it raised. given_up: it was not started, see Stopwatch.
    """

    us: float | None
    reason: str = ""
    plan_us: float | None = None
    broken: bool = False
    given_up: bool = False


@dataclass
class Stopwatch:
    """Times kernels, and keeps the account of those that compile at their first calls.

    `kind` is what a kernel compiles for, as far as a caller can tell. A kernel whose slow first calls have taken `first_calls_s` in
    all stops where its last two first calls were slow, and is not started on another kind unless most kinds began at once (what is
    built ahead goes on), nor at all after three times as long: flex_attention would compile all day.
    names: only these kernels are timed; empty for all. starting_s: what first calls have taken in all. unplanned: kernels
    whose plan could not be made, and why.
    """

    clock: Clock
    first_calls_s: float = 20.0
    names: tuple[str, ...] = ()
    equip: Equip = equip_as_used
    spent_s: dict[str, float] = field(default_factory=dict)
    starting_s: float = 0.0
    unplanned: dict[str, str] = field(default_factory=dict)
    _slow: dict[tuple[str, Hashable], int] = field(default_factory=dict)
    _starts: dict[str, list[bool]] = field(default_factory=dict)

    def candidates(self, call: Call) -> list[tuple[Kernel, Call, float | None]]:
        """The kernels that can answer `call`, each with the call as its users make it, and the host microseconds of a plan of the host.

        A plan of the device is made here, outside of what is timed, as it is made outside of the layers that share it.
        Raises torch.OutOfMemoryError.
        """
        out: list[tuple[Kernel, Call, float | None]] = []
        problem = call.problem
        for kernel in kernels_of(call.op).values():
            # Plain torch lowered in place costs what its neighbours make of it.
            if (kernel.inline and kernel.core is None) or (self.names and kernel.name not in self.names):
                continue
            reasons = {r.field for r in kernel.refusals(problem)}
            try:
                if not reasons:
                    out.append((kernel, call if kernel.device_plan is None else self.equip(kernel, call), None))
                elif reasons <= {"plan", "workspace"}:
                    given = self.equip(kernel, call)
                    if not kernel.refusals(given.problem):
                        out.append((kernel, given, plan_us(kernel, call, given)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a plan raises: its kernel is no candidate, the others are
                self.unplanned[kernel.name] = f"{type(error).__name__}: {str(error)[:200]}"
        return out

    def time(self, kernel: Kernel, call: Call, kind: Hashable, plan_us: float | None = None) -> Timing:
        """Time `kernel` on `call`. Never raises for what the kernel raises: the Timing says it."""
        if self._given_up(kernel.name, kind):
            return Timing(None, f"its first calls took over {self.first_calls_s:g} s", given_up=True)

        run = runner(kernel, call)
        try:
            with torch.no_grad(), _one_compilation():
                start = time.perf_counter()
                run()
                _wait(call)
                first_s = time.perf_counter() - start
                self.starting_s += first_s
                if kernel.core is None:
                    self._account(kernel.name, kind, first_s)
                return Timing(self.clock(kernel, call, run), plan_us=plan_us)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Timing(None, "out of memory")
        except Exception as error:  # whatever a foreign kernel raises: it is reported, and the others are timed
            return Timing(None, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", broken=True)

    def _given_up(self, name: str, kind: Hashable) -> bool:
        spent = self.spent_s.get(name, 0.0)
        if spent <= self.first_calls_s:
            return False
        if (name, kind) in self._slow:
            return self._slow[name, kind] >= 2
        starts = self._starts[name]
        return 2 * sum(starts) >= len(starts) or spent > 3 * self.first_calls_s

    def _account(self, name: str, kind: Hashable, first_s: float) -> None:
        slow = first_s > SLOW_FIRST_CALL_S
        if (name, kind) not in self._slow:
            self._starts.setdefault(name, []).append(slow)
        self._slow[name, kind] = self._slow.get((name, kind), 0) + 1 if slow else 0
        if slow:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + first_s


def _wait(call: Call) -> None:
    if any(t.is_cuda for t in call.tensors().values()):
        torch.cuda.synchronize()
