"""Output of the commands: the console, the style of tables, and the table of an explanation."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnops.core.problem import Refusal
from attnops.core.select import Decision
from attnops.lowering.explain import Explanation

PIPE_COLUMNS = 120

Data = dict[str, Any]
"""What a command found, as --json prints it."""


def new_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or of PIPE_COLUMNS characters in a pipe or a log."""
    console = Console(stderr=stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, highlight=False, width=PIPE_COLUMNS)
    )


def new_table(
    *columns: str,
    numbers: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    show_header: bool = True,
) -> Table:
    """A table. numbers: columns aligned to the right. whole: columns that are never folded."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=show_header)
    for column in columns:
        table.add_column(
            column,
            overflow="fold",
            no_wrap=column in whole,
            justify="right" if column in numbers else "left",
        )
    return table


def refusal(r: Refusal) -> dict[str, str]:
    """A refusal as plain data."""
    return {"field": r.field, "got": str(r.got).removeprefix("torch."), "want": r.want}


def show_explanation(explanation: Explanation, console: Console, heading: str = "") -> None:
    """Print a table a call site: the chosen kernel, then every other kernel of the op with the
    reasons against it."""
    assumed = (
        ""
        if explanation.assumed is None
        else f", assuming packages: {', '.join(explanation.assumed) or 'none'}"
    )
    console.print(f"[bold]{escape(heading or 'explain')}[/] on {explanation.target}{assumed}")
    if explanation.times:
        console.print(explanation.times, style="dim")
    for site in explanation.sites:
        op = site.decision.problem.op
        console.print(f"\n[bold]{escape(site.where)}[/]  x{site.count}  [bold]{op}[/]")
        console.print(escape(site.decision.problem.summary()), style="dim")
        console.print(_decision(site.decision))
    if not explanation.sites:
        console.print("the model made no attnops call")
    console.print()


def _decision(decision: Decision) -> Table:
    table = new_table("kernel", "", "field", "got", "wanted", whole=("kernel",))
    if decision.kernel is not None:
        judged = f": {decision.by_judge}" if decision.by_judge else ""
        colour = "red" if judged else "green"
        name = decision.kernel.name
        table.add_row(
            f"[bold {colour}]{name}[/]",
            f"[{colour}]chosen{judged}[/]{decision.measured}{decision.untried(name)}"
            f"{escape(decision.build)}",
        )
    else:
        table.add_row("[bold red]none[/]", "[red]no kernel takes this call[/]")
    for name in decision.passed_over:
        table.add_row(name, decision.why_not(name) + decision.untried(name))
    for name, reasons in decision.refused.items():
        for i, r in enumerate(map(refusal, reasons)):
            table.add_row(
                "" if i else name,
                "" if i else "[yellow]refuses[/]",
                r["field"],
                escape(r["got"]),
                escape(r["want"]),
            )
    return table
