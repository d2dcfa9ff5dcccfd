"""The generated parts that `attnops bench` fills: tables and pictures of the results files that have rows, one folder a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plots import PICTURES, Picture, digest, svg
from results import ROOT, machines, stamp, table

from attnops.bench.rows import further as rest
from attnops.bench.run import SUITES

NONE = "No results are committed yet: `attnops bench --out benchmarks/results/<machine>` writes them."
PLOTS = Path("docs") / "plots"


def measured(root: Path) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(machine, its reports by suite in the order of the suites), of machines that have any."""
    for name, files in machines(root):
        shown = {s.name: files[s.stem] for s in SUITES if isinstance(files.get(s.stem, {}).get("rows"), list)}
        if shown:
            yield name, shown


def pictures(root: Path) -> Iterator[tuple[Path, dict[str, Any], Picture]]:
    """(file, report, picture) of every picture that the results ask for."""
    for machine, reports in measured(root):
        for name, picture in PICTURES.items():
            report = reports.get(name)
            if report is not None and any(row.get(picture.figure) is not None for row in report["rows"]):
                yield root / PLOTS / f"{machine}-{name}.svg", report, picture


def stale_plots(root: Path, check: bool) -> Iterator[str]:
    """The pictures that do not show their report, or have none; drawn or taken away unless `check`."""
    wanted = {path: (report, picture) for path, report, picture in pictures(root)}
    for path, (report, picture) in wanted.items():
        if not path.exists() or digest(report, picture) not in path.read_text():
            yield str(path.relative_to(root))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(svg(report, picture))
    for path in sorted(set((root / PLOTS).glob("*.svg")) - wanted.keys()):
        yield str(path.relative_to(root))
        if not check:
            path.unlink()


def performance_full(root: Path = ROOT) -> str:
    """Every row of every machine."""
    drawn = {path.name: picture for path, _, picture in pictures(root)}
    parts = []
    for machine, reports in measured(root):
        parts.append(f"## {next(iter(reports.values())).get('device', machine)}")
        for suite in SUITES:
            if suite.name not in reports:
                continue
            report, picture = reports[suite.name], f"{machine}-{suite.name}.svg"
            ceilings = ", ".join(f"{value:g} {name}" for name, value in words(report).items())
            text = f"### {suite.name}: {suite.about}\n\n{stamp(report)}." + (f" Ceilings of that run: {ceilings}." if ceilings else "")
            text += f"\n\n![{drawn[picture].title}, {drawn[picture].unit}](plots/{picture})" if picture in drawn else ""
            parts.append(f"{text}\n\n{rows(report)}")
            if out := {**report.get("left_out", {}), **report.get("failed", {})}:
                parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in out.items()) + ".")
            for stem, other in further(root, machine, suite.stem):
                ceilings = ", ".join(f"{value:g} {name}" for name, value in words(other).items())
                parts.append(f"Another run ({stem}.json): {stamp(other)}. Ceilings of that run: {ceilings}.\n\n{rows(other)}")
    return "\n\n".join(parts) or NONE


def further(root: Path, machine: str, stem: str) -> list[tuple[str, dict[str, Any]]]:
    """Other runs of a suite, e.g. decode_tuned.json beside decode.json: compared figures are in one file."""
    files = dict(machines(root))[machine]
    return [(name, data) for name, data in files.items() if name.startswith(f"{stem}_") and isinstance(data.get("rows"), list)]


def words(report: dict[str, Any]) -> dict[str, float]:
    names = {"bandwidth_tb_s": "TB/s of a pass over memory", "matmul_tflop_s": "TFLOP/s of a matrix product"}
    return {names.get(name, name): value for name, value in report.get("ceilings", {}).items()}


def rows(report: dict[str, Any]) -> str:
    """The rows; a wrong result has no time and says why."""
    more = list(dict.fromkeys(name for row in report["rows"] for name in rest(row)))
    out = []
    for row in report["rows"]:
        us = "-" if "median_us" not in row else f"{row['median_us']:,.1f}"
        us += f" ± {row['spread_us']:,.1f}" if "spread_us" in row else ""
        share = f"{100 * row['error'] / row['budget']:.0f}%" if row.get("budget") and "error" in row else "-"
        out.append([row["case"], f"`{row['way']}`", row.get("wrong", us), share, *(cell(row.get(name)) for name in more)])
    return table(["case", "way", "us", "error, of the budget", *more], out)


def cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def performance_short(root: Path = ROOT) -> str:
    """Milliseconds of whole models, beside transformers': a row a machine and case."""
    out = []
    for machine, reports in measured(root):
        for suite in ("decode", "prefill"):
            for case, ways in by_case(reports.get(suite, {"rows": []})["rows"]).items():
                eager, theirs, ours = ways.get("hf_eager"), fastest(ways, "hf_"), fastest(ways, "attnops_")
                if ours is None:
                    continue
                ratio = f"{min(eager['median_us'], theirs['median_us']) / ours['median_us']:.2f}x" if eager and theirs else "-"
                what = f"{suite} {case}" + (f", {ours['layers']} layers" if "layers" in ours else "")
                out.append([machine, what, ms(eager), ms(theirs), f"{ms(ours)} (`{ours['way']}`)", ratio])
    head = ["machine", "what", "transformers, ms", "transformers, compiled, ms", "attnops, compiled, ms", "speed, of the faster of theirs"]
    return table(head, out) if out else NONE


def fastest(ways: dict[str, dict[str, Any]], whose: str) -> dict[str, Any] | None:
    """The row of the fastest way whose name begins so, without the eager one."""
    rows = [row for way, row in ways.items() if way.startswith(whose) and way != f"{whose}eager"]
    return min(rows, key=lambda row: row["median_us"], default=None)


def ms(row: dict[str, Any] | None) -> str:
    """Milliseconds, with their spread."""
    if row is None:
        return "-"
    return f"{row['median_us'] / 1000:.2f}" + (f" ± {row['spread_us'] / 1000:.2f}" if "spread_us" in row else "")


def by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows that have a time, by case and way."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row.get("median_us"):
            found.setdefault(row["case"], {})[row["way"]] = row
    return found
