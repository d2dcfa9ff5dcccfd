"""The suites by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnops.bench import compile, decode, graphs, kernels, overhead, prefill
from attnops.bench.report import Case
from attnops.bench.setup import Setup
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
    """A part of the measurements. cases: by name, each makes its rows (`attnops.bench.verdict.Row`). file: a results file's stem.

    picture: what is plotted. needs: modules it cannot do without, which the extra `hf` brings. share: of the time, beside the others'.
    """

    name: str
    about: str
    cases: Callable[[Setup], Mapping[str, Case]]
    picture: Picture
    file: str = ""
    needs: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def stem(self) -> str:
        """Of its results file."""
        return self.file or self.name


SPEED = Picture("of_hf_compiled", "times the speed of transformers' compiled model", "Decode")
FIRST = Picture("of_hf_compiled", "times the speed of transformers' compiled model", "Time to the first token")
HOST = Picture("median_us", "us", "Host time", log=True, more=False)

COLD = Picture("median_us", "s", "First call of a decode step", scale=1e-6, log=True, more=False)
CAPTURE = Picture("median_us", "s", "Capture of all buckets", scale=1e-6, log=True, more=False)
SHARE = Picture("of_ceiling", "share of the measured ceiling", "Kernels")

SUITES: tuple[Suite, ...] = (
    Suite("kernels", "every kernel, the one chosen, and torch's own, by kinds of calls", kernels.cases, SHARE, "kernel_times", share=2.0),
    Suite("decode", "one new token a request, of whole Hugging Face models", decode.cases, SPEED, needs=("transformers",), share=8.0),
    Suite("prefill", "the time to the first token of whole Hugging Face models", prefill.cases, FIRST, needs=("transformers",), share=2.0),
    Suite("compile", "cold and warm compilation, graphs and pieces", compile.cases, COLD, needs=("transformers",), share=2.0),
    Suite("graphs", "capture of all default buckets, and a step's host time", graphs.cases, CAPTURE, needs=("transformers",), share=1.0),
    Suite("overhead", "what a call through attnops costs on the host", overhead.cases, HOST),
)


def named(names: tuple[str, ...]) -> tuple[Suite, ...]:
    """The suites of these names, all for (), in their own order. Raises InvalidInput for another name."""
    known = {suite.name: suite for suite in SUITES}
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput("suites", ", ".join(map(repr, unknown)), " | ".join(known))
    return tuple(suite for suite in SUITES if suite.name in names or not names)
