"""The generated parts that `attnops bench` fills: tables and pictures of the results files that
have rows, one folder a machine."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from changed import sentence, share
from linears import shown
from pictures import (
    COMPILED,
    EAGER,
    NAMES,
    OURS,
    PICTURES,
    Report,
    Reports,
    Row,
    layers,
    ms,
    named,
    speed,
    spoken,
    tokens_of,
    whole_models,
)
from results import ROOT, machines, renewed, stamp, table

from attnops.bench.engines import ENGINES
from attnops.bench.rows import Rows, further as rest
from attnops.bench.run import SUITES

NONE = (
    "No results are committed yet: `attnops bench --out benchmarks/results/<machine>` writes them."
)
PLOTS = Path("docs") / "plots"


def measured(root: Path) -> Iterator[tuple[str, Reports]]:
    """(machine, its reports by suite in the order of the suites), of machines that have any."""
    for name, files in machines(root):
        shown = {
            s.name: files[s.stem]
            for s in SUITES
            if isinstance(files.get(s.stem, {}).get("rows"), list)
        }
        if shown:
            yield name, shown


def pictures(root: Path) -> Iterator[tuple[str, Path, str]]:
    """(machine, file, SVG) of every picture that the results of a GPU ask for; on a CPU there is
    little to see."""
    for machine, reports in measured(root):
        for name, draw in PICTURES.items() if machine != "cpu" else ():
            if svg := draw(reports):
                yield machine, PLOTS / f"{machine}-{name}.svg", svg


def title(svg: str) -> str:
    """The sentence that a picture proves."""
    return unescape(svg.split("<title>")[1].split("</title>")[0])


def stale_plots(root: Path, check: bool) -> Iterator[str]:
    """The pictures that are not those of the results; drawn or taken away unless `check`."""
    wanted = {root / path: svg for _, path, svg in pictures(root)}
    for path, svg in wanted.items():
        yield from renewed(path, svg, root, check)
    for path in sorted(set((root / PLOTS).glob("*.svg")) - wanted.keys()):
        yield str(path.relative_to(root))
        if not check:
            path.unlink()


def picture(root: Path = ROOT) -> str:
    """README's picture with its caption: `tokens` of the first machine that has it."""
    drawn = {
        machine: (path, svg)
        for machine, path, svg in pictures(root)
        if path.stem == f"{machine}-tokens"
    }
    for machine, reports in measured(root):
        if machine in drawn:
            path, svg = drawn[machine]
            return (
                f"![{title(svg)}]({path})\n\n{tokens_table(reports)}\n\n{caption(machine, reports)}"
            )
    return NONE


def tokens_table(reports: Reports) -> str:
    """The figures of README's picture, and the first call of a process where it was measured. An
    engine's has its imports in it."""
    suite, cases = tokens_of(reports)
    calls = (
        row
        for row in reports[suite]["rows"]
        if ", first call" in row["case"] and row["way"] not in ENGINES
    )
    first = {row["way"]: f"{row['first_s']:.1f}" for row in calls if "first_s" in row}
    rows = []
    for name in dict.fromkeys(name for ways in cases.values() for name in ways):
        some = next(ways[name] for ways in cases.values() if name in ways)
        times = (f"{ms(ways[name]):.1f}" if name in ways else "-" for ways in cases.values())
        rows.append([named(name, some), *times, first.get(some["way"], "-")])
    return table(
        [
            "ms a token",
            *(spoken(case, {}).partition(", ")[2] for case in cases),
            "first call of a process, s",
        ],
        rows,
    )


def caption(machine: str, reports: Reports) -> str:
    """The run that README's picture shows, its file, and the alternatives that it lacks."""
    suite, cases = tokens_of(reports)
    device, date, commit = (
        str(reports[suite].get(name, "?")) for name in ("device", "date", "commit")
    )
    what = {"generate": "Calls of `generate()`", "decode": "Decode steps"}[suite]
    links = f"[figures](benchmarks/results/{machine}/{suite}.json), [method](docs/performance.md)"
    run = f"{what} on one {device}, {date}, commit {commit[:10]}: {links}."
    lacks = [name for name in NAMES if not any(name in ways for ways in cases.values())]
    engines = {
        named(name, row): row["how"]
        for ways in cases.values()
        for name, row in ways.items()
        if "how" in row
    }
    timed = "".join(f" {name}: {how}." for name, how in engines.items())
    run += timed + (f" Not in that run: {', '.join(lacks)}." if lacks else "")
    return f"{run} {sentence(reports[suite])}."


