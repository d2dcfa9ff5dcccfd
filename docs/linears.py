"""Measured times of linears: those in the tables that ship, for docs/linear.md, and the suite's
rows that docs/performance.md shows."""

from __future__ import annotations

from pathlib import Path

from changed import Report, sentence
from results import ROOT, table

from attnops.measured import Grid, Sizes, work
from attnops.measured.cost import RATES
from attnops.measured.table import from_json
from attnops.ops.linear.counted import PARTS
from attnops.ops.linear.timed import MODELS

NONE = "No table that ships has times of linears yet: `attnops tune --ops linear` measures them."
ROWS = (1, 8, 32, 64)


def linears_full(root: Path = ROOT) -> str:
    """A table a GPU."""
    parts = []
    for path in sorted((root / "attnops" / "tables").glob("*.json")):
        found = from_json(path.read_text())
        if grids := [grid for grid in found.grids if grid.kind.out_features]:
            said = (
                f"**{found.gpu}**, `triton` / `aten` in us, and the share of the bandwidth of "
                "the faster"
            )
            parts.append(
                f"{said}. {sentence(of_linears(found.made))}.\n\n{times(found.gpu, grids)}"
            )
    return "\n\n".join(parts) or NONE


def of_linears(made: Report) -> Report:
    """The digests of a table of measured times, of its linears alone."""
    return (
        {"code": {name: code for name, code in made["code"].items() if name.startswith("linear.")}}
        if "code" in made
        else {}
    )


def times(gpu: str, grids: list[Grid]) -> str:
    """A row a kind of call."""
    rows = []
    for grid in grids:
        kind = grid.kind
        users = [
            f"{model} {name}"
            for model, some in MODELS.items()
            for name, one in some.items()
            if one == kind
        ]
        parts = " + ".join(word for part, word in PARTS.items() if part in kind.asks)
        rows.append(
            [
                f"{kind.out_features} x {kind.in_features}",
                parts or "-",
                ", ".join(users),
                *(cell(gpu, grid, n) for n in ROWS),
            ]
        )
    return table(["weight", "around it", "of", *(f"{n} row{'s' * (n > 1)}" for n in ROWS)], rows)


def cell(gpu: str, grid: Grid, rows: int) -> str:
    """Both times, and of the faster the weight's bytes over its time as a share of the GPU's
    bandwidth."""
    at = Sizes(float(rows), 1.0, 1.0)
    us = {name: grid.at(name, at) for name in ("triton", "aten")}
    found = [t for t in us.values() if t is not None]
    if len(found) < 2 or at.batch not in grid.batch:
        return "-"
    weight = work(grid.kind, Sizes(0.0, 1.0, 1.0)).bytes
    share = (
        f", {100 * weight / min(found) / 1e6 / RATES[gpu].bandwidth:.0f}%" if gpu in RATES else ""
    )
    return " / ".join(f"**{t:.4g}**" if t == min(found) else f"{t:.4g}" for t in found) + share


def shown(report: Report) -> Report:
    """A report of the suite with the choices at some numbers of rows, and how good all choices are;
    the file has the other rows."""
    rows = []
    for row in report["rows"]:
        if "us" in row and int(row["case"].rpartition("x")[2]) in ROWS:
            others = {f"{name}_us": us for name, us in row["us"].items()}
            rest = {name: value for name, value in row.items() if name not in ("us", "chosen")}
            rows.append({**rest, "kernel": row["chosen"].get("automatic"), **others})
        elif "mean_percent" in row or "wrong" in row:
            rows.append(row)
    return {**report, "rows": rows}
