"""`Kernel`: the one declaration an implementation makes. `register` puts it where selection, tests
and docs find it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from threading import RLock
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from attnops.core.adapt import origin, placed, takes_a_call, without_flag
from attnops.core.errors import (
    ContractMismatch,
    RegistrationError,
    UnknownKernel,
    fail,
    one_line,
)
from attnops.core.needs import (
    Need,
    Package,
    all_of,
    arch,
    arch_from,
    at_most,
    demand,
    device,
    dtypes,
    extent_at_least,
    extent_at_most,
    features,
    multiple_of,
    one_of,
    without,
)
from attnops.core.problem import Problem, Refusal, Target, altered
from attnops.core.record import RECORDS, name as name_of
from attnops.core.traits import (
    Built,
    Capture,
    Core,
    Inline,
    Invariant,
    Plan,
    Tolerance,
    Unbuilt,
    check_fields,
)

__all__ = [
    "Built",
    "Capture",
    "CONTRACT",
    "Core",
    "Inline",
    "Invariant",
    "Kernel",
    "Need",
    "Package",
    "Plan",
    "Tolerance",
    "Unbuilt",
    "all_kernels",
    "all_of",
    "arch",
    "arch_from",
    "at_most",
    "broken_kernels",
    "demand",
    "device",
    "dtypes",
    "extent_at_least",
    "extent_at_most",
    "kernel_names",
    "kernels_of",
    "multiple_of",
    "one_of",
    "register",
    "without",
]

CONTRACT = 2
"""Version of a Kernel's promises and of its arguments. Raised when an existing kernel would have to
change."""

FAILURES = (Exception, SystemExit)
"""Errors of a kernel's own code that become refusals: all but KeyboardInterrupt."""


