"""The generated parts that show measured figures: tables of the files under benchmarks/results, one
folder a machine."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from changed import CHANGED, GRIDS, SAME, TARGETS, UNKNOWN, listed, sentence, since

from attnops.bench.choices import summary
from attnops.bench.files import Report
from attnops.core.kernel import kernel_names
from attnops.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
NONE = "No results are committed yet: `make gpu-bench` and `make gpu-test` write them."

Cells = list[str]


def table(head: Cells, rows: Iterable[Cells]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def renewed(path: Path, text: str, root: Path, check: bool) -> Iterator[str]:
    """The path within the root if the file is not this text; it is written unless `check`."""
    if not path.exists() or path.read_text() != text:
        yield str(path.relative_to(root))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@cache
def _read(path: Path, changed: int) -> Any:
    """The file as it was when it last changed, read once: the tables ask for every machine a
    thousand times. No reader writes to it."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def machines(root: Path) -> Iterator[tuple[str, dict[str, Report]]]:
    """(folder name, its files by stem), the machines in order of name, GPUs first. A file that is
    no JSON object is left out."""
    folders = [
        f for f in (root / "benchmarks" / "results").glob("*") if f.is_dir() and f.name != "local"
    ]
    for folder in sorted(folders, key=lambda f: (f.name == "cpu", f.name)):
        files = {
            path.stem: _read(path, path.stat().st_mtime_ns)
            for path in sorted(folder.glob("*.json"))
        }
        if found := {stem: data for stem, data in files.items() if isinstance(data, dict)}:
            yield folder.name, found


def stamp(data: Report) -> str:
    """The device, the software and the commit of the figures."""
    device, torch, date, commit = (
        str(data.get(n, "?")) for n in ("device", "torch", "date", "commit")
    )
    device += f", {data['gpus']} side by side" if data.get("gpus", 1) > 1 else ""
    device += f", {data['threads']} threads" if "threads" in data else ""
    return ", ".join(
        [device, f"torch {torch}", *data.get("packages", []), date, f"commit {commit[:10]}"]
    )


def hardware(kernels: Iterable[str], root: Path = ROOT) -> dict[str, list[str]]:
    """The targets on which each `op.kernel` was compared with its reference, by the results that
    are committed; without those of none."""
    return {name: sorted(targets) for name, targets in compared(kernels, root).items() if targets}


def compared(kernels: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, str]]:
    """As `hardware`, with what became of the kernel's code on each target: SAME if one of the
    results is of today's."""
    found: dict[str, dict[str, str]] = {name: {} for name in sorted(kernels)}
    for data in reports_of_all(root):
        target = data.get("target") or TARGETS.get(str(data.get("device")))
        for name in (
            name
            for name, figures in numerics(data)
            if figures["cases"] and target and name in found
        ):
            states = since(data, name, root), found[name].get(target, CHANGED)
            found[name][target] = next(
                state for state in (SAME, UNKNOWN, CHANGED) if state in states
            )
    return found


def reports(files: dict[str, Report]) -> list[Report]:
    """Those of the GPU tests, of all files of a machine."""
    return [files[stem] for stem in sorted(files) if stem.partition("-")[0] == "kernels"]


def reports_of_all(root: Path) -> list[Report]:
    """Those of every machine."""
    return [report for _, files in machines(root) for report in reports(files)]


def numerics(data: Report) -> list[tuple[str, Report]]:
    """(`op.kernel`, its figures) of all grids of a run of the GPU tests."""
    return [pair for grid in GRIDS for pair in data.get(grid, {}).items()]


def devices(root: Path = ROOT) -> list[str]:
    """The GPUs that the results of `hardware` are of."""
    return sorted({str(data["device"]) for data in reports_of_all(root)})


def hardware_text(found: dict[str, list[str]]) -> str:
    """The file attnops/measured/hardware.json."""
    return (
        "{\n"
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(targets)}" for name, targets in found.items()
        )
        + "\n}\n"
    )


def left(figures: Report) -> int:
    """Cases that a kernel takes and the run did not: for time once, by a pairwise cover now."""
    return figures.get("left_out", 0) + figures.get("left_out_for_time", 0)


