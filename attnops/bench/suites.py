"""The suites by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnops.bench import compile, decode, graphs, kernels, overhead, prefill
from attnops.bench.rows import Case
from attnops.bench.setup import Setup
from attnops.errors import InvalidInput


@dataclass(frozen=True)
class Picture:
    """The plot of a suite: figure `figure` of its rows times `scale`, in `unit`. log: its axis. more: higher is better."""

    figure: str
    unit: str
    title: str
    scale: float = 1.0
    log: bool = False
    more: bool = True


@dataclass(frozen=True)
class Suite:
    """A part of the measurements.

    Args:
        cases: the cases by name for a Setup; each makes its rows.
        picture: the plot.
        file: stem of the results file; "" is the name.
        needs: modules that the extra `hf` installs.
        share: of the time, relative to the other suites.
    """

    name: str
    about: str
    cases: Callable[[Setup], Mapping[str, Case]]
    picture: Picture
    file: str = ""
    needs: tuple[str, ...] = ("transformers",)
    share: float = 1.0

    @property
    def stem(self) -> str:
        """Of its results file."""
        return self.file or self.name


SPEED, FIRST = (
    Picture("of_hf_compiled", "times the speed of transformers' compiled model", title) for title in ("Decode", "Time to the first token")
)
HOST = Picture("median_us", "us", "Host time", log=True, more=False)
COLD, CAPTURE = (
    Picture("median_us", "s", title, 1e-6, log=True, more=False) for title in ("First call of a decode step", "Capture of all buckets")
)
SHARE = Picture("of_ceiling", "share of the measured ceiling", "Kernels")

SUITES = (
    Suite("kernels", "every kernel, the one chosen, and torch's own, by kinds of calls", kernels.cases, SHARE, "kernel_times", (), 2.0),
    Suite("decode", "one new token a request, of whole Hugging Face models", decode.cases, SPEED, share=8.0),
    Suite("prefill", "the time to the first token of whole Hugging Face models", prefill.cases, FIRST, share=2.0),
    Suite("compile", "cold and warm compilation, and the number of graphs", compile.cases, COLD, share=2.0),
    Suite("graphs", "capture of all default buckets, and a step's host time", graphs.cases, CAPTURE),
    Suite("overhead", "the host time of a call through attnops", overhead.cases, HOST, needs=()),
)


def named(names: tuple[str, ...]) -> tuple[Suite, ...]:
    """The suites of these names in their own order; () is all. Raises InvalidInput for an unknown name."""
    known = {suite.name: suite for suite in SUITES}
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput("suites", ", ".join(map(repr, unknown)), " | ".join(known))
    return tuple(suite for suite in SUITES if suite.name in names or not names)