def costs(root: Path = ROOT) -> str:
    """The suite `cliffs` of the first GPU that has it: its streams, or in a file of before the
    seconds that each change costs."""
    for machine, reports in measured(root):
        if machine != "cpu" and (report := reports.get("cliffs")) is not None:
            file = f"[cliffs.json](../benchmarks/results/{machine}/cliffs.json)"
            older = any("cost_s" in row for row in report["rows"])
            shown = single_changes(report) if older else streams(report)
            return f"{source(report)}, {file}.\n\n{shown}"
    return NONE


def single_changes(report: Report) -> str:
    """The older form: a call right after each change, and the same call again."""
    ways = list(dict.fromkeys(row["way"] for row in report["rows"]))
    changes: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        cost = f"{max(row['cost_s'], 0.0):.2f}" if "cost_s" in row else "-"
        changes.setdefault(str(row["case"]).split(", ", 1)[1], {})[row["way"]] = cost
    rows = [[change, *(cells.get(way, "-") for way in ways)] for change, cells in changes.items()]
    head = ["seconds that a change costs", *(f"`{way}`" for way in ways)]
    return (
        "That run has the older form of the suite: the first call after one change, less the same "
        f"call again, in a warm process.\n\n{table(head, rows)}"
    )


STREAM = ("median_us", "p99_us", "worst_us")


def streams(report: Report) -> str:
    """Milliseconds of the calls of each stream, beside those of the unpatched model."""
    hf = {row["case"]: row for row in report["rows"] if row["way"] == "hf"}
    rows = [
        [
            row["case"].rpartition(", ")[0],
            f"`{row['way']}`",
            row.get("wrong", cell(row.get("calls"))),
            *(milliseconds(row, figure) for figure in STREAM),
            *(milliseconds(hf.get(row["case"], {}), figure) for figure in STREAM),
            cell(row.get("over_s")),
            cell(row.get("stalls")),
        ]
        for row in report["rows"]
        if row["way"] != "hf"
    ]
    figures = ["median ms", "99% ms", "worst ms"]
    head = ["calls with", "way", "calls", *figures, *(f"`hf` {each}" for each in figures)]
    return table([*head, "most over `hf`, s", "over 0.3 s"], rows)


def milliseconds(row: Row, figure: str) -> str:
    return f"{row[figure] / 1000:.1f}" if figure in row else "-"


def pictures_full(root: Path = ROOT) -> str:
    """All pictures."""
    return (
        "\n\n".join(f"![{title(svg)}](plots/{path.name})" for _, path, svg in pictures(root))
        or NONE
    )


def performance_full(root: Path = ROOT) -> str:
    """Every row of every machine."""
    parts = []
    for machine, reports in measured(root):
        parts.append(f"## {next(iter(reports.values())).get('device', machine)}")
        before = ""
        for suite in SUITES:
            if suite.name not in reports:
                continue
            report = reports[suite.name]
            run = source(report)
            file = f"[{suite.stem}.json](../benchmarks/results/{machine}/{suite.stem}.json)"
            said = f"`{command(report)}`, {file}. {'The same run' if run == before else run}."
            parts.append(f"### {suite.name}: {suite.about}\n\n{said}\n\n{rows(report)}")
            before = run
            if out := {**report.get("left_out", {}), **report.get("failed", {})}:
                parts.append(
                    "Left out: " + "; ".join(f"{name} ({why})" for name, why in out.items()) + "."
                )
            for stem, other in further(root, machine, suite.stem):
                parts.append(f"Another run ({stem}.json): {source(other)}.\n\n{rows(other)}")
    return "\n\n".join(parts) or NONE


def source(report: Report) -> str:
    """The machine, the software, the commit and the ceilings of a run, and which kernels have
    changed since."""
    ceilings = ", ".join(f"{value:g} {name}" for name, value in words(report).items())
    run = stamp(report) + (f". Ceilings of that run: {ceilings}" if ceilings else "")
    return f"{run}. {sentence(report)}"


