"""The suites by name, and running some of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnops.bench import ceilings, decode, overhead
from attnops.bench.report import environment, write
from attnops.bench.setup import Setup
from attnops.bench.verdict import why
from attnops.errors import InvalidInput


@dataclass(frozen=True)
class Suite:
    """A part of the measurements. run: returns `rows` (`attnops.bench.verdict.Row`) and what else there is. file: a results file's stem.

    needs: modules it cannot do without, and the extra of attnops that brings them. share: of the time, beside the other suites'.
    """

    name: str
    about: str
    run: Callable[[Setup], dict[str, Any]]
    file: str = ""
    needs: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def stem(self) -> str:
        """Of its results file."""
        return self.file or self.name


SUITES: tuple[Suite, ...] = (
    Suite("decode", "one new token a request, of whole Hugging Face models", decode.run, needs=("transformers",), share=4.0),
    Suite("overhead", "what a call through attnops costs on the host", overhead.run),
)


def named(names: tuple[str, ...]) -> tuple[Suite, ...]:
    """The suites of these names, all for (), in their own order. Raises InvalidInput for another name."""
    known = {suite.name: suite for suite in SUITES}
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput("suites", ", ".join(map(repr, unknown)), " | ".join(known))
    return tuple(suite for suite in SUITES if suite.name in names or not names)


def run(
    suites: tuple[Suite, ...], setup: Setup, *, budget_s: float = 400.0, out: Path | None = None, commit: str = ""
) -> dict[str, dict[str, Any]]:
    """The reports of some suites by name.

    budget_s: seconds in all; a suite has its share of what is left, and leaves out the cases that would begin later. out: a folder for
    a file of each, written as soon as it is done. commit: of the code, "" asks git. A suite that raises has a report that says so.
    """
    began, reports = time.monotonic(), {}
    said = environment(setup.device, commit)
    for i, suite in enumerate(suites):
        setup.tell(suite.name)
        start = time.monotonic()
        part = suite.share / sum(s.share for s in suites[i:])
        mine = replace(setup, until_s=start + part * max(0.0, budget_s - (start - began)), tell=_named(setup, suite))
        report: dict[str, Any] = {**said, "suite": suite.name, "size": setup.size}
        try:
            report |= {"ceilings": ceilings.measure(mine), **suite.run(mine)}
        except Exception as error:  # the other suites stand
            report |= {"rows": [], "failed": {suite.name: why(error)}}
        report["seconds"] = round(time.monotonic() - start, 1)
        reports[suite.name] = report
        if out is not None:
            write(report, out / f"{suite.stem}.json")
    return reports


def _named(setup: Setup, suite: Suite) -> Callable[[str], None]:
    return lambda what: setup.tell(f"{suite.name}: {what}")
