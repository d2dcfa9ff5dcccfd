"""The plot of a report: a line a case, a dot a way. SVG, small, and byte-identical for the same rows."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Picture(NamedTuple):
    """The plot of a suite: figure `figure` of its rows times `scale`, in `unit`. log: its axis. more: higher is better."""

    figure: str
    unit: str
    title: str
    scale: float = 1.0
    log: bool = False
    more: bool = True


SPEED = Picture("of_hf_compiled", "times the speed of transformers' compiled model", "Decode")
COLD = Picture("median_us", "s", "First call of a decode step", 1e-6, log=True, more=False)
PICTURES = {
    "kernels": Picture("of_ceiling", "share of the measured ceiling", "Kernels"),
    "decode": SPEED,
    "prefill": SPEED._replace(title="Time to the first token"),
    "compile": COLD,
    "graphs": COLD._replace(title="Capture of all buckets"),
    "data": Picture("of_copy", "times the speed of a copy of as many bytes", "Moving data"),
    "gradients": Picture("of_flash2", "times the speed of FlashAttention-2 in torch", "Training steps"),
    "generate": SPEED._replace(figure="of_hf", unit="times the speed of transformers", title="generate()"),
    "latent": Picture("of_hf_eager", "times the speed of transformers' eager layer", "A layer over latents"),
    "cliffs": Picture("cost_s", "s", "The cost of a change", more=False),
    "overhead": Picture("median_us", "us", "Host time", log=True, more=False),
    "regret": Picture("mean_percent", "% over the best kernel, mean", "The automatic choice", more=False),
}
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "attnops", "font.size": 8, "font.sans-serif": ["DejaVu Sans"]}
MARKS = "osD^v<>P*Xphd"


def digest(report: Mapping[str, Any], picture: Picture) -> str:
    """A hash of the plotted data, written into the file: stale plots are found whatever version of matplotlib drew them."""
    shown = [report.get("device"), picture.figure, picture.title, picture.log, _points(report, picture)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def _points(report: Mapping[str, Any], picture: Picture) -> dict[str, dict[str, float]]:
    """The value of each case by way, both in order of appearance."""
    found: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        if (value := row.get(picture.figure)) is not None and "wrong" not in row:
            found.setdefault(row["way"], {})[row["case"]] = value * picture.scale
    return found


def svg(report: Mapping[str, Any], picture: Picture) -> str:
    """The plot; "" if no row has its figure."""
    points = _points(report, picture)
    if not points:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(case for values in points.values() for case in values))
    with matplotlib.rc_context(STYLE):
        figure, out = Figure(figsize=(7.0, 1.1 + 0.24 * len(cases)), layout="constrained"), io.StringIO()
        axes = figure.add_subplot(xlabel=f"{picture.unit} ({'more' if picture.more else 'less'} is better)")
        for i, (way, values) in enumerate(points.items()):
            ours, color = way.startswith("attnops") or way == "automatic", f"C{i % 10}"
            filled: Any = {"markersize": 6 if ours else 5, "markerfacecolor": color if ours else "none"}
            axes.plot(list(values.values()), list(map(cases.index, values)), MARKS[i % len(MARKS)], label=way, color=color, **filled)
        axes.set_yticks(range(len(cases)), cases)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.set_title(f"{picture.title}: {report.get('device', '')}", loc="left")
        if picture.log:
            axes.set_xscale("log")
            axes.minorticks_off()
        else:
            axes.set_xlim(left=min(0.0, *(value for values in points.values() for value in values.values())))
        axes.grid(axis="both", linewidth=0.3)
        figure.legend(loc="outside lower center", ncols=min(4, len(points)), frameon=False)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Description": digest(report, picture)})
    # Editors strip trailing spaces, which matplotlib writes.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
