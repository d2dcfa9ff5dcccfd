"""A kernel's declarations: its needs by the names of a Problem's fields, and the records of its further traits.

A name that is no field of a Problem, or a value that such a field never has, is a RegistrationError where the need is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from attnops.core.adapt import takes_a_call
from attnops.core.errors import RegistrationError
from attnops.core.packages import Package
from attnops.core.problem import LEAVES, Problem, Refusal, Visibility, leaf, told_by, value_of
from attnops.core.record import RECORDS, Fact, Spec

if TYPE_CHECKING:
    from attnops.core.kernel import Kernel

Need = Callable[[Problem], Refusal | None]
"""A demand on a Problem: None when it is met, the Refusal when it is not. Pure; it never imports and never touches a device."""

_TYPES: dict[str, str] = {n: str(f.type) for n, f in LEAVES.items()} | {"group_size": "int", "windowed": "bool"}
_VALUES: dict[str, type] = {"int": int, "bool": bool, "str": str, "torch.dtype": torch.dtype}


def _known(name: str, *types: str) -> None:
    """Raise RegistrationError unless `name` is a field of Problem, of one of `types` where some are given."""
    if name not in _TYPES:
        raise RegistrationError(f"need: got the field {name!r}, want one of {', '.join(_TYPES)}")
    if types and _TYPES[name] not in types:
        raise RegistrationError(f"need: got the field {name!r}, which is of type {_TYPES[name]}, want one of type {' | '.join(types)}")


def one_of(name: str, *values: object) -> Need:
    """The field is one of `values`."""
    _known(name)
    wanted = _VALUES.get(_TYPES[name], object)
    if wrong := [v for v in values if not isinstance(v, wanted)]:
        raise RegistrationError(f"need: got {wrong[0]!r} for the field {name!r}, want a value of type {_TYPES[name]}")
    want = " | ".join(str(v).removeprefix("torch.") for v in values)
    return lambda p: None if leaf(p, name) in values else Refusal(name, leaf(p, name), want)


def dtypes(*values: torch.dtype) -> Need:
    """Query, key and value share one dtype, one of `values`."""
    shared = one_of("dtype", *values)

    def need(p: Problem) -> Refusal | None:
        if p.kv_dtype != p.dtype:
            return Refusal("kv_dtype", p.kv_dtype, f"the query's {str(p.dtype).removeprefix('torch.')}")
        return shared(p)

    return need


def at_most(name: str, limit: int) -> Need:
    """The int field is at most `limit`."""
    _known(name, "int")
    return lambda p: None if leaf(p, name) <= limit else Refusal(name, leaf(p, name), f"<= {limit}")


def multiple_of(name: str, unit: int) -> Need:
    """The int field is a multiple of `unit`."""
    _known(name, "int")
    return lambda p: None if leaf(p, name) % unit == 0 else Refusal(name, leaf(p, name), f"a multiple of {unit}")


def extent_at_most(name: str, limit: int) -> Need:
    """The size is known to be at most `limit`."""
    _known(name, "Extent")
    return demand(name, f"<= {limit}", lambda p: leaf(p, name).hi is not None and leaf(p, name).hi <= limit)


def extent_at_least(name: str, limit: int) -> Need:
    """The size is known to be at least `limit`."""
    _known(name, "Extent")
    return lambda p: None if leaf(p, name).lo >= limit else Refusal(name, leaf(p, name), f">= {limit}")


def arch(*families: int) -> Need:
    """CUDA, with a compute capability of one of `families` (90 for SM90)."""
    want = " | ".join(f"sm{f}" for f in families)
    return lambda p: None if p.target.device == "cuda" and p.target.arch in families else Refusal("target", p.target, want)


def arch_from(least: int) -> Need:
    """CUDA, with a compute capability of at least `least` (80 for SM80)."""
    want = f"CUDA, sm{least} or newer"
    return lambda p: None if p.target.device == "cuda" and p.target.arch >= least else Refusal("target", p.target, want)


def device(*kinds: str) -> Need:
    """The target's device is one of `kinds`."""
    for kind in kinds:
        try:
            torch.device(kind)
        except RuntimeError:
            raise RegistrationError(f"need: got the device {kind!r}, want a kind that torch knows, e.g. cuda") from None
    return lambda p: None if p.target.device in kinds else Refusal("device", p.target.device, " | ".join(kinds))


