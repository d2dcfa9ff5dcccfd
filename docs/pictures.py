"""The pictures of measurements: each proves the sentence that is its title, from the rows of
`attnops bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plots import Bar, Dots, Words, bars, dots

from attnops.bench.files import Report
from attnops.bench.rows import Row

Reports = Mapping[str, Report]
"""The reports of a machine, by suite."""

OURS, EAGER, COMPILED = "attnops", "transformers", "transformers, compiled"
NAMES = {
    EAGER: ("hf", "hf_eager"),
    COMPILED: ("hf_static", "hf_compiled", "hf_tuned"),
    "vLLM": ("vllm",),
    "SGLang": ("sglang",),
}
UNCOMPILED = ("attnops_eager", "attnops_breakable")


def by_case(report: Report) -> dict[str, dict[str, Row]]:
    """Rows that have a time, by case and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in report.get("rows", ()):
        if row.get("median_us"):
            found.setdefault(row["case"], {})[row["way"]] = row
    return found


def compared(ways: Mapping[str, Row]) -> dict[str, Row]:
    """The fastest way of each of NAMES, and ours: what `patch(model)` gives without options, else
    our fastest compiled way."""
    whose = {name: [ways[way] for way in some if way in ways] for name, some in NAMES.items()}
    whose[OURS] = (
        [ways[OURS]]
        if OURS in ways
        else [row for way, row in ways.items() if way.startswith(OURS) and way not in UNCOMPILED]
    )
    return {
        name: min(rows, key=lambda row: row["median_us"]) for name, rows in whose.items() if rows
    }


def whole_models(report: Report) -> dict[str, dict[str, Row]]:
    """The compared ways by case, where ours and another one have a time. First calls of a process
    are another matter."""
    found = {
        case: compared(ways) for case, ways in by_case(report).items() if ", first call" not in case
    }
    return {case: ways for case, ways in found.items() if OURS in ways and len(ways) > 1}


def tokens_of(reports: Reports) -> tuple[str, dict[str, dict[str, Row]]]:
    """(suite, compared ways by case) of the first model of the suite `generate`, else of `decode`;
    ("", {}) without any."""
    for suite in ("generate", "decode"):
        if found := whole_models(reports.get(suite, {})):
            model = next(iter(found)).partition(" ")[0]
            return suite, {
                case: ways for case, ways in found.items() if case.partition(" ")[0] == model
            }
    return "", {}


def speed(ways: Mapping[str, Row]) -> float:
    """The time of the fastest of the others over ours."""
    return min(ms(row) for name, row in ways.items() if name != OURS) / ms(ways[OURS])


def ms(row: Row) -> float:
    return float(row["median_us"] / 1000)


def spoken(case: str, row: Row) -> str:
    """`llama 8x1k` in words, with the layers of a row of it."""
    model, _, sizes = case.partition(" ")
    batch, _, context = sizes.partition("x")
    words = (
        f", {batch} request{'s' * (batch != '1')} of {context} tokens" if context else f" {sizes}"
    )
    return f"{model}{layers(row)}{words}"


def layers(row: Row) -> str:
    return f", {row['layers']} layers" if "layers" in row else ""


