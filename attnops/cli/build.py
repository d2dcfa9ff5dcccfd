"""`attnops build`: builds what kernels must have built before they are chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape

from attnops.cli.explain import explain_model
from attnops.cli.tables import Data
from attnops.core.errors import InvalidInput
from attnops.core.kernel import check_kernel, kernels_of
from attnops.core.problem import altered
from attnops.core.select import Decision
from attnops.core.traits import Unbuilt
from attnops.kernels.flashinfer import modules
from attnops.kernels.flashinfer.build import AT_ONCE, WORDS, build, is_word, parse
from attnops.kernels.flashinfer.libraries import PACKAGE, Library, unbuilt
from attnops.ops import OPS


def run(
    console: Console,
    what: tuple[str, ...],
    *,
    kernel: str = "",
    at_once: int = AT_ONCE,
    batch: int = 1,
    tokens: int | None = None,
    dtype: str = "bfloat16",
) -> Data:
    """Build these and print a line as each ends. The report has each module's seconds and error.

    what: words of modules, as `attnops.kernels.flashinfer.build.parse` takes them, and models, as
    `attnops explain` takes them. kernel: for a model, what this kernel needs for its calls; "":
    what its calls would take, were it built. at_once: modules side by side. batch, tokens, dtype:
    of the models.

    Raises InvalidInput: an unknown word or model, nothing to build, a model without a GPU here.
    UnknownKernel.
    """
    if not what:
        raise InvalidInput("module", "none", f"{' or '.join(WORDS)}, or a model")
    if kernel:
        check_kernel(kernel, tuple(OPS))
    words: dict[str, None] = {}
    for text in what:
        sizes = (kernel, batch, tokens, dtype)
        words |= dict.fromkeys([text] if is_word(text) else _words_of(text, *sizes))
    libraries = [parse(word) for word in words]
    wanted = unbuilt(libraries)
    installed = PACKAGE.version() is not None
    there = [x.word for x in libraries if installed and x not in wanted]
    report: Data = {"there": there, "modules": []}
    report["error"] = _why_not() if wanted or not installed else ""
    for word in there:
        console.print(f"{escape(word)}: built already")
    if not words:
        console.print(f"{escape(', '.join(what))}: no call would take a kernel that is not built")
    if report["error"]:
        console.print(f"[red]cannot build[/] {escape(report['error'])}", soft_wrap=True)
    elif wanted:
        _build(console, wanted, at_once, report)
    return report


def failed(report: Data) -> bool:
    """Is anything not there that was asked for?"""
    return bool(report["error"] or any(module["error"] for module in report["modules"]))


def _build(console: Console, wanted: tuple[Library, ...], at_once: int, report: Data) -> None:
    """Build them, print a line as each ends, and add it to the report."""
    names = escape(" ".join(library.word for library in wanted))
    console.print(
        f"building {names}, {at_once} at once, which may take minutes",
        soft_wrap=True,
    )
    for count, done in enumerate(build(wanted, at_once), 1):
        ended = f"[red]failed[/]: {escape(done.error)}" if done.error else "built"
        progress = f"{count} of {len(wanted)}  {done.seconds:7.1f} s"
        console.print(f"{progress}  {escape(done.library.word)}: {ended}", soft_wrap=True)
        entry = {"module": done.library.word, "seconds": done.seconds, "error": done.error}
        report["modules"].append(entry)


def _why_not() -> str:
    """Why nothing can be built here; "" where it can."""
    if not PACKAGE.version():
        return "without FlashInfer: pip install flashinfer-python"
    absent = modules.absent_compiler()
    return "" if absent is None else f"with {absent.got}: wants {absent.want}"


def _words_of(model: str, kernel: str, batch: int, tokens: int | None, dtype: str) -> Iterator[str]:
    """The modules that are not built for a model's calls on this machine."""
    if not torch.cuda.is_available():
        want = "modules, on a machine without a GPU"
        raise InvalidInput("model", model, f"{want}: {' or '.join(WORDS)}")
    for cache in ("hf", "paged"):
        found = explain_model(model, batch=batch, tokens=tokens, dtype=dtype, cache=cache)
        for explanation in found.values():
            for site in explanation.sites:
                yield from _lacking(site.decision, kernel)


def _lacking(decision: Decision, kernel: str) -> tuple[str, ...]:
    """What a call lacks for the kernel that would be chosen, or for this one."""
    op, problem = decision.problem.op, decision.problem
    reasons = decision.refused.get(decision.awaited, ())
    if kernel:
        known = kernels_of(op).get(kernel)
        # Explained calls have no plan, and one of the host is what these kernels run on.
        planned = altered(problem, plan="host") if problem.page_size else problem
        takes = known is not None and not known.absences(problem.target) + known.unmet(planned)
        reasons = known.unbuilt(problem) if known is not None and takes else ()
    return tuple(word for r in reasons if isinstance(r, Unbuilt) for word in r.modules)
