"""What a kernel needs: of a call, by the names of a Problem's fields, and of the packages on the
machine.

A name that is no field of a Problem, or a value that such a field never has, is a RegistrationError
where the need is built. Packages are looked for without an import. Versions compare as in torch's
copy of `packaging`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

from attnops.core.errors import MissingExtra, RegistrationError
from attnops.core.private_torch import InvalidVersion, Version
from attnops.core.problem import (
    LEAVES,
    Problem,
    Refusal,
    Target,
    Visibility,
    leaf,
    told_by,
    value_of,
)
from attnops.core.record import RECORDS, Fact, Spec
from attnops.on_import import Finder

_LONGEST = 200

Need = Callable[[Problem], Refusal | None]
"""A demand on a Problem: None when it is met, the Refusal when it is not. Pure; it never imports
and never touches a device."""

_TYPES: dict[str, str] = {n: str(f.type) for n, f in LEAVES.items()} | {
    "group_size": "int",
    "windowed": "bool",
}
_VALUES: dict[str, type] = {"int": int, "bool": bool, "str": str, "torch.dtype": torch.dtype}


def _known(name: str, *types: str) -> None:
    """Raise RegistrationError unless `name` is a field of Problem, of one of `types` where some are
    given."""
    if name not in _TYPES:
        raise RegistrationError(f"need: got the field {name!r}, want one of {', '.join(_TYPES)}")
    if types and _TYPES[name] not in types:
        raise RegistrationError(
            f"need: got the field {name!r}, which is of type {_TYPES[name]}, want one of type "
            f"{' | '.join(types)}"
        )


def one_of(name: str, *values: object) -> Need:
    """The field is one of `values`."""
    _known(name)
    wanted = _VALUES.get(_TYPES[name], object)
    if wrong := [v for v in values if not isinstance(v, wanted)]:
        raise RegistrationError(
            f"need: got {wrong[0]!r} for the field {name!r}, want a value of type {_TYPES[name]}"
        )
    return _field_need(
        name,
        " | ".join(str(v).removeprefix("torch.") for v in values),
        lambda value: value in values,
    )


def _field_need(name: str, want: str, fits: Callable[[Any], bool]) -> Need:
    """The field's value fits."""
    return demand(name, want, lambda p: fits(leaf(p, name)))


def dtypes(*values: torch.dtype) -> Need:
    """Query, key and value share one dtype, one of `values`."""
    shared = one_of("dtype", *values)

    def need(p: Problem) -> Refusal | None:
        if p.kv_dtype != p.dtype:
            return Refusal(
                "kv_dtype", p.kv_dtype, f"the query's {str(p.dtype).removeprefix('torch.')}"
            )
        return shared(p)

    return need


def at_most(name: str, limit: int) -> Need:
    """The int field is at most `limit`."""
    _known(name, "int")
    return _field_need(name, f"<= {limit}", lambda value: value <= limit)


def multiple_of(name: str, unit: int) -> Need:
    """The int field is a multiple of `unit`."""
    _known(name, "int")
    return _field_need(name, f"a multiple of {unit}", lambda value: value % unit == 0)


def extent_at_most(name: str, limit: int) -> Need:
    """The size is known to be at most `limit`."""
    _known(name, "Extent")
    return _field_need(name, f"<= {limit}", lambda size: size.hi is not None and size.hi <= limit)


def extent_at_least(name: str, limit: int) -> Need:
    """The size is known to be at least `limit`."""
    _known(name, "Extent")
    return _field_need(name, f">= {limit}", lambda size: size.lo >= limit)


def arch(*families: int) -> Need:
    """CUDA, with a compute capability of one of `families` (90 for SM90)."""
    want = " | ".join(f"sm{f}" for f in families)
    return _field_need(
        "target", want, lambda target: target.device == "cuda" and target.arch in families
    )


def arch_from(least: int) -> Need:
    """CUDA, with a compute capability of at least `least` (80 for SM80)."""
    return _field_need(
        "target",
        f"CUDA, sm{least} or newer",
        lambda target: target.device == "cuda" and target.arch >= least,
    )


def device(*kinds: str) -> Need:
    """The target's device is one of `kinds`."""
    for kind in kinds:
        try:
            torch.device(kind)
        except RuntimeError:
            raise RegistrationError(
                f"need: got the device {kind!r}, want a kind that torch knows, e.g. cuda"
            ) from None
    return lambda p: (
        None if p.target.device in kinds else Refusal("device", p.target.device, " | ".join(kinds))
    )


def without(*names: str) -> tuple[Need, ...]:
    """None of these features is asked for: each named field is False, "none" or unset."""
    for name in names:
        _known(name)
    return tuple(
        _field_need(
            n, "none" if _TYPES[n] == "str" else "no", lambda value: value in (False, "none", None)
        )
        for n in names
    )


