"""Bars and dots as SVG: text that can be searched, colours for light and dark pages, and the same
bytes for the same figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 760, 220, 124
"""Pixels of a picture, of the names beside its marks, and of the words behind them."""
# Okabe and Ito's colours, which colour-blind readers tell apart.
BOTH = {"glue": "#e69f00", "gaps": "#cc79a7"}
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#59636e",
    "ours": "#0072b2",
    "theirs": "#a6aeb8",
    **BOTH,
}
DARK = {
    "paper": "#0d1117",
    "ink": "#f0f6fc",
    "faint": "#9198a1",
    "ours": "#56b4e9",
    "theirs": "#6e7681",
    **BOTH,
}
FONT = "font:12px -apple-system,'Segoe UI','Liberation Sans',Arial,sans-serif"


class Bar(NamedTuple):
    """A line of a picture. parts: (colour, value), one behind the other. text: behind them. bold:
    the name."""

    name: str
    parts: Sequence[tuple[str, float]]
    text: str
    bold: bool = False


class Dots(NamedTuple):
    """A line of a picture: `ours` is the filled dot, `others` are rings."""

    name: str
    others: Sequence[float]
    ours: float
    text: str


class Words(NamedTuple):
    """title: the sentence that the picture proves. about: the line below it. unit: of the axis.
    key: (colour, its meaning)."""

    title: str
    about: str
    unit: str
    key: Sequence[tuple[str, str]] = ()


def bars(words: Words, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Bars under the heading of each group."""
    scale = (WIDTH - LEFT - RIGHT) / (
        most := max(sum(value for _, value in bar.parts) for _, some in groups for bar in some)
    )
    top, marks = _head(words)
    y = top
    for heading, some in groups:
        marks.append(_text(20, y + 16, heading, weight=600))
        y += 22
        for bar in some:
            x = float(LEFT)
            marks.append(
                _text(LEFT - 10, y + 14, bar.name, anchor="end", weight=600 if bar.bold else 400)
            )
            for colour, value in bar.parts:
                marks.append(
                    f'<rect class="{colour}" x="{x:.1f}" y="{y + 2}" width="{scale * value:.1f}" '
                    'height="16"/>'
                )
                x += scale * value
            marks.append(_text(x + 8, y + 14, bar.text))
            y += 21
        y += 6
    return _whole(
        words,
        [
            *_axis(
                {f"{value:g}": LEFT + scale * value for value in ticks(most)}, top, y, words.unit
            ),
            *marks,
        ],
        y,
    )


def dots(words: Words, rows: Sequence[Dots]) -> str:
    """A line of dots a row, over a logarithmic axis that begins at 1."""
    most = max(1.5, *(value for row in rows for value in (row.ours, *row.others)))
    top, marks = _head(words)
    y = top

    def place(value: float) -> float:
        return LEFT + 8 + log10(value) / log10(most) * (WIDTH - LEFT - RIGHT - 24)

    for row in rows:
        y += 21
        marks.append(_text(LEFT - 10, y, row.name, anchor="end"))
        marks += [
            f'<circle class="ring" cx="{place(value):.1f}" cy="{y - 4}" r="4"/>'
            for value in row.others
        ]
        marks.append(f'<circle class="ours" cx="{place(row.ours):.1f}" cy="{y - 4}" r="5"/>')
        marks.append(_text(WIDTH - RIGHT + 8, y, row.text))
    places = {
        f"{value:g}": place(value) for value in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if value <= most
    }
    return _whole(words, [*_axis(places, top, y + 10, words.unit), *marks], y + 10)


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, three to eight of them."""
    power = 10.0 ** floor(log10(most))
    step = next(share * power for share in (0.2, 0.5, 1.0, 2.0) if most / (share * power) <= 7)
    return [round(i * step, 9) for i in range(int(most / step) + 1)]


def _head(words: Words) -> tuple[int, list[str]]:
    """(where the first line of marks begins, the words above them)."""
    marks, y = [], 10
    for line in textwrap.wrap(words.title, 88):
        y += 20
        marks.append(_text(20, y, line, weight=700, size=16))
    for line in textwrap.wrap(words.about, 118):
        y += 18
        marks.append(_text(20, y, line, "faint"))
    if words.key:
        y += 18
        spans = "   ".join(
            f'<tspan class="{colour}">■</tspan> {escape(name)}' for colour, name in words.key
        )
        marks.append(f'<text class="faint" x="20" y="{y}" xml:space="preserve">{spans}</text>')
    return y + 8, marks


def _axis(places: dict[str, float], top: int, bottom: int, unit: str) -> Iterator[str]:
    for name, x in places.items():
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        yield _text(x, bottom + 16, name, "faint", anchor="middle")
    yield _text(LEFT, bottom + 34, unit, "faint")


def _text(
    x: float,
    y: int,
    text: str,
    colour: str = "ink",
    anchor: str = "start",
    weight: int = 400,
    size: int = 12,
) -> str:
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (
        f' font-weight="{weight}"' if weight != 400 else ""
    )
    more += f' font-size="{size}"' if size != 12 else ""
    return f'<text class="{colour}" x="{x:.1f}" y="{y}"{more}>{escape(text, quote=False)}</text>'


def _style(colours: dict[str, str]) -> str:
    """Text has an edge of the paper's colour, so that lines of the grid do not cross it."""
    fills = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in colours.items())
    edge = f".ink{{stroke:{colours['paper']};stroke-width:4px;paint-order:stroke}}"
    return (
        f"{fills}{edge}.ring{{fill:none;stroke:{colours['faint']}"
        f"}}.grid{{stroke:{colours['theirs']};stroke-opacity:.4}}"
    )


def _whole(words: Words, marks: Sequence[str], bottom: int) -> str:
    high, title = bottom + 46, escape(words.title, quote=False)
    size = f'viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" style="{FONT}">',
            f"<title>{title}</title>",
            f"<style>{_style(LIGHT)}@media (prefers-color-scheme:dark){{{_style(DARK)}}}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{high}" rx="6"/>',
            *marks,
            "</svg>\n",
        ]
    )
