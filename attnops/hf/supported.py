"""The versions of transformers that attnops.hf works with. This file does not import it."""

from __future__ import annotations

from attnops import tried
from attnops.core.errors import UnsupportedVersion, fail
from attnops.core.needs import parse

OLDEST = tried.OLDEST["transformers"]
"""Older ones ask a cache for other methods, and unfold latents before they cache them: they could
have no pages."""


def older_than(bound: str) -> str | None:
    """The version of transformers if it is older than this; None also for an unknown one, as of a
    source tree on the path."""
    given = tried.installed("transformers")
    found, wanted = parse(given or ""), parse(bound)
    return (
        given
        if found is not None and wanted is not None and found.release < wanted.release
        else None
    )


def check() -> None:
    """Raise UnsupportedVersion when transformers is older than `OLDEST`."""
    if old := older_than(OLDEST):
        fail(UnsupportedVersion, "transformers", old, f">={OLDEST}")


check()
