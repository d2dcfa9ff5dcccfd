"""The packages that kernels need, and versions.

Packages are looked for without an import. Versions compare as in torch's copy of `packaging`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from attnops.core.errors import MissingExtra, RegistrationError
from attnops.core.problem import Refusal, Target

if TYPE_CHECKING:
    from packaging.version import InvalidVersion, Version as Version
else:
    try:
        from torch._vendor.packaging.version import InvalidVersion, Version
    except ImportError:  # torch's copy is not public; a torch without one needs the package itself
        from packaging.version import InvalidVersion, Version

_LONGEST = 200


@dataclass(frozen=True)
class Package:
    """A Python package a kernel needs. module: the name to import. dists: the names it is installed under.

    at_least, below: the first version that has `holds`, and the first that no longer has it; "" leaves a side open.
    unfit: why an installed package cannot be used on this machine, or None; it is asked for the machine at hand alone.
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
                raise RegistrationError(f"package {self.module}: {field} got {bound!r}, want a version as PEP 440 writes it")

    def missing(self, target: Target) -> Refusal | None:
        """Is it absent on `target`, and its `other` with it? Looks for files and metadata, without an import."""
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
        bounds = ",".join(f"{sign}{v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v)
        wanted = f"'{self.dists[0]}{bounds}'" if bounds else self.dists[0]
        return Refusal("package", f"{self.module} missing", self.install or f"pip install {wanted}")

    def used(self, target: Target) -> Package:
        """This package, or the `other` where that one serves `target` in its place."""
        if self.other is None or self.absent(target) is None or self.other.missing(target) is not None:
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
        """The bounds in words, "" when there are none: `>= 0.3.18, < 0.4.7 (holds cutlass_mla_decode)`, and those of its `other`."""
        beside = "" if self.other is None else f", or {self.other.module} {self.other.versions()}".rstrip()
        return self._bounds() + beside

    def _bounds(self) -> str:
        bounds = ", ".join(f"{sign} {v}" for sign, v in ((">=", self.at_least), ("<", self.below)) if v)
        return f"{bounds} (holds {self.holds})" if bounds and self.holds else bounds

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
    except Exception:  # damaged metadata raise anything, and name no version either
        return None


def require(packages: tuple[str, ...], extra: str) -> None:
    """Raise MissingExtra unless every package can be found. Nothing is imported."""
    absent = tuple(p for p in packages if importlib.util.find_spec(p) is None)
    if absent:
        raise MissingExtra(absent, extra)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Version | None:
    """The version without its local part (`+cu130`), which no bound asks for; None where `text` is no version of PEP 440."""
    try:
        return Version(Version(text).public) if len(text) <= _LONGEST else None
    except InvalidVersion:
        return None


def within(version: str, at_least: str, below: str) -> bool:
    """Does `>=at_least, <below` admit the version? "" leaves a side open; a pre-release of `below` is not below it."""
    if not at_least and not below:
        return True
    given, least, bound = parse(version), parse(at_least), parse(below)
    if given is None or (at_least and least is None) or (below and bound is None) or (least is not None and given < least):
        return False
    if bound is None or bound.is_prerelease or bound.is_postrelease or not given.is_prerelease:
        return bound is None or given < bound
    # A pre-release of 1.0 is not below 1.0, though it came before it; below 1.0.post1 it is.
    return given < bound and Version(given.base_version) != Version(bound.base_version)
