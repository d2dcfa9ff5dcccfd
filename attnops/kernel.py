"""`Kernel`: the one declaration an implementation makes. `register` puts it where selection, tests and docs find it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import PathFinder
from types import MappingProxyType
from typing import Any

import torch

from attnops.errors import ContractMismatch, RegistrationError
from attnops.problem import Problem, Refusal, Target

CONTRACT = 1
"""Version of what a Kernel promises and is given. Raised when an existing kernel would have to change."""

Need = Callable[[Problem], Refusal | None]
"""A demand on a Problem: None when it is met, the Refusal when it is not. Pure; it never imports and never touches a device."""


class Capture(Enum):
    """May the kernel live inside a CUDA graph? WHOLE: yes. NEVER: the graph is split around it."""

    WHOLE = "whole"
    NEVER = "never"


@dataclass(frozen=True)
class Package:
    """A Python package a kernel needs. `module` is what is imported, `dists` the names it is installed under.

    at_least, below: the versions that hold `holds`, the first and the first that no longer does; "" leaves a side open.
    """

    module: str
    dists: tuple[str, ...]
    at_least: str = ""
    install: str = ""
    below: str = ""
    holds: str = ""

    def missing(self, target: Target) -> Refusal | None:
        """Is it absent on `target`? Looks for files and metadata only: nothing is imported."""
        if target.assume is not None:
            present = self.module in target.assume
        else:
            present = _installed(self.module)
        if not present:
            return Refusal("package", f"{self.module} missing", self.install or f"pip install {self._requirement()}")
        if target.assume is None and (version := self.version()) is not None and not self.has(version):
            return Refusal("package", f"{self.module} {version}", self.versions())
        return None

    def has(self, version: str) -> bool:
        """Does this version lie within the bounds? Post releases count as the release."""
        return (not self.at_least or _numbers(version) >= _numbers(self.at_least)) and (
            not self.below or _numbers(version) < _numbers(self.below)
        )

    def versions(self) -> str:
        """The bounds in words, "" when there are none: `>= 0.3.18, < 0.4.7 (holds cutlass_mla_decode)`."""
        bounds = ", ".join(f"{sign} {v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v)
        return f"{bounds} (holds {self.holds})" if bounds and self.holds else bounds

    def _requirement(self) -> str:
        bounds = ",".join(f"{sign}{v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v)
        return f"'{self.dists[0]}{bounds}'" if bounds else self.dists[0]

    def version(self) -> str | None:
        """The installed version under the first of `dists` that is installed, or None."""
        return next((v for d in self.dists if (v := _version(d)) is not None), None)


@functools.cache
def _installed(module: str) -> bool:
    # A parent is not imported to look into it: importlib.util.find_spec would.
    head, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(head)
        for part in parts:
            head = f"{head}.{part}"
            spec = spec and PathFinder.find_spec(head, spec.submodule_search_locations)
    except (ImportError, ValueError):
        return False
    return spec is not None


@functools.cache
def _version(dist: str) -> str | None:
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _accepts(problem: Problem) -> Refusal | None:
    return None


@dataclass(frozen=True)
class Core:
    """What the compiler cannot look into of a kernel that it lowers in place: an op of its own, `attnops::<op>__<kernel>`.

    schema, run, fake: as those of an Op. It returns fresh tensors and writes nothing, so that the compiler may put the result where
    the op's output belongs, without a copy.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    name: also the overload's name, the `kernel=` argument and the test id. op: the op it implements.
    run: takes the op's arguments and returns the op's results; torch tensors in the op's own layouts.
    needs: every demand on the Problem. packages: what must be installed. probe: a further check of the machine, no imports.
    cost_us: estimated device microseconds, the smaller wins; compared among kernels of one op only, and only where no table of
        measured times covers the call (attnops/measured).
    capture: see Capture. tolerance: factor on the numerics budget of the op's dtype (1.0: as good as the dtype allows).
    rounded_sums: its lse adds up weights already rounded to the query's dtype.
    batch_invariant: a request's result does not depend, bit for bit, on what else is in the batch. Asked for by deterministic policies.
    judge: the plain body that all others are compared with. On a GPU it answers where no other kernel can, or where its measured time
        is the least; no estimate chooses it.
    inline: `run` is plain torch ops that the compiler may fuse, so it is lowered in place and not called.
    inline_when: the Problems for which that is done although the kernel is called, and timed, like any other elsewhere.
    workspace_bytes: how much scratch a call must bring, a pure function of its Problem; asked only of a Problem that meets the needs.
        The caller zeroes it once. None: the kernel asks for none.
    core: inline only: the foreign call amid those torch ops; `run` calls it as `torch.ops.attnops.<op>__<name>`.
    plan_sizes: of a kernel that plans on the host: (length of the plan, bytes of the workspace) from its op's statics and the
        largest sizes; see `attnops.ops.plan`.
    device_plan: takes the op's arguments by name and returns the `plan` that the kernel reads on the device: what its users make once
        a step, so that it is timed with it. It runs without one too, and then makes in every layer what the plan holds: `cost_us`
        says what of, by `Problem.plan`. None: it reads none, or is none the faster for it.
    settled: takes one call's arguments and returns what serves all eager calls like it, whose tensors have its shapes, strides, dtypes
        and device and whose other arguments are its own: a function of the op's tensors alone, in the schema's order (`Op.tensors`),
        so that what follows from the rest need not be worked out again. None: `run` serves.
    heads_first: of the op `attention`, for callers whose tensors have their heads before their tokens: takes one call's arguments, as
        `run`, and returns what serves all eager calls like it: a function of (query `[B, Hq, S, D]`, key `[B, Hkv, K, D]`, value
        `[B, Hkv, K, Dv]`, mask, sinks, kv_start, kv_end) to the output alone, `[B, S, Hq, Dv]` contiguous. Calls of one query token are
        alike, too, if their Problems are equal: K may be another then, and so may strides but the last. None: they are transposed.

    `run` need not take `attention_chunk` (calls with one are refused for it) nor the promise `padded` (it is not told).
    """

    name: str
    op: str
    run: Callable[..., Any]
    needs: tuple[Need, ...] = ()
    packages: tuple[Package, ...] = ()
    probe: Callable[[Target], Refusal | None] | None = None
    cost_us: Callable[[Problem], float] = lambda problem: 1.0
    capture: Capture = Capture.WHOLE
    tolerance: float = 1.0
    rounded_sums: bool = False
    batch_invariant: bool = False
    judge: bool = False
    inline: bool = False
    inline_when: Callable[[Problem], bool] | None = None
    workspace_bytes: Callable[[Problem], int] | None = None
    core: Core | None = None
    plan_sizes: Callable[..., tuple[int, int]] | None = None
    device_plan: Callable[..., torch.Tensor] | None = None
    settled: Callable[..., Callable[..., Any] | None] | None = None
    heads_first: Callable[..., Callable[..., torch.Tensor] | None] | None = None
    contract: int = CONTRACT
    about: str = ""

    def __post_init__(self) -> None:
        if self.op in ("varlen_attention", "varlen_attention_backward", "paged_attention") and not takes(self.run, "padded"):
            object.__setattr__(self, "run", _untold(self.run))

    def absences(self, target: Target) -> tuple[Refusal, ...]:
        """Why the kernel is not there at all on `target`: packages, then its probe."""
        out = [r for p in self.packages if (r := p.missing(target))]
        if not out and self.probe is not None and (r := self.probe(target)):
            out.append(r)
        return tuple(out)

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Every reason this kernel cannot take `problem`. Empty means that it can."""
        unmet = tuple(r for need in self.needs if (r := need(problem)))
        if problem.attention_chunk and not takes(self.run, "attention_chunk"):
            unmet += (Refusal("attention_chunk", problem.attention_chunk, "0"),)
        if not unmet and self.workspace_bytes is not None and problem.workspace < (size := self.workspace_bytes(problem)):
            want = f">= {size} bytes, zeroed once: attnops.explain(...).workspace_bytes"
            unmet = (Refusal("workspace", f"{problem.workspace} bytes", want),)
        return self.absences(problem.target) + unmet

    def absences_key(self) -> str:
        """Is the kernel installed on the machine at hand, as a word for cache keys."""
        return ";".join(map(str, self.absences(Target()))) if self.packages else "own"

    def versions(self) -> tuple[str, ...]:
        """`module==version` of its packages, for cache keys and reports."""
        return tuple(f"{p.module}=={p.version()}" for p in self.packages)


