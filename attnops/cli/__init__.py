"""The command `attnops`: `doctor`, `explain`, `tune`, `build`, `bench`, `demo`. Needs typer and
rich, which the extra `cli` installs."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.util import find_spec

from attnops.core.errors import MissingExtra
from attnops.core.needs import require


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 a check failed, 2 a wrong argument or a missing
    package."""
    # All that the command needs at once, and not one package after the other.
    models = find_spec("transformers") is None and sys.argv[1:2] in (
        ["explain"],
        ["bench"],
        ["demo"],
    )
    try:
        require(("typer", "rich"), "hf,cli" if models else "cli")
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
        # Python flushes the buffer once more at exit, which would fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            print(f"attnops: {error}", file=sys.stderr)
        raise SystemExit(1) from None