def without(*names: str) -> tuple[Need, ...]:
    """None of these features is asked for: each named field is False, "none" or unset."""

    def no(name: str) -> Need:
        want = "none" if _TYPES.get(name) == "str" else "no"
        return demand(name, want, lambda p: leaf(p, name) in (False, "none", None))

    return tuple(no(n) for n in names)


def demand(field: str, want: str, fits: Callable[[Problem], bool], on: str = "") -> Need:
    """The Problem `fits`. field: refused otherwise; several as "head_dim, v_head_dim".

    want: may hold fields as "{p.head_dim}". on: the kind of device where this is demanded; "": everywhere.
    """
    names = field.split(", ")
    for name in names:
        _known(name)

    def need(p: Problem) -> Refusal | None:
        if (on and p.target.device != on) or fits(p):
            return None
        got = tuple(leaf(p, name) for name in names)
        return Refusal(field, got[0] if len(names) == 1 else got, want.format(p=p))

    return need


def all_of(needs: Iterable[Need]) -> Need:
    """The first of `needs` that is not met."""
    needs = tuple(needs)
    return lambda p: next((r for need in needs if (r := need(p))), None)


_ORDER = {name: place for place, name in enumerate(LEAVES)}


def features(p: Problem) -> Iterator[tuple[Refusal, tuple[str, ...]]]:
    """(its refusal, the op's arguments that carry it) of each feature that `p` asks for; a kernel that takes it names one of them.

    No argument carries a feature that the op does not have, so no kernel takes it.
    """
    record = RECORDS.get(p.op)
    if record is None:
        return
    for fact, neutral, arguments in _looked_at(record, len(RECORDS)):
        value = value_of(p, fact)
        if value == neutral or (fact.unless is not None and fact.unless(p)):
            continue
        yield _refusal(fact, value, neutral), arguments


@functools.cache
def _looked_at(record: Spec, records: int) -> tuple[tuple[Fact, Any, tuple[str, ...]], ...]:
    """(a feature, its neutral value, the arguments that carry it), in the order of a Problem's fields.

    They are the op's own and those of other ops. records: how many records there are.
    """
    if not record.features:
        return ()
    every = {fact for other in RECORDS.values() for fact in other.features}
    foreign = {fact for fact in every if fact not in record.features and not _is_a_hint(record, fact)}
    ordered = sorted({*record.features, *foreign}, key=lambda fact: (_ORDER[fact.field], fact.part or 0))
    return tuple((fact, _neutral(record, fact), _carriers(record, fact)) for fact in ordered)


def _is_a_hint(record: Spec, fact: Fact) -> bool:
    """Does the field of another op's feature ask nothing of this op's kernels?"""
    if isinstance(record.facts, Mapping) and fact.field in record.facts:
        return True  # the record says so of every call
    # An op that shows no keys, as a write into pages, has no rules of visibility.
    shows_keys = any(hasattr(Visibility, own.field) for own in record.features)
    return hasattr(Visibility, fact.field) and not shows_keys


def _neutral(record: Spec, fact: Fact) -> Any:
    if fact in record.features:
        return told_by(fact, record.features[fact][0].neutral)
    default: Any = LEAVES[fact.field].default
    return default if fact.part is None else default[fact.part]


def _carriers(record: Spec, fact: Fact) -> tuple[str, ...]:
    return tuple(a.name for a in record.features.get(fact, ()))


def _refusal(fact: Fact, value: Any, neutral: Any) -> Refusal:
    if fact.refused:
        return Refusal(fact.refused, True, "no")
    want = ("no", "yes")[neutral] if isinstance(neutral, bool) else str(neutral)
    return Refusal(fact.field, value, want)


# Further traits of a kernel -------------------------------------------------------------------------------------------