@functools.cache
def takes(run: Callable[..., Any], name: str) -> bool:
    """Has the function a parameter of this name?"""
    parameters = inspect.signature(run).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _untold(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("padded", None)
        return run(*args, **kwargs)

    return call


@dataclass
class Registry:
    """All kernels by op and name, the ops that exist, and whoever wants to hear of a new kernel."""

    kernels: dict[str, dict[str, Kernel]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    listeners: list[Callable[[Kernel], None]] = field(default_factory=list)
    generation: int = 0


_REGISTRY = Registry()


def register(kernel: Kernel) -> Kernel:
    """Add `kernel` to the registry. Raises ContractMismatch or RegistrationError; a refused kernel leaves no trace."""
    if kernel.contract != CONTRACT:
        raise ContractMismatch(kernel.name, kernel.contract, CONTRACT)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name) or kernel.name == "default":
        raise RegistrationError(f"kernel name: got {kernel.name!r}, want lower-case letters, digits and _, and not 'default'")
    table = _REGISTRY.kernels.setdefault(kernel.op, {})
    if kernel.name in table:
        raise RegistrationError(f"kernel name: got {kernel.name!r}, want one not yet registered for {kernel.op} ({', '.join(table)})")
    table[kernel.name] = kernel
    try:
        for listener in _REGISTRY.listeners:
            listener(kernel)
    except Exception:
        del table[kernel.name]
        if not table:
            del _REGISTRY.kernels[kernel.op]
        raise
    _REGISTRY.generation += 1
    return kernel


def kernels_of(op: str) -> MappingProxyType[str, Kernel]:
    """The kernels registered for `op` by name, in order of registration."""
    return MappingProxyType(_REGISTRY.kernels.get(op, {}))


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
    """Grows with every registration and every `renew`; what was selected before is not asked again."""
    return _REGISTRY.generation


def renew() -> None:
    """What selection depends on has changed: a table of measured times came or went."""
    _REGISTRY.generation += 1


def on_register(listener: Callable[[Kernel], None]) -> None:
    """Call `listener` for every kernel there is and every kernel to come."""
    for kernel in all_kernels():
        listener(kernel)
    _REGISTRY.listeners.append(listener)


def own_kernel(op: str, name: str | None) -> str | None:
    """`name` where `op` has a kernel of that name, else None: one name is forced on those ops of several that know it."""
    return name if name in kernels_of(op) else None


def deterministic(policy: str) -> bool:
    """Does the policy of this key, which kernels are given, ask for results that do not depend on batch mates?"""
    return "deterministic" in policy and "deterministic" in policy.split(";")


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a program may have on a GPU of compute capability `arch` (CUDA C++ programming guide)."""
    if arch < 80:
        return 64 * 1024
    return (227 if arch in (90, 100, 103, 110) else 163 if arch in (80, 87) else 99) * 1024


# The vocabulary of needs ----------------------------------------------------------------------------------------------


def one_of(name: str, *values: object) -> Need:
    """The field is one of `values`."""
    want = " | ".join(str(v).removeprefix("torch.") for v in values)
    return lambda p: None if getattr(p, name) in values else Refusal(name, getattr(p, name), want)


def dtypes(*values: torch.dtype) -> Need:
    """Query, key and value share one dtype, one of `values`."""

    def need(p: Problem) -> Refusal | None:
        if p.kv_dtype != p.dtype:
            return Refusal("kv_dtype", p.kv_dtype, f"the query's {str(p.dtype).removeprefix('torch.')}")
        return one_of("dtype", *values)(p)

    return need


def at_most(name: str, limit: int) -> Need:
    """The int field is at most `limit`."""
    return lambda p: None if getattr(p, name) <= limit else Refusal(name, getattr(p, name), f"<= {limit}")


def multiple_of(name: str, unit: int) -> Need:
    """The int field is a multiple of `unit`."""
    return lambda p: None if getattr(p, name) % unit == 0 else Refusal(name, getattr(p, name), f"a multiple of {unit}")


def extent_at_most(name: str, limit: int) -> Need:
    """The size is known to be at most `limit`."""

    def need(p: Problem) -> Refusal | None:
        extent = getattr(p, name)
        return None if extent.hi is not None and extent.hi <= limit else Refusal(name, extent, f"<= {limit}")

    return need


def extent_at_least(name: str, limit: int) -> Need:
    """The size is known to be at least `limit`."""
    return lambda p: None if getattr(p, name).lo >= limit else Refusal(name, getattr(p, name), f">= {limit}")


def arch(*families: int) -> Need:
    """CUDA, with a compute capability of one of `families` (90 for SM90)."""
    want = " | ".join(f"sm{f}" for f in families)
    return lambda p: None if p.target.device == "cuda" and p.target.arch in families else Refusal("target", p.target, want)


def device(*kinds: str) -> Need:
    """The target's device is one of `kinds`."""
    return lambda p: None if p.target.device in kinds else Refusal("device", p.target.device, " | ".join(kinds))


def without(*names: str) -> tuple[Need, ...]:
    """None of these features is asked for: each named field is False, "none" or unset."""

    def no(name: str) -> Need:
        def need(p: Problem) -> Refusal | None:
            got = getattr(p, name)
            return None if got in (False, "none", None) else Refusal(name, got, "none" if isinstance(got, str) else "no")

        return need

    return tuple(no(n) for n in names)


def all_of(needs: Iterable[Need]) -> Need:
    """The first of `needs` that is not met."""
    needs = tuple(needs)
    return lambda p: next((r for need in needs if (r := need(p))), None)
