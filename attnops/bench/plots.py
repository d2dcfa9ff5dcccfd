"""A picture of a report: a line a case, a dot a way. SVG, small, and of the same bytes for the same rows."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

from attnops.bench.suites import Picture

STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "attnops", "font.size": 8, "font.sans-serif": ["DejaVu Sans"]}
MARKS = "osD^v<>P*Xphd"
OURS = "attnops"


def digest(report: Mapping[str, Any], picture: Picture) -> str:
    """Of what a picture shows; written into it, so that a stale one is found whatever version of matplotlib drew it."""
    shown = [report.get("device"), picture.figure, picture.title, picture.log, _points(report["rows"], picture)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def _points(rows: Iterable[Mapping[str, Any]], picture: Picture) -> dict[str, dict[str, float]]:
    """By way, the value of each case, both in order of appearance."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        value = row.get(picture.figure)
        if value and "wrong" not in row:
            found.setdefault(row["way"], {})[row["case"]] = value * picture.scale
    return found


def svg(report: Mapping[str, Any], picture: Picture) -> str:
    """The picture, or "" where no row has its figure. matplotlib is imported here."""
    points = _points(report["rows"], picture)
    if not points:
        return ""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(case for values in points.values() for case in values))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 1.1 + 0.24 * len(cases)), layout="constrained")
        axes = figure.add_subplot()
        for i, (way, values) in enumerate(points.items()):
            ours = way.startswith(OURS) or way == "automatic"
            color = f"C{i % 10}"
            axes.plot(
                list(values.values()), [cases.index(case) for case in values], MARKS[i % len(MARKS)], label=way, color=color,
                markersize=6 if ours else 5, markerfacecolor=color if ours else "none",
            )  # fmt: skip
        axes.set_yticks(range(len(cases)), cases)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.set_xlabel(f"{picture.unit} ({'more' if picture.more else 'less'} is better)")
        axes.set_title(f"{picture.title}: {report.get('device', '')}", loc="left")
        if picture.log:
            axes.set_xscale("log")
            axes.minorticks_off()
        else:
            axes.set_xlim(left=0)
        axes.grid(axis="both", linewidth=0.3)
        figure.legend(loc="outside lower center", ncols=min(4, len(points)), frameon=False)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Description": digest(report, picture)})
    # Lines end in spaces here and there, and a reader's editor would take them away.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