class Capture(Enum):
    """May the kernel live inside a CUDA graph? WHOLE: yes. NEVER: the graph is split around it."""

    WHOLE = "whole"
    NEVER = "never"


@dataclass(frozen=True)
class Core:
    """The foreign call amid the torch ops of an `Inline` kernel: an op `attnops::<op>__<kernel>` that writes nothing, which `run` calls."""

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]


@dataclass(frozen=True)
class Inline:
    """`run` is plain torch ops that the compiler may fuse, so it is lowered in place and not called.

    when: the Problems for which that is done; None: all. core: the one call that the compiler cannot look into.
    """

    when: Callable[[Problem], bool] | None = None
    core: Core | None = None


@dataclass(frozen=True)
class Invariant:
    """Under a deterministic policy a request's result does not depend, bit for bit, on the other requests of the batch.

    needs: further demands on the Problem for that. cost_us: as `Kernel.cost_us`, where the policy costs time.
    """

    needs: tuple[Need, ...] = ()
    cost_us: Callable[[Problem], float] | None = None


@dataclass(frozen=True)
class Plan:
    """How a kernel plans for a batch.

    sizes: (length of a host's plan, bytes of the workspace) from its op's statics and the largest sizes; see `attnops.ops.plan`.
    device: takes the op's arguments by name and returns the `plan` that the kernel reads on the device, made once a step and timed with
        the kernel. Without one the kernel makes the same in every layer: `cost_us` tells the two apart by `Problem.step.plan`.
    """

    sizes: Callable[..., tuple[int, int]] | None = None
    device: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Tolerance:
    """How far results may be off. factor: on the numerics budget. rounded_sums: the lse adds up weights rounded to the query's dtype."""

    factor: float = 1.0
    rounded_sums: bool = False


def check_fields(kernel: Kernel) -> None:
    """Raise RegistrationError for a field of another type than it has."""

    def want(ok: bool, field: str, text: str) -> None:
        if not ok:
            raise RegistrationError(f"kernel {kernel.name}: {field} got {attrgetter(field)(kernel)!r}, want {text}")

    kinds: dict[str, Any] = {"capture": Capture, "tolerance": Tolerance, "plan": Plan}
    for name, kind in (kinds | {"inline": Inline | None, "invariant": Invariant | None}).items():
        want(isinstance(getattr(kernel, name), kind), name, f"a value of type {getattr(kind, '__name__', kind)}")
    demands = ["invariant.needs"] * (kernel.invariant is not None)
    demands += ["repeats"] * (kernel.repeats is not None)
    for name in ("needs", *demands):
        needs = attrgetter(name)(kernel)
        want(isinstance(needs, tuple) and all(map(callable, needs)), name, "a tuple of functions of a Problem")
    want(isinstance(kernel.packages, tuple) and all(isinstance(p, Package) for p in kernel.packages), "packages", "a tuple of Package")
    factor = kernel.tolerance.factor
    want(isinstance(factor, Real) and 0 < factor < inf, "tolerance", "a factor > 0")
    want(isinstance(kernel.takes, frozenset | set), "takes", "a frozenset of names of arguments")
    want(callable(kernel.cost_us), "cost_us", "a function")
    optional = ["probe", "ahead", "workspace_bytes", "plan.sizes", "plan.device"]
    optional += ["inline.when"] * (kernel.inline is not None) + ["invariant.cost_us"] * (kernel.invariant is not None)
    for name in optional:
        want(attrgetter(name)(kernel) is None or callable(attrgetter(name)(kernel)), name, "a function or None")
    want(takes_a_call(kernel.run), "run", "a function of one parameter, the call (contract 2)")
    want(_dtypes(kernel.dtypes) and bool(kernel.dtypes), "dtypes", DTYPES)
    want(kernel.kv_dtypes is None or (_dtypes(kernel.kv_dtypes) and bool(kernel.kv_dtypes)), "kv_dtypes", f"{DTYPES}, or None")


DTYPES = "a tuple of at least one torch.dtype"


def _dtypes(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(d, torch.dtype) for d in value)