def command(report: Report) -> str:
    """The command that measures the figures of a report again."""
    gpus = f" --gpus {report['gpus']}" if report.get("gpus", 1) > 1 else ""
    engines = "".join(
        f" --engine {way}=PYTHON"
        for way in dict.fromkeys(row["way"] for row in report["rows"])
        if way in ENGINES
    )
    return (
        "attnops bench "
        f"{report['suite']}{' --quick' * (report.get('size') == 'quick')}{gpus}{engines} "
        "--out results"
    )


def further(root: Path, machine: str, stem: str) -> list[tuple[str, Report]]:
    """Other runs of a suite, e.g. decode_tuned.json beside decode.json: compared figures are in one
    file."""
    files = dict(machines(root))[machine]
    return [
        (name, data)
        for name, data in files.items()
        if name.startswith(f"{stem}_") and isinstance(data.get("rows"), list)
    ]


def words(report: Report) -> dict[str, float]:
    names = {
        "bandwidth_tb_s": "TB/s of a pass over memory",
        "matmul_tflop_s": "TFLOP/s of a matrix product",
    }
    return {names.get(name, name): value for name, value in report.get("ceilings", {}).items()}


def rows(report: Report) -> str:
    """The rows; a wrong result has no time and says why. Rows of counts, which have no time either,
    are a table of their own."""
    report = shown(report) if report.get("suite") == "linear" else report
    timed = [row for row in report["rows"] if "median_us" in row or "wrong" in row]
    counts = [row for row in report["rows"] if row not in timed]
    more, out = names(timed), []
    for row in timed:
        us = "-" if "median_us" not in row else f"{row['median_us']:,.1f}"
        us += f" ± {row['spread_us']:,.1f}" if "spread_us" in row else ""
        share = (
            f"{100 * row['error'] / row['budget']:.0f}%"
            if row.get("budget") and "error" in row
            else "-"
        )
        out.append(
            [
                row["case"],
                f"`{row['way']}`",
                row.get("wrong", us),
                share,
                *(cell(row.get(name)) for name in more),
            ]
        )
    tables = [table(["case", "way", "us", "error, of the budget", *more], out)] if timed else []
    if counts:
        found = [
            [row["case"], f"`{row['way']}`", *(cell(row.get(name)) for name in names(counts))]
            for row in counts
        ]
        tables.append(table(["case", "way", *names(counts)], found))
    return "\n\n".join(tables)


def names(some: Rows) -> list[str]:
    """The figures that not all rows of all suites have, in order of appearance."""
    return list(
        dict.fromkeys(
            name for row in some for name, value in rest(row).items() if not isinstance(value, dict)
        )
    )


def cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def performance_short(root: Path = ROOT) -> str:
    """Milliseconds of whole models, beside others': a row a machine and case."""
    found = [
        (machine, reports, suite, case, ways)
        for machine, reports in measured(root)
        for suite in ("generate", "decode", "prefill")
        for case, ways in whole_models(reports.get(suite, {})).items()
    ]
    names = [
        name
        for name in NAMES
        if name in (EAGER, COMPILED) or any(name in ways for *_, ways in found)
    ]
    out = []
    for machine, reports, suite, case, ways in found:
        ours = f"{time(ways[OURS])} (`{ways[OURS]['way']}`)"
        others = [time(ways.get(name)) for name in names]
        report = reports[suite]
        out.append(
            [
                machine,
                f"{suite} {case}{layers(ways[OURS])}",
                *others,
                ours,
                f"{speed(ways):.2f}x",
                share(report),
            ]
        )
    head = [
        "machine",
        "what",
        *(f"{name}, ms" for name in names),
        "attnops, ms",
        "speed, of the fastest other",
    ]
    head.append("kernels changed since")
    return table(head, out) if out else NONE


def time(row: Row | None) -> str:
    """Milliseconds, with their spread, and the version of an engine."""
    if row is None:
        return "-"
    text = f"{ms(row):.2f}" + (f" ± {row['spread_us'] / 1000:.2f}" if "spread_us" in row else "")
    return text + (f" ({row['version']})" if "version" in row else "")
