"""Versions of packages, compared as `packaging` compares them (PEP 440), without an import of it."""

from __future__ import annotations

import functools
import re
from math import inf
from typing import NamedTuple

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
