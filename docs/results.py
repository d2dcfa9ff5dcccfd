"""The generated parts that show measured figures: tables of the files under benchmarks/results, one folder a machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from changed import CHANGED, SAME, TARGETS, UNKNOWN, sentence, since

from attnops.bench.choices import summary
from attnops.core.kernel import kernel_names
from attnops.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
NONE = "No results are committed yet: `make gpu-bench` and `make gpu-test` write them."


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


@cache
def _read(path: Path, changed: int) -> Any:
    """The file as it was when it last changed, read once: the tables ask for every machine a thousand times. No reader writes to it."""
    return json.loads(path.read_text())


def machines(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(folder name, its files by stem), the machines in order of name, GPUs first. A file that is no JSON object is left out."""
    folders = [f for f in (root / "benchmarks" / "results").glob("*") if f.is_dir() and f.name != "local"]
    for folder in sorted(folders, key=lambda f: (f.name == "cpu", f.name)):
        found = {}
        for path in sorted(folder.glob("*.json")):
            try:
                data = _read(path, path.stat().st_mtime_ns)
            except ValueError:
                continue
            if isinstance(data, dict):
                found[path.stem] = data
        if found:
            yield folder.name, found


def stamp(data: dict[str, Any]) -> str:
    """The device, the software and the commit of the figures."""
    device, torch, date, commit = (str(data.get(n, "?")) for n in ("device", "torch", "date", "commit"))
    device += f", {data['gpus']} side by side" if data.get("gpus", 1) > 1 else ""
    device += f", {data['threads']} threads" if "threads" in data else ""
    return ", ".join([device, f"torch {torch}", *data.get("packages", []), date, f"commit {commit[:10]}"])


GRIDS = ("numerics", "numerics_at_size")


def hardware(kernels: Iterable[str], root: Path = ROOT) -> dict[str, list[str]]:
    """The targets on which each `op.kernel` was compared with its reference, by the results that are committed; without those of none."""
    return {name: sorted(targets) for name, targets in compared(kernels, root).items() if targets}


def compared(kernels: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, str]]:
    """As `hardware`, with what became of the kernel's code on each target: SAME if one of the results is of today's."""
    found: dict[str, dict[str, str]] = {name: {} for name in sorted(kernels)}
    for data in (data for _, files in machines(root) for data in reports(files)):
        target = data.get("target") or TARGETS.get(str(data.get("device")))
        for name in (n for grid in GRIDS for n, figures in data.get(grid, {}).items() if figures["cases"]):
            if target and name in found:
                states = since(data, name, root), found[name].get(target, CHANGED)
                found[name][target] = next(state for state in (SAME, UNKNOWN, CHANGED) if state in states)
    return found


