"""The command `attnops`: `doctor`, `explain`, `tune`, `bench`, `demo`. Needs the extra `cli` (typer, rich), looked for when it is run."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.util import find_spec

from attnops.errors import AttnopsError

NEEDED = ("typer", "rich")


class MissingExtra(AttnopsError, ImportError):
    """A command needs packages that are not installed. `packages` are absent; `extra` is the extra of attnops that brings them."""

    def __init__(self, packages: tuple[str, ...], extra: str) -> None:
        super().__init__(f"packages: got no {', '.join(packages)}, want what `pip install 'attnops[{extra}]'` installs")
        self.packages, self.extra = packages, extra


def require(packages: tuple[str, ...], extra: str) -> None:
    """Raise MissingExtra unless every package can be found. Nothing is imported."""
    absent = tuple(p for p in packages if find_spec(p) is None)
    if absent:
        raise MissingExtra(absent, extra)


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 a check failed, 2 a wrong argument or a missing package."""
    try:
        require(NEEDED, "cli")
    except MissingExtra as error:
        print(f"attnops: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from attnops.cli.app import app

    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when Python ends.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            print(f"attnops: {error}", file=sys.stderr)
        raise SystemExit(1) from None
