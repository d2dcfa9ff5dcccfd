"""`Package`: a Python package that a kernel needs, looked for without an import of it. Versions compare as in `packaging` (PEP 440)."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from importlib.machinery import PathFinder
from math import inf
from typing import NamedTuple

from attnops.errors import MissingExtra, RegistrationError
from attnops.problem import Refusal, Target


@dataclass(frozen=True)
class Package:
    """A Python package a kernel needs. `module` is what is imported, `dists` the names it is installed under.

    at_least, below: the versions that hold `holds`, the first and the first that no longer does, compared as PEP 440 has it;
        "" leaves a side open.
    """

    module: str
    dists: tuple[str, ...]
    at_least: str = ""
    install: str = ""
    below: str = ""
    holds: str = ""

    def __post_init__(self) -> None:
        for field in ("at_least", "below"):
            if (bound := getattr(self, field)) and parse(bound) is None:
                raise RegistrationError(f"package {self.module}: {field} got {bound!r}, want a version as PEP 440 writes it")

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
        """Does this version lie within the bounds?"""
        return within(version, self.at_least, self.below)

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
    except Exception:  # damaged metadata raise anything, and name no version either
        return None


def require(packages: tuple[str, ...], extra: str) -> None:
    """Raise MissingExtra unless every package can be found. Nothing is imported."""
    absent = tuple(p for p in packages if importlib.util.find_spec(p) is None)
    if absent:
        raise MissingExtra(absent, extra)


# Versions --------------------------------------------------------------------------------------------------------------

# The pattern of PEP 440, appendix B: epoch, release, pre, post (by sign or by word), dev, local.
_PATTERN = re.compile(
    r"\s*v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre_n>\d*))?"
    r"(?P<post>-(?P<post_1>\d+)|[-_.]?(?:post|rev|r)[-_.]?(?P<post_2>\d*))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_n>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?\s*",
    re.ASCII | re.IGNORECASE,
)
_PHASE = {"a": "a", "alpha": "a", "b": "b", "beta": "b", "c": "rc", "rc": "rc", "pre": "rc", "preview": "rc"}
_LONGEST = 200


class Version(NamedTuple):
    """A version whose tuples compare as versions do. The local part (`+cu130`) is left out: no bound of ours asks for it."""

    epoch: int
    release: tuple[int, ...]
    pre: tuple[str, float]
    post: float
    dev: float

    @property
    def early(self) -> bool:
        """Is it a pre-release or a development release?"""
        return self.pre[0] in ("a", "b", "rc") or self.dev != inf

    @property
    def base(self) -> tuple[int, tuple[int, ...]]:
        """Without pre, post and dev."""
        return self.epoch, self.release


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Version | None:
    """The version that `text` says; None where it says none."""
    found = _PATTERN.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    numbers = [int(n) for n in found["release"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    dev = inf if found["dev"] is None else int(found["dev_n"] or 0)
    post = -1.0 if found["post"] is None else int(found["post_1"] or found["post_2"] or 0)
    if found["pre"] is not None:
        pre: tuple[str, float] = (_PHASE[found["pre"].lower()], int(found["pre_n"] or 0))
    else:
        # 1.0.dev0 comes before 1.0a0, and 1.0 after each of its pre-releases; letters order the three.
        pre = (" ", 0) if found["post"] is None and dev != inf else ("~", 0)
    return Version(int(found["epoch"] or 0), tuple(numbers), pre, post, dev)


def within(version: str, at_least: str, below: str) -> bool:
    """Does `>=at_least, <below` admit the version? "" leaves a side open; a pre-release of `below` is not below it."""
    if not at_least and not below:
        return True
    given, least, bound = parse(version), parse(at_least), parse(below)
    if given is None or (at_least and least is None) or (below and bound is None):
        return False
    if least is not None and given < least:
        return False
    # A pre-release of 1.0 is not below 1.0, though it came before it; below 1.0.post1 it is.
    same = bound is not None and given.base == bound.base
    return bound is None or (given < bound and not (same and given.early and not bound.early and bound.post < 0))