@dataclass(frozen=True)
class Failed(Refusal):
    """A kernel did not answer: it raised, or gave no answer that can be used. Selection asks it
    again the next time."""


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op. Where `needs`, a probe or a function of the Problem raises or
    gives no answer, it refuses.

    name: also the overload's name, the `kernel=` argument and the test id. op: the op it
    implements.
    run: takes a call, the op's record, and returns the op's results; torch tensors in the op's own
    layouts.
    takes: the optional arguments that the kernel understands, hints and promises apart. A call that
    asks for another is refused.
    dtypes: those of the op's first tensor (the query, where there is one).
    kv_dtypes: those of keys, values and pages; None: the dtype of the first tensor, no other.
    needs: further demands on the Problem. packages: must be installed. probe: a further check of
    the machine, no imports.
    cost_us: estimated device microseconds, for calls that no table of measured times covers; the
    least of the op's kernels wins.
    ahead: takes a call on fake tensors, and begins to build what `run` of such a call will wait
    for, as a kernel to compile; of None, what
        any call will wait for. It returns at once. None: nothing to build.
    again: takes a call, and returns the function that runs it and all eager calls that differ from
    it in their memory alone: in sizes, strides, dtypes, device and scalars they do not. So what
    follows from these is worked out once. Unlike `run`, it sees flags that the op's kernels are
    not handed. None: `run` runs them.
    judge: the plain body that all others are compared with. No estimate chooses it on a GPU where
    another kernel can run.
    stopgap: torch's own ops, which on a GPU take several times as long as the op's other kernels.
    workspace_bytes: how much scratch, zeroed once, a call must bring: a pure function of a Problem
    that meets the needs.
    invariant: None: results depend on the batch. inline: None: the kernel is called. capture,
    tolerance, plan: see the records.
    repeats: further demands on the Problem for equal bits at every run, where its field
    `repeatable`
        asks for them. None: never, for programs add to a number in the order in which they come.
    built: None: nothing must be built on the user's machine before a call.
    contract: the version that the kernel was written for.
    """

    name: str
    op: str
    run: Callable[..., Any]
    takes: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = ()
    kv_dtypes: tuple[torch.dtype, ...] | None = None
    needs: tuple[Need, ...] = ()
    packages: tuple[Package, ...] = ()
    probe: Callable[[Target], Refusal | None] | None = None
    cost_us: Callable[[Problem], float] = lambda problem: 1.0
    ahead: Callable[[Any | None], None] | None = None
    again: Callable[[Any], Callable[[Any], Any]] | None = None
    capture: Capture = Capture.WHOLE
    tolerance: Tolerance = field(default_factory=Tolerance)
    judge: bool = False
    stopgap: bool = False
    workspace_bytes: Callable[[Problem], int] | None = None
    invariant: Invariant | None = None
    inline: Inline | None = None
    plan: Plan = field(default_factory=Plan)
    contract: int = CONTRACT
    about: str = ""
    repeats: tuple[Need, ...] | None = ()
    built: Built | None = None

    def __post_init__(self) -> None:
        if not takes_a_call(self.run):
            return  # `register` says so
        record = RECORDS.get(self.op)  # `register` refuses an op that there is not
        for a in record.args if record is not None else ():
            if a.without is not None and a.name not in self.takes:
                object.__setattr__(self, "run", without_flag(a.name, a.without, self.run))
        if self.foreign:
            object.__setattr__(self, "run", placed(self.run))
        if callable(self.ahead):
            object.__setattr__(self, "ahead", placed(self.ahead))

    def __reduce__(self) -> tuple[Any, ...]:
        # Its functions cannot be handed to another process, which has a kernel of this name of its
        # own.
        return _kernel_there, (self.op, self.name, self.about)

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: object) -> Kernel:
        return self

    def absences(self, target: Target) -> tuple[Refusal, ...]:
        """Why the kernel is not there at all on `target`: packages, then its probe."""
        out = self._asked("packages", (p.missing for p in self.packages), target)
        return out or self._asked("probe", () if self.probe is None else (self.probe,), target)

    def unmet(self, problem: Problem, brief: bool = False) -> tuple[Refusal, ...]:
        """The demands of the kernel that `problem` does not meet, on any machine. brief: one will
        do."""
        unlisted = tuple(self._unlisted(problem))
        if brief and unlisted:
            return unlisted
        out = self._asked("needs", self.needs, problem, brief) + self.unrepeated(problem)
        return out + tuple(r for r in unlisted if r.field not in [other.field for other in out])

    def _unlisted(self, problem: Problem) -> Iterator[Refusal]:
        """Features, arguments and dtypes that the kernel does not list."""
        yield from (
            refusal for refusal, arguments in features(problem) if self.takes.isdisjoint(arguments)
        )
        for a in sorted(problem.asks - self.takes):
            yield Refusal(a, "asked for", f"not, for the kernel does not list {a}")
        if problem.dtype not in self.dtypes:
            yield Refusal("dtype", problem.dtype, " | ".join(map(name_of, self.dtypes)))
        stored = (problem.dtype,) if self.kv_dtypes is None else self.kv_dtypes
        if problem.kv_dtype not in stored:
            yield Refusal("kv_dtype", problem.kv_dtype, " | ".join(map(name_of, stored)))

    def refusals(self, problem: Problem, brief: bool = False) -> tuple[Refusal, ...]:
        """Every reason this kernel cannot take `problem`, or be compared with others by cost;
        brief: one will do."""
        absences = self.absences(problem.target)
        if brief and absences:
            return absences
        unmet = self.unmet(problem, brief)
        if problem.step.capturing and self.capture is Capture.NEVER:
            unmet += (
                Refusal(
                    "capture",
                    self.capture.value,
                    f"{Capture.WHOLE.value}: a CUDA graph is being captured",
                ),
            )
        if not unmet and self.workspace_bytes is not None:
            unmet = self._asked("workspace_bytes", (self._enough,), problem)
        out = absences + unmet or self._asked("inline.when", (self._placed,), problem)
        return out or self._asked("cost_us", (self._priced,), problem)

    def unbuilt(self, problem: Problem) -> tuple[Refusal, ...]:
        """Why an automatic choice shall not take the kernel yet, though it can run."""
        return () if self.built is None else self._asked("built", (self.built.lacks,), problem)

    def varies(self, problem: Problem) -> tuple[Refusal, ...]:
        """Why a request's result may depend on its batch mates, whatever the policy. Empty: under a
        deterministic one it does not."""
        if self.invariant is None:
            return (Refusal("batch_invariant", False, "True (policy.deterministic)"),)
        return self._asked("invariant.needs", self.invariant.needs, problem)

    def unrepeated(self, problem: Problem) -> tuple[Refusal, ...]:
        """Why the bits of a call that must be repeatable may differ from run to run."""
        if problem.step.repeatable == "no":
            return ()
        if self.repeats is None:
            want = "no (torch.use_deterministic_algorithms)"
            return (Refusal("repeatable", problem.step.repeatable, want),)
        return self._asked("repeats", self.repeats, problem)

    def _asked(
        self,
        what: str,
        questions: Iterable[Callable[[Any], Any]],
        about: object,
        brief: bool = False,
    ) -> tuple[Refusal, ...]:
        """The refusals among the answers, or the first of them. An error is one."""
        out = []
        for question in questions:
            try:
                answer = question(about)
            except FAILURES as error:
                answer = Failed(
                    f"{self.name}.{what}", said(error), "no error: the kernel's own code raised it"
                )
            if answer is not None:
                odd = Failed(
                    f"{self.name}.{what}",
                    f"an answer of type {type(answer).__name__}",
                    "None or a Refusal",
                )
                out.append(answer if isinstance(answer, Refusal) else odd)
                if brief:
                    break
        return tuple(out)

    def _enough(self, problem: Problem) -> Refusal | None:
        assert self.workspace_bytes is not None
        size = self.workspace_bytes(problem)
        if type(size) is not int or size < 0:
            return Failed(f"{self.name}.workspace_bytes", size, "an int >= 0")
        want = f">= {size} bytes, zeroed once: attnops.explain(...).workspace_bytes"
        return (
            Refusal("workspace", f"{problem.step.workspace} bytes", want)
            if problem.step.workspace < size
            else None
        )

    def _priced(self, problem: Problem) -> Refusal | None:
        # A time that a plan was made for is compared with that of a call without, so both are asked
        # for.
        planned = self.plan.device is not None and problem.step.plan == "none"
        times = [
            self.cost_us(p)
            for p in ((problem, altered(problem, plan="device")) if planned else (problem,))
        ]
        for us in (*times, self.steady_us(problem)):
            if not isinstance(us, Real) or isinstance(us, bool) or not 0 <= float(us) < inf:
                return Failed(f"{self.name}.cost_us", us, "a finite number >= 0")
        return None

    def _placed(self, problem: Problem) -> None:
        if self.inline is not None and self.inline.when is not None:
            self.inline.when(problem)

    def steady_us(self, problem: Problem) -> float:
        """As `cost_us`, under a deterministic policy."""
        return (
            self.invariant.cost_us if self.invariant and self.invariant.cost_us else self.cost_us
        )(problem)

    @property
    def core(self) -> Core | None:
        """The core of a kernel that has one."""
        return self.inline.core if self.inline else None

    @property
    def foreign(self) -> bool:
        """May `run` launch on the current GPU, whatever GPU holds its tensors? Torch's own ops
        launch where their tensors are."""
        return bool(self.packages) or not str(origin(self.run).__module__).startswith("attnops.")

    @property
    def fused(self) -> bool:
        """Is the kernel always plain torch in the caller's graph, so that there is no call of it to
        time?"""
        return self.inline == Inline()

    def absences_key(self) -> str:
        """Is the kernel installed on the machine at hand, and what is built of it, as a word for
        cache keys."""
        if not self.packages:
            return "own"
        absent = ";".join(map(str, self.absences(Target())))
        if absent or self.built is None:
            return absent
        try:
            return self.built.state()
        except FAILURES as error:
            return one_line(error)

    def versions(self) -> tuple[str, ...]:
        """`module==version` of its packages, or of those that serve in their place, for cache keys
        and reports."""
        return tuple(
            f"{p.module}=={p.version()}" for p in (each.used(Target()) for each in self.packages)
        )


def _kernel_there(op: str, name: str, about: str) -> Kernel:
    return kernels_of(op).get(name) or Kernel(name, op, _elsewhere, about=about)


def _elsewhere(call: Any) -> NoReturn:
    raise RegistrationError("kernel: got one that only the process it comes from has registered")


def said(error: BaseException) -> str:
    """`ValueError: its text`, even if the text itself raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except FAILURES:
        return type(error).__name__