def span(values: list[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def tokens(reports: Reports) -> str:
    """Milliseconds a token of one model, beside all others."""
    suite, cases = tokens_of(reports)
    if not cases:
        return ""
    share = span([100 / speed(ways) for ways in cases.values()], 0)
    engines = any(name not in (OURS, EAGER, COMPILED) for ways in cases.values() for name in ways)
    others = "the fastest alternative" if engines else "transformers' fastest way"
    calls = f"whole calls of generate(){' or an engine' * engines}, the prompt included"
    what = {"generate": calls, "decode": "a decode step over a filled cache"}[suite]
    words = Words(
        title=f"With attnops a token takes {share}% of the time of {others}",
        about=f"{reports[suite].get('device')}, {what}, random weights",
        unit="ms a token of each request; shorter is better",
    )
    lines = {
        case: [bar(named(name, row), ms(row), "ms") for name, row in ways.items()]
        for case, ways in cases.items()
    }
    return bars(words, [(spoken(case, cases[case][OURS]), some) for case, some in lines.items()])


def named(name: str, row: Row) -> str:
    """The name with the version of an engine."""
    return f"{name} {row['version']}" if "version" in row else name


def bar(name: str, value: float, unit: str) -> Bar:
    ours = name.startswith(OURS)
    return Bar(name, [("ours" if ours else "theirs", value)], f"{value:.1f} {unit}", ours)


def speeds(reports: Reports) -> str:
    """Times the speed of the fastest other way, of all models."""
    headings = {"decode": "One new token a request", "prefill": "Time to the first token"}
    cases = {suite: found for suite in headings if (found := whole_models(reports.get(suite, {})))}
    if not cases:
        return ""
    groups, every = [], []
    for suite, some in cases.items():
        lines = []
        for case, ways in some.items():
            every.append(speed(ways))
            text = f"{speed(ways):.2f}x, {ms(ways[OURS]):.1f} ms"
            lines.append(Bar(case + layers(ways[OURS]), [("ours", speed(ways))], text))
        groups.append((headings[suite], lines))
    words = Words(
        title=f"Steps are {span(every)} times as fast as transformers' eager or compiled ones",
        about=f"{reports[next(iter(cases))].get('device')}, random weights; 8x1k: 8 requests of "
        "1k tokens",
        unit="times the speed of the faster of the two; longer is better",
    )
    return bars(words, groups)


KINDS = {"us_matmul": "theirs", "us_attention": "ours", "us_glue": "glue", "us_gaps": "gaps"}
MEANING = [
    ("theirs", "matrix products"),
    ("ours", "attention"),
    ("glue", "other kernels"),
    ("gaps", "gaps"),
]


def parts(reports: Reports) -> str:
    """Where the time of a decode step goes."""
    report = reports.get("decode", {})
    groups, shares = [], []
    for case, ways in whole_models(report).items():
        spent = {
            name: {kind: ways[name][kind] / 1000 for kind in KINDS}
            for name in (COMPILED, OURS)
            if KINDS.keys() <= ways.get(name, {}).keys()
        }
        if len(spent) < 2:
            continue
        lines = []
        for name, times in spent.items():
            whole = sum(times.values())
            coloured = [(colour, times[kind]) for kind, colour in KINDS.items()]
            lines.append(
                Bar(
                    name,
                    coloured,
                    f"{whole - times['us_matmul']:.1f} of {whole:.1f} ms",
                    name == OURS,
                )
            )
        theirs, ours = (sum(times.values()) - times["us_matmul"] for times in spent.values())
        shares.append(100 * ours / theirs)
        groups.append((spoken(case, ways[OURS]), lines))
    if not groups:
        return ""
    words = Words(
        title=f"Outside matrix products a decode step takes {span(shares, 0)}% of the time of "
        "transformers' compiled one",
        about=f"{report.get('device')}, random weights, by torch's profiler. Behind a bar: ms "
        "outside matrix products, and of the step",
        unit="ms of a step; shorter is better",
        key=MEANING,
    )
    return bars(words, groups)


FIRST = {
    "hf_compiled": COMPILED,
    "attnops_piecewise": f"{OURS}, compiled",
    "attnops_breakable": f"{OURS}, not compiled",
}


def first_steps(reports: Reports) -> str:
    """Seconds until the first decode steps are done."""
    report = reports.get("decode", {})
    cases = {
        case: ways
        for case, ways in by_case(report).items()
        if all("first_s" in ways.get(way, ()) for way in FIRST)
    }
    if not cases:
        return ""
    theirs, soon = (
        span([ways[way]["first_s"] for ways in cases.values()], 0)
        for way in ("hf_compiled", "attnops_breakable")
    )
    words = Words(
        title=f"The first steps in graphs are done after {soon} s, those of transformers' "
        f"compiled model after {theirs} s",
        about=f"{report.get('device')}, empty compile caches. patch(model) takes graphs "
        "that need no compiler",
        unit="s until the first steps are done; shorter is better",
    )
    groups = [
        (
            spoken(case, ways["attnops_piecewise"]),
            [bar(name, ways[way]["first_s"], "s") for way, name in FIRST.items()],
        )
        for case, ways in cases.items()
    ]
    return bars(words, groups)


def choice(reports: Reports) -> str:
    """The time of the chosen kernel over that of the fastest, by kinds of calls."""
    report, rows = reports.get("kernels", {}), []
    for case, ways in by_case(report).items():
        if "automatic" in ways and len(ways) > 2:
            best = min(map(ms, ways.values()))
            over = {way: ms(row) / best for way, row in ways.items()}
            ours = over.pop("automatic")
            rows.append(
                Dots(
                    case,
                    list(over.values()),
                    ours,
                    f"{ways['automatic'].get('kernel')}, {ours:.2f}x",
                )
            )
    if not rows:
        return ""
    words = Words(
        title=f"The kernel that is chosen takes {span([row.ours for row in rows])} times as "
        "long as the fastest of all",
        about=f"{report.get('device')}. Filled: the choice. Rings: the other kernels, torch's "
        "functions, the vendors' own calls",
        unit="device time over that of the fastest; left is better",
    )
    return dots(words, rows)


PICTURES: dict[str, Callable[[Reports], str]] = {
    "tokens": tokens,
    "speeds": speeds,
    "parts": parts,
    "first_steps": first_steps,
    "choice": choice,
}
"""By the end of the file's name: the SVG of a machine's reports, "" where they lack its rows."""