def spread(figures: Report | None) -> str:
    """Cases that ran, and those that were left out or refused."""
    if figures is None:
        return "-"
    more = [
        f"{count:,} {what}"
        for count, what in ((left(figures), "left out"), (figures["refused"], "refused"))
        if count
    ]
    return f"{figures['cases']:,}" + (f" ({', '.join(more)})" if more else "")


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def proven(data: Report) -> str:
    """The findings of the GPU tests, kernel by kernel; kernels that take no case there are listed
    below the table."""
    rows, idle = [], []
    for name, n in sorted(data.get("numerics", {}).items()):
        if not n["cases"]:
            idle.append(name)
            continue
        large = data.get("numerics_at_size", {}).get(name)
        wrong = (
            "-" if large is None else f"{large['wrong']}, {percent(large['worst_share_of_budget'])}"
        )
        counts = (str(data.get(part, {}).get(name, "-")) for part in ("opcheck", "replay"))
        shown = [
            spread(n),
            str(n["wrong"]),
            percent(n["worst_share_of_budget"]),
            spread(large),
            wrong,
            *counts,
        ]
        rows.append([f"`{name}`", *shown, since(data, name) or "same"])
    if not rows and (seen := data.get("distributed")):
        return table(
            ["two GPUs against one", "found"], [[name, text] for name, text in sorted(seen.items())]
        )
    head = [
        "kernel",
        "cases ran",
        "wrong",
        "worst error, of the budget",
        "at size",
        "wrong, worst",
        "opcheck calls",
    ]
    text = table([*head, "captured, changed, replayed", "code since"], rows)
    figures = [f for _, f in numerics(data)]
    ran, out = sum(f["cases"] for f in figures), sum(map(left, figures))
    text += f"\n\nOf the cases that these kernels take {ran:,} ran and {out:,} were left out"
    text += f": {why_left(data)}." if out else "."
    said = {
        "Tests of this run": ", ".join(
            f"{count:,} {outcome}"
            for outcome, count in sorted(data.get("tests", {}).items())
            if count
        ),
        "Tests that failed in this run": listed(data.get("failed_tests", ())),
        "Skipped": "; ".join(
            f"{len(names)} because {brief(why)}"
            for why, names in sorted(data.get("skipped_tests", {}).items())
        ),
        "Not run": listed(data.get("not_run", ())),
        "Processes of this run that were ended before all their tests were": listed(
            data.get("unfinished", ())
        ),
        "No case of the grid runs there": listed(idle),
    }
    return text + "".join(f"\n\n{what}: {which}." for what, which in said.items() if which)


def brief(text: str) -> str:
    """The start of a text, up to the end of a word."""
    return text if len(text) <= 160 else text[:160].rpartition(" ")[0]


def why_left(data: Report) -> str:
    """Why cases were left out, with their number, and where they are named."""
    counts = Counter[str]()
    for reasons in data.get("left_out_cases", {}).values():
        counts.update({why: len(labels) for why, labels in reasons.items()})
    late = sum(f.get("left_out_for_time", 0) for _, f in numerics(data))
    said = [f"{count:,} because {why}" for why, count in sorted(counts.items())]
    said += [f"{late:,} for time, a random choice that this run did not write down"] if late else []
    return "; ".join(said) + ("; `left_out_cases` in kernels.json names them" if counts else "")


def direct(data: Report) -> str:
    """Our compiled ops against the vendors' calls."""
    rows, left_out = [], set()
    for case, found in data.get("cases", {}).items():
        left_out |= {f"`{name}`: {why}" for name, why in found.get("left_out", {}).items()}
        for name, figures in sorted(found["gpu"].items()):
            if name.startswith("eager.") or gone(name):  # rows of files from before the eager cache
                continue
            more = ratio = "-"
            if against := found.get("against", {}).get(name):
                more = f"{against['more_device_kernels']:+d}"
                ratio = f"{against['ratio']:.3f} of `{against['direct']}`"
            count = len(found.get("device_kernels", {}).get(name, []))
            rate = f"{figures['rate']:.4g} {found['unit']}"
            rows.append(
                [case, f"`{name}`", f"{figures['median_us']:.1f}", rate, ratio, f"{count} ({more})"]
            )
    text = table(["case", "call", "us", "rate", "time, as a share", "device kernels (more)"], rows)
    return text + ("\n\nLeft out: " + "; ".join(sorted(left_out)) + "." if left_out else "")


def gone(way: str) -> bool:
    """Is `op.fa3`, or a variant as `op.fa3_bare`, a kernel that is no more?"""
    name = way.removeprefix("op.").removesuffix("_unplanned").removesuffix("_bare")
    return name != way and name not in kernel_names()


def regret(data: Report) -> str:
    """How much slower the automatic choice is than the best."""
    rows = []
    for name, f in {**data["families"], "all": data["all"]}.items():
        rows.append(
            [
                name,
                str(f["calls"]),
                *(cell(f.get(way)) for way in WAYS),
                f"{f['automatic']['best_chosen']} of {f['calls']}",
            ]
        )
    text = table(
        [
            "calls",
            "how many",
            *(f"{what}, mean / worst" for what in WAYS.values()),
            "the best was chosen",
        ],
        rows,
    )
    return text + (
        "\n\nTimed at that commit; chosen later, by the table that ships."
        if data.get("again")
        else ""
    )


