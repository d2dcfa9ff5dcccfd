"""The versions of torch and transformers that attnops was tried with. This file does not import
transformers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from attnops.core.errors import UntriedVersion, warn_once
from attnops.core.needs import parse

OLDEST = {"torch": "2.11", "transformers": "5.15"}
"""pyproject.toml says the same."""

NEWEST = {"torch": "2.15", "transformers": "5.24"}
"""The last releases that all tests ran with. Their patch releases count as tried, too."""


def installed(package: str) -> str | None:
    """The version of a package; None where it has none, as a source tree on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_if_newer(*packages: str) -> None:
    """Warn, once a process, of each package that is newer than the newest that was tried."""
    for package in packages:
        given, newest = installed(package), NEWEST[package]
        if given is not None and _is_newer(given, newest):
            text = (
                f"attnops: got {package} {given}, and the newest that attnops was tried with "
                f"is {newest}."
            )
            text += (
                " Models may run slower than with it, or wrong. Compare with "
                "`handle.verify(...)`, report"
            )
            text += f" what is off, and go back with `pip install '{package}=={newest}.*'`."
            warn_once(UntriedVersion, package, text)


def _is_newer(given: str, newest: str) -> bool:
    """Is this version of a later release, pre-releases included? Patch releases are not."""
    found, tried = parse(given), parse(newest)
    return found is not None and tried is not None and found.release[:2] > tried.release[:2]
