"""The generated part of docs/models.md: the findings of `make census`, from
benchmarks/results/cpu/census.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict

from changed import Report, sentence
from results import ROOT, table

FILE = ROOT / "benchmarks" / "results" / "cpu" / "census.json"
WORDS = {
    "ok": "ok",
    "chosen": "ok, as transformers' own choice",
    "refused": "refused",
    "eager": "not done by eager either",
    "wrong": "wrong",
}


def census_full() -> str:
    """Counts, then every type: those that ran, those that patch() refuses, those that were not run
    or built."""
    if not FILE.exists():
        return "No census is committed yet: `make census` writes it."
    data = json.loads(FILE.read_text())
    types, counts = data["types"], data["counts"]
    made = (
        f"transformers {data['transformers']}, torch {data['torch']}, {data['date']}, commit "
        f"{data['commit'][:10]}"
    )
    numbers = ", ".join(
        f"{counts['checks'].get(status, 0)} {word}" for status, word in WORDS.items()
    )
    states = {
        state: {n: t for n, t in types.items() if t["state"] == state}
        for state in ("ran", "refused", "unrun", "unbuilt")
    }
    without = [f"`{n}`" for n, found in states["ran"].items() if not found["compiled"]]
    inductor = ", ".join(
        f"`{n}`" for n, found in states["ran"].items() if "inductor" in found["compiled"]
    )
    left_out = (
        (
            f" The `compile` checks did not run for {len(without)} of these types: "
            f"{', '.join(without)}."
        )
        if without
        else ""
    )
    through = f"{left_out} Through Inductor: {inductor or 'none'}."
    parts = [
        f"{made}. {sentence(data)}. {len(types)} types: {len(states['ran'])} ran, "
        f"{len(states['refused'])} are refused by `patch`, for "
        f"{len(states['unrun'])} no input is known, {len(states['unbuilt'])} were not built. "
        f"Checks: {numbers}.{through}{by_tests(data)}",
        "## Types that ran\n\n"
        + table(
            [
                "type",
                "class",
                "patched",
                *("ok", "as chosen", "refused", "eager", "wrong"),
                "remarks",
            ],
            [
                [
                    f"`{name}`",
                    found["cls"] or "-",
                    f"{found['patched']} of {found['modules']}",
                    *(str(found["checks"].get(status, "")) for status in WORDS),
                    remarks(found),
                ]
                for name, found in states["ran"].items()
            ],
        ),
        "## Types that `patch` refuses\n\n" + reasons(states["refused"]),
        "## Types for which no input is known\n\n" + reasons(states["unrun"]),
        "## Types that were not built\n\n" + reasons(states["unbuilt"]),
    ]
    return "\n\n".join(parts)


def by_tests(data: Report) -> str:
    """How many types ran by transformers' own tests, of which version, and which rows are of an
    earlier run that had them."""
    found = {name: row for name, row in data["types"].items() if row.get("source")}
    if not found:
        return " No type ran by transformers' own tests."
    kept = [f"`{name}`" for name, row in found.items() if "date" in row]
    version = f" (of {data['tests']})" if data.get("tests") else ""
    text = f" {len(found)} types have configs or inputs of transformers' own tests{version}."
    if not kept:
        return text
    return (
        f"{text} This run had no tests, so that {len(kept)} of these rows are of an earlier "
        f"one: {', '.join(kept)}."
    )


def remarks(found: Report) -> str:
    """Every reason once, with the checks that have it; then the modules that are left alone."""
    texts = []
    for status in ("wrong", "refused", "eager"):
        by_reason = defaultdict(list)
        for check, reason in found.get(status, {}).items():
            by_reason[reason].append(check)
        texts += [
            f"{WORDS[status]}: {', '.join(brief(checks))}: {plain(reason)}"
            for reason, checks in by_reason.items()
        ]
    if "chosen" in found:
        texts.append(f"{WORDS['chosen']}: {', '.join(brief(list(found['chosen'])))}")
    if found.get("source"):
        texts.append(f"by {found['source']}")
    if others := [
        f"{field} {found[field]}" for field in ("transformers", "torch", "commit") if field in found
    ]:
        texts.append(f"run with {', '.join(others)}")
    if found.get("skipped"):
        texts.append(f"left alone: {plain('; '.join(found['skipped']))}")
    return "<br>".join(texts)


def brief(checks: list[str]) -> list[str]:
    """`forward none auto`, `forward none compact` become `forward none (auto, compact)`."""
    found: dict[str, list[str]] = {}
    for check in checks:
        head, _, last = check.rpartition(" ")
        found.setdefault(head or last, []).extend([last] if head else [])
    return [f"{head} ({', '.join(lasts)})" if lasts else head for head, lasts in found.items()]


def reasons(types: dict[str, Report]) -> str:
    rows = [
        [f"`{name}`", found.get("cls") or "-", plain(found["reason"])]
        for name, found in types.items()
    ]
    return table(["type", "class", "reason"], rows) if rows else "None."


def plain(text: str) -> str:
    """A reason as one cell."""
    text = re.sub(r"^(PatchError: )?patch: (nothing to patch in \w+:? )?", "", text)
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 240 else text[:237] + "..."
