"""`attnops bench`: suites of measurements of this machine, and the comparison of two results
files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from attnops.bench import Setup
from attnops.bench.files import Report, compare, read
from attnops.bench.rows import further
from attnops.bench.run import Suite, named, run as run_suites
from attnops.bench.ways import WAYS
from attnops.cli.tables import Data, new_table
from attnops.configs import quiet_transformers
from attnops.core.errors import InvalidInput

ENGINES = {"decode", "first_token", "generate"}
"""The suites that measure other engines beside."""


def run(
    console: Console,
    suites: tuple[str, ...],
    setup: Setup,
    *,
    budget_s: float = 400.0,
    out: Path | None = None,
    commit: str = "",
    gpus: int = 1,
) -> dict[str, Report]:
    """Measure, with progress and tables on `console`. Options of the command and of
    `attnops.bench.run.run`; () is the usual suites.

    Returns the reports by suite.

    Raises InvalidInput: a value that is unknown, does not fit the suites or exceeds the machine.
    """
    if not 0 < budget_s < float("inf"):
        raise InvalidInput("budget_s", budget_s, "a finite number > 0 of seconds")
    if setup.layers < 0:
        raise InvalidInput("layers", setup.layers, ">= 1, or 0 for those of the suite")
    chosen = named(suites)
    if lacking := unmet(setup, chosen):
        raise InvalidInput("suites", ", ".join(suite.name for suite in chosen), lacking)
    with console.status("measuring") as status, quiet_transformers():
        reports = run_suites(
            chosen,
            setup,
            budget_s=budget_s,
            out=out,
            commit=commit,
            gpus=gpus,
            tell=lambda case: status.update(escape(case)),
        )
    for report in reports.values():
        show(report, console)
    if out is not None:
        console.print(
            f"written: {', '.join(str(out / f'{suite.stem}.json') for suite in chosen)}",
            soft_wrap=True,
        )
    return reports


def unmet(setup: Setup, suites: tuple[Suite, ...]) -> str:
    """The suites that options ask for and that none of these is; "" is none."""
    names = {suite.name for suite in suites}
    if (setup.model or setup.layers or setup.points) and not any(suite.models for suite in suites):
        return "one that measures models, for --model, --layers and --points"
    if setup.ways and not names & WAYS.keys():
        return f"one of {', '.join(sorted(WAYS))}, for --ways"
    if setup.engines and not names & ENGINES:
        return f"one of {', '.join(sorted(ENGINES))}, for --engine"
    return ""


def show(report: Report, console: Console) -> None:
    """Print a row for every case and way, then the cases that were left out or failed."""
    ceilings = ", ".join(f"{name} {value:g}" for name, value in report.get("ceilings", {}).items())
    console.print(
        f"\n[bold]{report['suite']}[/] on {escape(report['device'])}, torch {report['torch']}, "
        f"{report['seconds']:.0f} s",
        end="",
    )
    console.print(f"; measured ceilings: {ceilings}" if ceilings else "", style="dim")
    table = new_table(
        "case", "way", "us", "spread", "of budget", "", numbers=("us", "spread", "of budget")
    )
    for before, row in zip(({"case": ""}, *report["rows"]), report["rows"], strict=False):
        us, spread = (
            "" if (x := row.get(n)) is None else f"{x:,.1f}" for n in ("median_us", "spread_us")
        )
        share = (
            f"{row['error'] / row['budget']:.0%}" if row.get("budget") and "error" in row else ""
        )
        more = (
            f"[red]{escape(row['wrong'])}[/]"
            if "wrong" in row
            else escape(", ".join(f"{k} {v}" for k, v in further(row).items()))
        )
        table.add_row(
            escape(row["case"]) if row["case"] != before["case"] else "",
            row["way"],
            us,
            spread,
            share,
            more,
        )
    console.print(table)
    for name, why in {**report.get("left_out", {}), **report.get("failed", {})}.items():
        console.print(f"[yellow]{escape(name)}[/]: {escape(why)}", soft_wrap=True)


def run_compare(console: Console, before: Path, after: Path) -> Data:
    """Compare two results files. Returns plain data. Raises InvalidInput: a file is no results
    file, or they are not of one suite."""
    old, new = read(before), read(after)
    changes = compare(old, new)
    for path, report in ((before, old), (after, new)):
        stamp = ", ".join(
            f"{name} {str(report.get(name, '?'))[:40]}"
            for name in ("device", "torch", "commit", "date")
        )
        console.print(f"{escape(str(path))}: {escape(stamp)}", soft_wrap=True)
    table = new_table(
        "case",
        "way",
        "before",
        "after",
        "after / before",
        "",
        numbers=("before", "after", "after / before"),
    )
    for change in changes:
        values = [
            "" if (x := change[name]) is None else f"{x:,g}"
            for name in ("before", "after", "ratio")
        ]
        color = (
            "red"
            if change["worse"]
            else "green"
            if change["change"] in ("faster", "right")
            else "dim"
        )
        table.add_row(
            escape(change["case"]),
            escape(change["way"]),
            *values,
            f"[{color}]{change['change']}[/]",
        )
    console.print(table)
    worse = sum(change["worse"] for change in changes)
    console.print(f"{worse} of {len(changes)} rows are worse by more than the spread of both")
    return {"changes": changes, "regressions": worse}