def reports(files: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the GPU tests, of all files of a machine."""
    return [files[stem] for stem in sorted(files) if stem.partition("-")[0] == "kernels"]


def devices(root: Path = ROOT) -> list[str]:
    """The GPUs that the results of `hardware` are of."""
    return sorted(
        {str(data["device"]) for _, files in machines(root) for stem, data in files.items() if stem.partition("-")[0] == "kernels"}
    )


def hardware_text(found: dict[str, list[str]]) -> str:
    """The file attnops/measured/hardware.json."""
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(targets)}" for name, targets in found.items()) + "\n}\n"


def left(figures: dict[str, Any]) -> int:
    """Cases that a kernel takes and the run did not: for time once, by a pairwise cover now."""
    return figures.get("left_out", 0) + figures.get("left_out_for_time", 0)


def spread(figures: dict[str, Any] | None) -> str:
    """Cases that ran, and those that were left out or refused."""
    if figures is None:
        return "-"
    more = [f"{count:,} {what}" for count, what in ((left(figures), "left out"), (figures["refused"], "refused")) if count]
    return f"{figures['cases']:,}" + (f" ({', '.join(more)})" if more else "")


def proven(data: dict[str, Any]) -> str:
    """The findings of the GPU tests, kernel by kernel; kernels that take no case there are listed below the table."""
    rows, idle = [], []
    for name, n in sorted(data.get("numerics", {}).items()):
        if not n["cases"]:
            idle.append(f"`{name}`")
            continue
        replay, large = data.get("replay", {}).get(name), data.get("numerics_at_size", {}).get(name)
        rows.append(
            [
                f"`{name}`", spread(n), str(n["wrong"]), f"{100 * n['worst_share_of_budget']:.0f}%", spread(large),
                "-" if large is None else f"{large['wrong']}, {100 * large['worst_share_of_budget']:.0f}%",
                str(data.get("opcheck", {}).get(name, "-")), "-" if replay is None else str(replay),
                since(data, name) or "same",
            ]
        )  # fmt: skip
    if not rows and (seen := data.get("distributed")):
        return table(["two GPUs against one", "found"], [[name, text] for name, text in sorted(seen.items())])
    head = ["kernel", "cases ran", "wrong", "worst error, of the budget", "at size", "wrong, worst", "opcheck calls"]
    text = table([*head, "captured, changed, replayed", "code since"], rows)
    figures = [f for grid in GRIDS for f in data.get(grid, {}).values()]
    ran, out = sum(f["cases"] for f in figures), sum(map(left, figures))
    text += f"\n\nOf the cases that these kernels take {ran:,} ran and {out:,} were left out"
    text += f": {why_left(data)}." if out else "."
    if tests := {outcome: count for outcome, count in data.get("tests", {}).items() if count}:
        text += "\n\nTests of this run: " + ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(tests.items())) + "."
    if failed := data.get("failed_tests"):
        text += f"\n\nTests that failed in this run: {', '.join(f'`{name}`' for name in failed)}."
    if skipped := data.get("skipped_tests"):
        text += "\n\nSkipped: " + "; ".join(f"{len(names)} because {brief(why)}" for why, names in sorted(skipped.items())) + "."
    if missing := data.get("not_run"):
        text += f"\n\nNot run: {', '.join(f'`{name}`' for name in missing)}."
    if cut := data.get("unfinished"):
        text += f"\n\nProcesses of this run that were ended before all their tests were: {', '.join(f'`{name}`' for name in cut)}."
    return text + (f"\n\nNo case of the grid runs there: {', '.join(idle)}." if idle else "")


def brief(text: str) -> str:
    """The start of a text, up to the end of a word."""
    return text if len(text) <= 160 else text[:160].rpartition(" ")[0]


def why_left(data: dict[str, Any]) -> str:
    """Why cases were left out, with their number, and where they are named."""
    counts: dict[str, int] = {}
    for reasons in data.get("left_out_cases", {}).values():
        for why, labels in reasons.items():
            counts[why] = counts.get(why, 0) + len(labels)
    late = sum(f.get("left_out_for_time", 0) for grid in GRIDS for f in data.get(grid, {}).values())
    said = [f"{count:,} because {why}" for why, count in sorted(counts.items())]
    said += [f"{late:,} for time, a random choice that this run did not write down"] if late else []
    return "; ".join(said) + ("; `left_out_cases` in kernels.json names them" if counts else "")


def direct(data: dict[str, Any]) -> str:
    """Our compiled ops against the vendors' calls."""
    rows = []
    for case, found in data.get("cases", {}).items():
        for name, figures in sorted(found["gpu"].items()):
            if name.startswith("eager.") or gone(name):  # rows of files from before the eager cache
                continue
            against = found.get("against", {}).get(name)
            more = "-" if against is None else f"{against['more_device_kernels']:+d}"
            ratio = "-" if against is None else f"{against['ratio']:.3f} of `{against['direct']}`"
            count = len(found.get("device_kernels", {}).get(name, []))
            rate = f"{figures['rate']:.4g} {found['unit']}"
            rows.append([case, f"`{name}`", f"{figures['median_us']:.1f}", rate, ratio, f"{count} ({more})"])
    text = table(["case", "call", "us", "rate", "time, as a share", "device kernels (more)"], rows)
    left_out = sorted({f"`{n}`: {why}" for c in data.get("cases", {}).values() for n, why in c.get("left_out", {}).items()})
    return text + ("\n\nLeft out: " + "; ".join(left_out) + "." if left_out else "")


VARIANTS = ("_bare", "_unplanned")
"""Of a kernel, at the end of its name."""


def gone(way: str) -> bool:
    """Is `op.fa3` a kernel that is no more?"""
    name = way.removeprefix("op.")
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name != way and name not in kernel_names()


def regret(data: dict[str, Any]) -> str:
    """How much slower the automatic choice is than the best."""
    rows = []
    for name, f in {**data["families"], "all": data["all"]}.items():
        rows.append([name, str(f["calls"]), *(cell(f.get(way)) for way, _ in WAYS), f"{f['automatic']['best_chosen']} of {f['calls']}"])
    text = table(["calls", "how many", *(f"{what}, mean / worst" for _, what in WAYS), "the best was chosen"], rows)
    return text + ("\n\nTimed at that commit; chosen later, by the table that ships." if data.get("again") else "")


def data_kernels(data: dict[str, Any]) -> str:
    """The kernels that move data, beside plain torch ops and a copy of as many bytes."""
    rows = []
    there = {case: found for case, found in data["cases"].items() if case.partition(" ")[0] in OPS}
    for case, found in there.items():
        gpu = found["gpu"]
        shown = [gpu.get(n) for n in ("triton", "compiled", "eager", "copy")]
        counts = "/".join(str(found["device_kernels"].get(n, 0)) for n in ("triton", "compiled", "eager"))
        share = f"{gpu['triton']['of_copy']:.2f}" if "of_copy" in gpu.get("triton", {}) else "-"
        rows.append([case, *("-" if f is None else f"{f['median_us']:.1f}" for f in shown), share, counts])
    head = ["us", "triton", "compiled", "eager", "copy", "triton, of copy", "device kernels of the first three"]
    left_out = len(data["cases"]) - len(there)
    more = f" Cases of ops that are gone and are left out: {left_out}." if left_out else ""
    return f"{table(head, rows)}\n\nThe start of a graph, {data['launch_us']:.1f} us, is in every figure.{more}"


def sanitizer(data: dict[str, Any]) -> str:
    """The findings of compute-sanitizer in our own kernels."""
    tools = [t for t in ("memcheck", "racecheck") if t in data]
    return table(["tool", "cases", "errors", "seconds"], [[t, *(str(data[t][n]) for n in ("cases", "errors", "seconds"))] for t in tools])


def mla(data: dict[str, Any]) -> str:
    """A decode step of DeepSeek-V3's attention layer, float8 latents, and the form that new tokens over a prefix take."""
    rows = []
    for case, f in data["layer"].items():
        us = f["us"]
        shown = [f"{us[n]['median_us']:.0f}" if n in us else "-" for n in ("layer", "kernel", "hf_eager", "hf_compiled")]
        direct = f"{f['kernel_over_best_direct']:.3f}" if "kernel_over_best_direct" in f else "-"
        floors = [f"{f[n]:.2f}" for n in ("kernel_over_floor", "layer_over_floor")]
        rows.append([case, *shown, direct, *floors, f"{100 * f['glue_share']:.0f}%"])
    head = ["decode step, us", "layer", "kernel", "transformers", "transformers compiled", "kernel over the vendors' own fastest"]
    text = table([*head, "kernel over floor", "layer over floor", "glue"], rows)
    rows = []
    for case, f in data["float8"].items():
        for name in f["us"]:
            rows.append([case, name, f"{f['us'][name]:.0f}", f"{100 * f['off_by'][name]:.2f}%"])
    text += "\n\n" + table(["layer over pages of", "latents, queries", "us", "relative error"], rows)
    rows = []
    for case, by_new in data["forms"].items():
        for new, f in sorted(by_new.items(), key=lambda item: int(item[0])):
            rows.append([case, new, *(f"{f['us'][n]:.0f}" for n in ("absorbed", "expanded")), f["chosen"], f"{f['regret_percent']:.0f}%"])
    text += "\n\n" + table(["prefix", "new tokens a request", "absorbed, us", "expanded, us", "chosen", "over the faster one"], rows)
    moved, product = (data["ceilings"][n] for n in ("bandwidth_tb_s", "matrix_tflop_s"))
    floor = f"The floor is that of {moved:.2f} TB/s and {product:.0f} TFLOP/s, the most that was seen in the same run."
    return f"{text}\n\n{floor}"


WAYS = (("automatic", "measured times"), ("by_estimates", "estimates alone"), ("by_powers_of_two", "sizes known to a power of two"))


def cell(f: dict[str, Any] | None) -> str:
    return "-" if not f or f.get("mean_percent") is None else f"{f['mean_percent']:.1f}% / {f['worst_percent']:.0f}%"


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
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
        shown = {s: files[s] for part in PARTS for s in files if s.partition("-")[0] == part and not isinstance(files[s].get("rows"), list)}
        if not shown:
            continue
        parts.append(f"## {next(iter(shown.values())).get('device', 'unknown device')}")
        for stem, data in shown.items():
            part, _, what = stem.partition("-")
            title, make = PARTS[part]
            parts.append(f"### {title}{f': {what}' if what else ''}\n\n{stamp(data)}. {sentence(data, root)}.\n\n{_made(make, data)}")
    return "\n\n".join(parts) or NONE


def _made(make: Callable[[dict[str, Any]], str], data: dict[str, Any]) -> str:
    try:
        return make(data)
    except (KeyError, TypeError) as error:
        return f"The file is of another form ({type(error).__name__}: {error})."


def results_short(root: Path = ROOT) -> str:
    """One row a machine."""
    rows = []
    for name, files in machines(root):
        try:
            rows += [row] if (row := _row(files)) else []
        except (KeyError, TypeError):
            rows.append([name, *["a file of another form"] * 6])
    over = ("automatic over the vendors' fastest call", "automatic over the best kernel, mean / worst")
    head = ["machine", "kernels right, of those that ran", "cases ran / left out", *over, "eager call", "kernels changed since"]
    return table(head, rows) if rows else NONE


def _row(files: dict[str, Any]) -> list[str]:
    shown = [files[s] for s in ("kernels", "kernel_times", "overhead") if s in files]
    if not shown:
        return []
    numerics: dict[str, Any] = {}
    for name, n in (pair for report in reports(files) for pair in report.get("numerics", {}).items()):
        numerics[name] = max(numerics.get(name, n), n, key=lambda f: f["cases"])
    ran = [n for n in numerics.values() if n["cases"]]
    figures = [f for report in reports(files) for grid in GRIDS for f in report.get(grid, {}).values()]
    cases = f"{sum(f['cases'] for f in figures):,} / {sum(map(left, figures)):,}" if ran else "-"
    good = sum(not n["wrong"] for n in ran)
    vendors, kernels = (_automatic_over(files.get("kernel_times", {"rows": []})["rows"], which) for which in (_direct, _ours))
    times = f"{vendors[0]:.2f} to {vendors[-1]:.2f}, median {statistics.median(vendors):.2f} of {len(vendors)} calls" if vendors else "-"
    over = f"{100 * sum(kernels) / len(kernels) - 100:.1f}% / {100 * kernels[-1] - 100:.0f}% of {len(kernels)} calls" if kernels else "-"
    eager = [r["median_us"] for r in files.get("overhead", {}).get("rows", []) if r["way"] == "function" and r["case"].startswith("eager")]
    cost = f"{eager[0]:.1f} us" if eager else "-"
    # The larger grid says more: the suite `regret` has many calls that the suite `kernels` does not time.
    choices = files.get("regret", {})
    timed = [row for row in choices.get("rows", ()) if "us" in row]
    every = next(summary("all", timed)) if timed else choices.get("all", {}).get("automatic")
    if every and (count := len(timed) or choices["all"]["calls"]) > len(kernels):
        over = f"{cell(every)} of {count} calls"
    found = [f"{good} of {len(ran)}" if ran else "-", cases, times, over, cost, changed(files)]
    return [] if set(found) == {"-"} else [str(shown[0].get("device", "?")), *found]


def changed(files: dict[str, Any]) -> str:
    """A cell: how many of the kernels that the GPU tests ran have other code now than in each of their results."""
    best: dict[str, str] = {}
    for report in reports(files):
        for name in (name for name, n in report.get("numerics", {}).items() if n["cases"]):
            best[name] = min(best.get(name, UNKNOWN), since(report, name), key=(SAME, CHANGED, UNKNOWN).index)
    if UNKNOWN in best.values():
        return UNKNOWN
    return f"{sum(map(bool, best.values()))} of {len(best)}" if best else "-"


def _direct(way: str) -> bool:
    return way.startswith("direct.")


def _ours(way: str) -> bool:
    return "." not in way and way not in ("automatic", "deterministic")


def _automatic_over(rows: list[dict[str, Any]], which: Callable[[str], bool]) -> list[float]:
    """The time of what was chosen over that of the fastest of some ways, for each case that has them, in order."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        if "median_us" in row:
            by_case.setdefault(row["case"], {})[row["way"]] = row["median_us"]
    found = []
    for ways in by_case.values():
        others = [us for way, us in ways.items() if which(way)]
        if others and "automatic" in ways:
            found.append(ways["automatic"] / min(others))
    return sorted(found)