@dataclass
class Registry:
    """All kernels by op and name, and the checks and listeners for new ones. waiting: kernels of an
    open `together`.

    Calls of other threads read `kernels` at any time, so a registration replaces it, under `lock`,
    and changes no dict in place.
    """

    kernels: dict[str, dict[str, Kernel]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    checks: list[Callable[[Kernel], None]] = field(default_factory=list)
    listeners: list[Callable[[Kernel], None]] = field(default_factory=list)
    waiting: list[Kernel] | None = None
    generation: int = 0
    lock: RLock = field(default_factory=RLock)

    def add(self, kernel: Kernel) -> None:
        """Add a kernel."""
        with self.lock:
            table = {**self.kernels.get(kernel.op, {}), kernel.name: kernel}
            self.kernels = {**self.kernels, kernel.op: table}
            self.generation += 1

    def remove(self, kernel: Kernel) -> None:
        """Remove a kernel, and the table of its op with the last one."""
        with self.lock:
            table = {n: k for n, k in self.kernels.get(kernel.op, {}).items() if n != kernel.name}
            others = {op: kernels for op, kernels in self.kernels.items() if op != kernel.op}
            self.kernels = {**others, kernel.op: table} if table else others
            self.generation += 1


_REGISTRY = Registry()


def register(kernel: Kernel) -> Kernel:
    """Add `kernel` to the registry. Raises ContractMismatch or RegistrationError; a refused kernel
    leaves no trace."""
    if kernel.contract != CONTRACT:
        raise ContractMismatch(kernel.name, kernel.contract, CONTRACT)
    if (
        not isinstance(kernel.name, str)
        or not re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name)
        or kernel.name == "default"
    ):
        raise RegistrationError(
            f"kernel name: got {kernel.name!r}, want lower-case letters, digits and _, and not "
            "'default'"
        )
    with _REGISTRY.lock:
        known = _REGISTRY.kernels.get(kernel.op, {})
        if kernel.name in known:
            want = f"one not yet registered for {kernel.op} ({', '.join(known)})"
            raise RegistrationError(f"kernel name: got {kernel.name!r}, want {want}")
        check_fields(kernel)
        for check in _REGISTRY.checks:
            check(kernel)
        with together() if _REGISTRY.waiting is None else nullcontext(_REGISTRY.waiting) as new:
            _REGISTRY.add(kernel)
            new.append(kernel)
    return kernel


