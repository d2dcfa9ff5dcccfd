"""`attnops bench`: suites of measurements of this machine, and the comparison of two results files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnops.bench.compare import compare
from attnops.bench.report import read
from attnops.bench.running import make_folder
from attnops.bench.running import run as run_suites
from attnops.bench.setup import Point, Setup, device_of
from attnops.bench.suites import Suite, named
from attnops.cli import require
from attnops.cli.explain import quiet_transformers
from attnops.cli.tables import SIMPLE
from attnops.errors import InvalidInput


def run(
    console: Console,
    suites: tuple[str, ...] = (),
    *,
    model: str = "",
    quick: bool = False,
    device: str = "",
    layers: int = 0,
    points: str = "",
    ways: str = "",
    budget_s: float = 400.0,
    out: Path | None = None,
    plots: Path | None = None,
    commit: str = "",
    gpus: int = 1,
    backend: str = "inductor",
) -> dict[str, dict[str, Any]]:
    """Measure, with progress and tables on `console`. Returns the reports by suite.

    suites: names, () for all. model: a bundled name. device: cpu, cuda or "". layers: 0 for the suite's. points: `1x1k,8x1k`. ways: names
    in a suite's results, with commas, "" for all. budget_s: in all. out: a folder for a results file of each suite, plots: for a picture
    of each. commit: of the code. gpus: that share the cases. backend: as Setup has it.
    Raises InvalidInput: no such suite, device, model, way or point, none that a suite asked for has, not so many GPUs, no number that makes
    sense, or no folder. MissingExtra: a suite's package is missing.
    """
    if not 0 < budget_s < float("inf"):
        raise InvalidInput("budget_s", budget_s, "a finite number > 0 of seconds")
    if layers < 0:
        raise InvalidInput("layers", layers, ">= 1, or 0 for those of the suite")
    chosen = named(suites)
    for suite in chosen:
        require(suite.needs, "hf")
    if plots is not None:
        require(("matplotlib",), "bench")
        make_folder("plots", plots)
    names = tuple(suite.name for suite in chosen)
    if (model or layers or points) and not any(suite.needs for suite in chosen):
        raise InvalidInput("suites", ", ".join(names), "one that measures models: neither a model, nor layers, nor points are of others")
    if ways and "decode" not in names:
        raise InvalidInput("suites", ", ".join(names), "decode, whose ways were named")
    if model:
        from attnops.bench.models import checked

        checked(model)
    places = tuple(Point.parse(p) for p in points.split(",")) if points else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, quiet_transformers():
        task = progress.add_task("measuring")

        def tell(what: str) -> None:
            progress.update(task, description=escape(what))

        setup = Setup(device_of(device), quick, model, layers, places, tuple(filter(None, ways.split(","))), backend=backend, tell=tell)
        reports = run_suites(chosen, setup, budget_s=budget_s, out=out, commit=commit, gpus=gpus)
    for report in reports.values():
        show(report, console)
    written = [str(out / f"{suite.stem}.json") for suite in chosen] if out is not None else []
    if plots is not None:
        written += [str(path) for suite in chosen if (path := draw(reports[suite.name], suite, plots / f"{suite.stem}.svg"))]
    if written:
        console.print(f"written: {', '.join(written)}", soft_wrap=True)
    return reports


def draw(report: dict[str, Any], suite: Suite, path: Path) -> Path | None:
    """Write the picture of a report; None where it has nothing to show."""
    from attnops.bench.plots import svg

    text = svg(report, suite.picture)
    if text:
        path.write_text(text)
    return path if text else None


def show(report: dict[str, Any], console: Console) -> None:
    """One table of a report: what was found of every case and way, and what was not."""
    ceilings = ", ".join(f"{name} {value:g}" for name, value in report.get("ceilings", {}).items())
    console.print(f"\n[bold]{report['suite']}[/] on {escape(report['device'])}, torch {report['torch']}, {report['seconds']:.0f} s", end="")
    console.print(f"; measured ceilings: {ceilings}" if ceilings else "", style="dim")
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in ("case", "way", "us", "spread", "of budget", ""):
        table.add_column(column, overflow="fold", justify="right" if column in ("us", "spread", "of budget") else "left")
    before = ""
    for row in report["rows"]:
        us, spread = ("" if (x := row.get(n)) is None else f"{x:,.1f}" for n in ("median_us", "spread_us"))
        share = f"{row['error'] / row['budget']:.0%}" if row.get("budget") and "error" in row else ""
        more = f"[red]{escape(row['wrong'])}[/]" if "wrong" in row else escape(", ".join(f"{k} {v}" for k, v in rest(row).items()))
        table.add_row(escape(row["case"]) if row["case"] != before else "", row["way"], us, spread, share, more)
        before = row["case"]
    console.print(table)
    for name, why in {**report.get("left_out", {}), **report.get("failed", {})}.items():
        console.print(f"[yellow]{escape(name)}[/]: {escape(why)}", soft_wrap=True)


def run_compare(console: Console, before: Path, after: Path) -> dict[str, Any]:
    """Compare two results files. Returns plain data: changes, regressions.

    Raises InvalidInput: a file is no results file, or they are not of one suite.
    """
    old, new = read(before), read(after)
    changes = compare(old, new)
    for name, report in ((str(before), old), (str(after), new)):
        console.print(f"{escape(name)}: {escape(stamp(report))}", soft_wrap=True)
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in ("case", "way", "figure", "before", "after", "after / before", ""):
        table.add_column(column, overflow="fold", justify="right" if column in ("before", "after", "after / before") else "left")
    for change in changes:
        values = ["" if x is None else f"{x:,g}" for x in (change.before, change.after, change.ratio)]
        color = "red" if change.worse else "green" if change.verdict in ("faster", "fewer", "right") else "dim"
        table.add_row(escape(change.case), escape(change.way), change.figure, *values, f"[{color}]{change.verdict}[/]")
    console.print(table)
    worse = [change for change in changes if change.worse]
    console.print(f"{len(worse)} of {len(changes)} figures are worse by more than the spread of both")
    return {"changes": [change.as_dict() for change in changes], "regressions": len(worse)}


def stamp(report: dict[str, Any]) -> str:
    """What a report was made with."""
    return ", ".join(f"{name} {str(report.get(name, '?'))[:40]}" for name in ("device", "torch", "commit", "date"))


FORM = ("case", "way", "median_us", "spread_us", "error", "budget", "wrong")


def rest(row: dict[str, Any]) -> dict[str, Any]:
    """What a row has besides what all rows have."""
    return {name: value for name, value in row.items() if name not in FORM}
