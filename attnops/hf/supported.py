"""The versions of transformers that attnops.hf works with. This file does not import it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from attnops.errors import UnsupportedVersion, fail
from attnops.package import parse

OLDEST = "5.4"
"""Older ones call mask functions with other arguments. The extra `hf` of pyproject.toml says the same."""

PAGED = "5.15"
"""Older ones ask a cache for other methods, and unfold latents before they cache them."""


def installed() -> str | None:
    """The version of transformers; None: unknown, as of a source tree on the path."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def older_than(bound: str) -> bool:
    """Is the transformers that is installed older than this?"""
    found, wanted = parse(installed() or ""), parse(bound)
    return found is not None and wanted is not None and found.release < wanted.release


def check() -> None:
    """Raise UnsupportedVersion when transformers is older than `OLDEST`."""
    if older_than(OLDEST):
        fail(UnsupportedVersion, "transformers", str(installed()), f">={OLDEST}")


check()
