"""The suites by name, and running some of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnops.bench import ceilings, compile, decode, graphs, kernels, overhead, prefill
from attnops.bench.report import environment, write
from attnops.bench.setup import Setup
from attnops.bench.verdict import why
from attnops.errors import InvalidInput


@dataclass(frozen=True)
class Picture:
    """What a plot of a suite shows: a figure of its rows times `scale`, in `unit`. log: its axis. more: is more better?"""

    figure: str
    unit: str
    title: str
    scale: float = 1.0
    log: bool = False
    more: bool = True


@dataclass(frozen=True)
class Suite:
    """A part of the measurements. run: returns `rows` (`attnops.bench.verdict.Row`) and what else there is. file: a results file's stem.

    picture: what is plotted. needs: modules it cannot do without, which the extra `hf` brings. share: of the time, beside the others'.
    """

    name: str
    about: str
    run: Callable[[Setup], dict[str, Any]]
    picture: Picture
    file: str = ""
    needs: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def stem(self) -> str:
        """Of its results file."""
        return self.file or self.name


SPEED = Picture("of_hf_eager", "times the speed of transformers' eager model", "Decode")
FIRST = Picture("of_hf_eager", "times the speed of transformers' eager model", "Time to the first token")
HOST = Picture("median_us", "us", "Host time", log=True, more=False)

COLD = Picture("median_us", "s", "First call of a decode step", scale=1e-6, log=True, more=False)
CAPTURE = Picture("median_us", "s", "Capture of all buckets", scale=1e-6, log=True, more=False)
SHARE = Picture("of_ceiling", "share of the measured ceiling", "Kernels")

SUITES: tuple[Suite, ...] = (
    Suite("kernels", "every kernel, the one chosen, and torch's own, by kinds of calls", kernels.run, SHARE, "kernel_times", share=2.0),
    Suite("decode", "one new token a request, of whole Hugging Face models", decode.run, SPEED, needs=("transformers",), share=4.0),
    Suite("prefill", "the time to the first token of whole Hugging Face models", prefill.run, FIRST, needs=("transformers",), share=2.0),
    Suite("compile", "cold and warm compilation, graphs and pieces", compile.run, COLD, needs=("transformers",), share=2.0),
    Suite("graphs", "capture of all default buckets, and a step's host time", graphs.run, CAPTURE, needs=("transformers",), share=1.0),
    Suite("overhead", "what a call through attnops costs on the host", overhead.run, HOST),
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
    setup.tell("ceilings")
    setup = replace(setup, ceilings=ceilings.measure(setup))
    said = environment(setup.device, commit)
    for i, suite in enumerate(suites):
        setup.tell(suite.name)
        start = time.monotonic()
        part = suite.share / sum(s.share for s in suites[i:])
        mine = replace(setup, until_s=start + part * max(0.0, budget_s - (start - began)), tell=_named(setup, suite))
        report: dict[str, Any] = {**said, "suite": suite.name, "size": setup.size, "ceilings": dict(setup.ceilings)}
        try:
            report |= suite.run(mine)
        except Exception as error:  # the other suites stand
            report |= {"rows": [], "failed": {suite.name: why(error)}}
        report["seconds"] = round(time.monotonic() - start, 1)
        reports[suite.name] = report
        if out is not None:
            write(report, out / f"{suite.stem}.json")
    return reports


def _named(setup: Setup, suite: Suite) -> Callable[[str], None]:
    return lambda what: setup.tell(f"{suite.name}: {what}")