def data_kernels(data: Report) -> str:
    """The kernels that move data, beside plain torch ops and a copy of as many bytes."""
    rows, ways = [], ("triton", "compiled", "eager", "copy")
    there = {case: found for case, found in data["cases"].items() if case.partition(" ")[0] in OPS}
    for case, found in there.items():
        gpu, counts = found["gpu"], found["device_kernels"]
        shown = [f"{gpu[way]['median_us']:.1f}" if way in gpu else "-" for way in ways]
        share = f"{gpu['triton']['of_copy']:.2f}" if "of_copy" in gpu.get("triton", {}) else "-"
        rows.append([case, *shown, share, "/".join(str(counts.get(way, 0)) for way in ways[:3])])
    left_out = len(data["cases"]) - len(there)
    more = f" Cases of ops that are gone and are left out: {left_out}." if left_out else ""
    text = table(["us", *ways, "triton, of copy", "device kernels of the first three"], rows)
    return f"{text}\n\nThe start of a graph, {data['launch_us']:.1f} us, is in every figure.{more}"


def sanitizer(data: Report) -> str:
    """The findings of compute-sanitizer in our own kernels."""
    head = ["tool", "cases", "errors", "seconds"]
    return table(
        head,
        [[t, *(str(data[t][n]) for n in head[1:])] for t in ("memcheck", "racecheck") if t in data],
    )


def mla(data: Report) -> str:
    """A decode step of DeepSeek-V3's attention layer, float8 latents, and the form that new tokens
    over a prefix take."""
    rows = []
    for case, f in data["layer"].items():
        us = f["us"]
        shown = [
            f"{us[n]['median_us']:.0f}" if n in us else "-"
            for n in ("layer", "kernel", "hf_eager", "hf_compiled")
        ]
        direct = f"{f['kernel_over_best_direct']:.3f}" if "kernel_over_best_direct" in f else "-"
        floors = [f"{f[n]:.2f}" for n in ("kernel_over_floor", "layer_over_floor")]
        rows.append([case, *shown, direct, *floors, percent(f["glue_share"])])
    head = [
        "decode step, us",
        "layer",
        "kernel",
        "transformers",
        "transformers compiled",
        "kernel over the vendors' own fastest",
    ]
    steps = table([*head, "kernel over floor", "layer over floor", "glue"], rows)
    float8 = table(
        ["layer over pages of", "latents, queries", "us", "relative error"],
        [
            [case, name, f"{us:.0f}", f"{100 * f['off_by'][name]:.2f}%"]
            for case, f in data["float8"].items()
            for name, us in f["us"].items()
        ],
    )
    forms = table(
        [
            "prefix",
            "new tokens a request",
            "absorbed, us",
            "expanded, us",
            "chosen",
            "over the faster one",
        ],
        [
            [
                case,
                new,
                *(f"{f['us'][n]:.0f}" for n in ("absorbed", "expanded")),
                f["chosen"],
                f"{f['regret_percent']:.0f}%",
            ]
            for case, by_new in data["forms"].items()
            for new, f in sorted(by_new.items(), key=lambda item: int(item[0]))
        ],
    )
    moved, product = (data["ceilings"][n] for n in ("bandwidth_tb_s", "matrix_tflop_s"))
    floor = (
        f"The floor is that of {moved:.2f} TB/s and {product:.0f} TFLOP/s, the most that was "
        "seen in the same run."
    )
    return "\n\n".join([steps, float8, forms, floor])


WAYS = {
    "automatic": "measured times",
    "by_estimates": "estimates alone",
    "by_powers_of_two": "sizes known to a power of two",
}


def cell(f: Report | None) -> str:
    return (
        "-"
        if not f or f.get("mean_percent") is None
        else f"{f['mean_percent']:.1f}% / {f['worst_percent']:.0f}%"
    )


PARTS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "kernels": ("Proven", proven),
    "direct": ("Against the vendors' own calls", direct),
    "mla": ("Attention over latents, a whole layer", mla),
    "data": ("What moves data", data_kernels),
    "sanitizer": ("Our Triton kernels under compute-sanitizer", sanitizer),
    "regret": ("The automatic choice against the best", regret),
}


def results_full(root: Path = ROOT) -> str:
    """Every committed figure."""
    parts = []
    for _, files in machines(root):
        shown = {
            s: files[s]
            for part in PARTS
            for s in files
            if s.partition("-")[0] == part and not isinstance(files[s].get("rows"), list)
        }
        if shown:
            parts.append(f"## {next(iter(shown.values())).get('device', 'unknown device')}")
        for stem, data in shown.items():
            part, _, what = stem.partition("-")
            title, make = PARTS[part]
            parts.append(
                f"### {title}{f': {what}' if what else ''}\n\n{stamp(data)}. "
                f"{sentence(data, root)}.\n\n{_made(make, data)}"
            )
    return "\n\n".join(parts) or NONE