def demand(field: str, want: str, fits: Callable[[Problem], bool], on: str = "") -> Need:
    """The Problem `fits`. field: refused otherwise; several as "head_dim, v_head_dim".

    want: may hold fields as "{p.head_dim}". on: the kind of device where this is demanded; "":
    everywhere.
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
    """(its refusal, the op's arguments that carry it) of each feature that `p` asks for; a kernel
    that takes it names one of them.

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
    """(a feature, its neutral value, the arguments that carry it), in the order of a Problem's
    fields.

    They are the op's own and those of other ops. records: how many records there are.
    """
    if not record.features:
        return ()
    every = {fact for other in RECORDS.values() for fact in other.features}
    foreign = {
        fact for fact in every if fact not in record.features and not _is_a_hint(record, fact)
    }
    ordered = sorted(
        {*record.features, *foreign}, key=lambda fact: (_ORDER[fact.field], fact.part or 0)
    )
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


# Packages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A Python package a kernel needs. module: the name to import. dists: the names it is installed
    under.

    at_least, below: the first version that has `holds`, and the first that no longer has it; ""
    leaves a side open.
    unfit: why an installed package cannot be used on this machine, or None; it is asked for the
    machine at hand alone.
    other: a package that serves as well where this one is absent.
    """

    module: str
    dists: tuple[str, ...]
    at_least: str = ""
    install: str = ""
    below: str = ""
    holds: str = ""
    unfit: Callable[[], str | None] | None = None
    other: Package | None = None

    def __post_init__(self) -> None:
        for field in ("at_least", "below"):
            if (bound := getattr(self, field)) and parse(bound) is None:
                raise RegistrationError(
                    f"package {self.module}: {field} got {bound!r}, want a version as PEP 440 "
                    "writes it"
                )

    def missing(self, target: Target) -> Refusal | None:
        """Is it absent on `target`, and its `other` with it? Looks for files and metadata, without
        an import."""
        why = self.absent(target)
        if why is None or self.other is None:
            return why
        beside = self.other.missing(target)
        if beside is None:
            return None
        return Refusal("package", f"{why.got}, {beside.got}", f"{why.want}, or {beside.want}")

    def absent(self, target: Target) -> Refusal | None:
        """Is this package itself absent on `target`, or unfit for the machine at hand?"""
        if target.assume is not None:
            return None if self.module in target.assume else self._not_there()
        if not _installed(self.module):
            return self._not_there()
        if (version := self.version()) is not None and not self.has(version):
            return Refusal("package", f"{self.module} {version}", self._bounds())
        if self.unfit is not None and (why := self.unfit()) is not None:
            return Refusal("package", f"{self.module} {why}", self.install or self._bounds())
        return None

    def _not_there(self) -> Refusal:
        bounds = ",".join(
            f"{sign}{v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v
        )
        wanted = f"'{self.dists[0]}{bounds}'" if bounds else self.dists[0]
        return Refusal("package", f"{self.module} missing", self.install or f"pip install {wanted}")

    def used(self, target: Target) -> Package:
        """This package, or the `other` where that one serves `target` in its place."""
        if (
            self.other is None
            or self.absent(target) is None
            or self.other.missing(target) is not None
        ):
            return self
        return self.other.used(target)

    @property
    def each(self) -> tuple[Package, ...]:
        """This package, its `other`, and so on."""
        return (self, *(() if self.other is None else self.other.each))

    def has(self, version: str) -> bool:
        """Is this version within the bounds?"""
        return within(version, self.at_least, self.below)

    def versions(self) -> str:
        """The bounds in words, "" when there are none:
        `>= 0.3.18, < 0.4.7 (holds cutlass_mla_decode)`, and those of its `other`."""
        beside = (
            ""
            if self.other is None
            else f", or {self.other.module} {self.other.versions()}".rstrip()
        )
        return self._bounds() + beside

    def _bounds(self) -> str:
        bounds = ", ".join(
            f"{sign} {v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v
        )
        return f"{bounds} (holds {self.holds})" if bounds and self.holds else bounds

    def version(self) -> str | None:
        """The installed version under the first of `dists` that is installed, or None."""
        return next((v for d in self.dists if (v := _version(d)) is not None), None)


@functools.cache
def _installed(module: str) -> bool:
    # A parent is not imported to look into it: importlib.util.find_spec would.
    head, *parts = module.split(".")
    try:
        spec = sys.modules[head].__spec__ if head in sys.modules else _found(head)
        for part in parts:
            head = f"{head}.{part}"
            spec = spec and PathFinder.find_spec(head, spec.submodule_search_locations)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None


def _found(name: str) -> ModuleSpec | None:
    """The spec of a module without a parent. Finders that only wait for an import, and those
    without `find_spec`, are not asked."""
    for finder in sys.meta_path:
        find = None if isinstance(finder, Finder) else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, None)
        if spec is not None:
            return spec
    return None


@functools.cache
def _version(dist: str) -> str | None:
    try:
        return importlib.metadata.version(dist)
    except Exception:  # damaged metadata raise anything, and name no version either
        return None


def require(packages: tuple[str, ...], extra: str) -> None:
    """Raise MissingExtra unless every package can be found. Nothing is imported."""
    absent = tuple(p for p in packages if importlib.util.find_spec(p) is None)
    if absent:
        raise MissingExtra(absent, extra)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Version | None:
    """The version without its local part (`+cu130`), which no bound asks for; None where `text` is
    no version of PEP 440."""
    try:
        return Version(Version(text).public) if len(text) <= _LONGEST else None
    except InvalidVersion:
        return None


def within(version: str, at_least: str, below: str) -> bool:
    """Does `>=at_least, <below` admit the version? "" leaves a side open; a pre-release of `below`
    is not below it."""
    given, least, bound = parse(version), parse(at_least), parse(below)
    if given is None:
        return not at_least and not below
    above = not at_least if least is None else given >= least
    if bound is None or given >= bound:
        return not below and above
    # A pre-release of 1.0 is not below 1.0, though it came before it; below 1.0.post1 it is.
    final = not bound.is_prerelease and not bound.is_postrelease
    before = (
        given.is_prerelease and final and Version(given.base_version) == Version(bound.base_version)
    )
    return not before and above