@contextmanager
def together() -> Iterator[list[Kernel]]:
    """Kernels registered within the block count together: all of them at its end, none where it
    raises."""
    new: list[Kernel] = []
    outer, _REGISTRY.waiting = _REGISTRY.waiting, new
    try:
        yield new
        for kernel in new:
            for listener in _REGISTRY.listeners:
                listener(kernel)
    except BaseException:
        _drop(new)
        raise
    finally:
        _REGISTRY.waiting = outer


def _drop(kernels: Iterable[Kernel]) -> None:
    for kernel in kernels:
        _REGISTRY.remove(kernel)


def kernels_of(op: str) -> MappingProxyType[str, Kernel]:
    """The kernels registered for `op` by name, in order of registration."""
    return MappingProxyType(_REGISTRY.kernels.get(op, {}))


_REPLANNED: ContextVar[int] = ContextVar("attnops_replanned", default=0)


@contextmanager
def replanned(queries: int) -> Iterator[None]:
    """The graphs that the block captures, of at most so many new tokens a request, are replayed
    after their host plans are made again. 0: they are not made again."""
    before = _REPLANNED.set(queries)
    try:
        yield
    finally:
        _REPLANNED.reset(before)


def fits_a_graph(kernel: Kernel) -> bool:
    """May the kernel be captured now? So may one that runs on a plan of the host where each replay
    has a plan of its own."""
    if kernel.capture is Capture.WHOLE:
        return True
    planning, queries = kernels_of(f"plan_{kernel.op}").get(kernel.name), _REPLANNED.get()
    if planning is None or queries == 0:
        return False
    return planning.plan.fixed or (planning.plan.fixed_steps and queries == 1)


def all_kernels() -> tuple[Kernel, ...]:
    """Every registered kernel."""
    return tuple(k for table in _REGISTRY.kernels.values() for k in table.values())


def kernel_names() -> tuple[str, ...]:
    """Every kernel name in use, sorted."""
    return tuple(sorted({k.name for k in all_kernels()}))


def broken_kernels() -> MappingProxyType[str, str]:
    """Third-party kernel modules that could not be loaded, and why."""
    return MappingProxyType(_REGISTRY.broken)


def report_broken(source: str, reason: str) -> None:
    """Remember that `source` could not be loaded; `doctor` shows it."""
    _REGISTRY.broken[source] = reason


def generation() -> int:
    """Grows with every registration and every `renew`, so that later calls select anew."""
    return _REGISTRY.generation


def renew() -> None:
    """Have all calls select anew: a table of measured times, or what is built, has changed."""
    with _REGISTRY.lock:
        _REGISTRY.generation += 1


def on_register(listener: Callable[[Kernel], None], check: Callable[[Kernel], None]) -> None:
    """Call `check`, which may raise, and then `listener` for every kernel there is and every kernel
    to come."""
    for kernel in all_kernels():
        check(kernel)
        listener(kernel)
    _REGISTRY.checks.append(check)
    _REGISTRY.listeners.append(listener)


def own_kernel(op: str, name: str | None) -> str | None:
    """`name` where `op` has a kernel of that name, else None: one name is forced on those ops of
    several that know it."""
    return name if name in kernels_of(op) else None


def check_kernel(kernel: str, ops: tuple[str, ...]) -> None:
    """Raise UnknownKernel unless one of `ops` has a kernel of that name."""
    if not any(kernel in kernels_of(op) for op in ops):
        fail(
            UnknownKernel,
            kernel,
            " | ".join(ops),
            tuple(dict.fromkeys(name for op in ops for name in kernels_of(op))),
        )


def deterministic(policy: str) -> bool:
    """Does the policy of this key demand results that do not depend on batch mates? Kernels get the
    key as `call.policy`."""
    return "deterministic" in policy and "deterministic" in policy.split(";")