def _made(make: Callable[[Report], str], data: Report) -> str:
    try:
        return make(data)
    except (KeyError, TypeError) as error:
        return f"The file is of another form ({type(error).__name__}: {error})."


def results_short(root: Path = ROOT) -> str:
    """One row a machine."""
    rows = []
    for name, files in machines(root):
        try:
            rows += _rows(files)
        except (KeyError, TypeError):
            rows.append([name, *["a file of another form"] * 6])
    over = (
        "automatic over the vendors' fastest call",
        "automatic over the best kernel, mean / worst",
    )
    head = [
        "machine",
        "kernels right, of those that ran",
        "cases ran / left out",
        *over,
        "eager call",
        "kernels changed since",
    ]
    return table(head, rows) if rows else NONE


def _rows(files: dict[str, Report]) -> list[Cells]:
    """The row of a machine, none without figures."""
    best: dict[str, Report] = {}
    figures = []
    for report in reports(files):
        figures += [f for _, f in numerics(report)]
        for name, n in report.get("numerics", {}).items():
            best[name] = max(best.get(name, n), n, key=lambda f: f["cases"])
    ran = [n for n in best.values() if n["cases"]]
    right = f"{sum(not n['wrong'] for n in ran)} of {len(ran)}" if ran else "-"
    cases = f"{sum(f['cases'] for f in figures):,} / {sum(map(left, figures)):,}" if ran else "-"
    timed = files.get("kernel_times", {"rows": []})["rows"]
    vendors, kernels = (_automatic_over(timed, which) for which in (_direct, _ours))
    times = (
        (
            f"{vendors[0]:.2f} to {vendors[-1]:.2f}, median {statistics.median(vendors):.2f} of "
            f"{len(vendors)} calls"
        )
        if vendors
        else "-"
    )
    over = (
        (
            f"{100 * sum(kernels) / len(kernels) - 100:.1f}% / {100 * kernels[-1] - 100:.0f}% of "
            f"{len(kernels)} calls"
        )
        if kernels
        else "-"
    )
    rows = files.get("overhead", {}).get("rows", ())
    cost = next(
        (
            f"{r['median_us']:.1f} us"
            for r in rows
            if r["way"] == "function" and r["case"].startswith("eager")
        ),
        "-",
    )
    # The larger grid says more: the suite `regret` has many calls that the suite `kernels` does not
    # time.
    choices = files.get("regret", {})
    chosen = [row for row in choices.get("rows", ()) if "us" in row]
    every = next(summary("all", chosen)) if chosen else choices.get("all", {}).get("automatic")
    if every and (count := len(chosen) or choices["all"]["calls"]) > len(kernels):
        over = f"{cell(every)} of {count} calls"
    found = [right, cases, times, over, cost, changed(files)]
    device = next(
        (
            files[s].get("device", "?")
            for s in ("kernels", "kernel_times", "overhead")
            if s in files
        ),
        None,
    )
    return [] if device is None or {*found} == {"-"} else [[str(device), *found]]


def changed(files: dict[str, Report]) -> str:
    """A cell: how many of the kernels that the GPU tests ran have other code now than in each of
    their results."""
    best: dict[str, str] = {}
    for report in reports(files):
        for name in (name for name, n in report.get("numerics", {}).items() if n["cases"]):
            best[name] = min(
                best.get(name, UNKNOWN), since(report, name), key=(SAME, CHANGED, UNKNOWN).index
            )
    if UNKNOWN in best.values():
        return UNKNOWN
    return f"{sum(map(bool, best.values()))} of {len(best)}" if best else "-"


def _direct(way: str) -> bool:
    return way.startswith("direct.")


def _ours(way: str) -> bool:
    return "." not in way and way not in ("automatic", "deterministic")


def _automatic_over(rows: Iterable[Report], which: Callable[[str], bool]) -> list[float]:
    """The time of what was chosen over that of the fastest of some ways, for each case that has
    both, in order."""
    chosen, fastest = dict[str, float](), defaultdict[str, float](lambda: float("inf"))
    for row in rows:
        case, way, us = row["case"], row["way"], row.get("median_us")
        if us is None:
            continue
        if way == "automatic":
            chosen[case] = us
        elif which(way):
            fastest[case] = min(fastest[case], us)
    return sorted(us / fastest[case] for case, us in chosen.items() if case in fastest)
