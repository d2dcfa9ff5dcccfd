"""The rows of a census, put together: what results/cpu/census.json holds, which docs/census.py
shows."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import attnops

Record = dict[str, Any]
Rows = list[Record]


def summary(
    by_type: dict[str, Rows], root: Path, before: Record | None = None, tests: str | None = None
) -> Record:
    """One record of everything: versions, counts, and each type with its checks that are not ok.

    commit, torch: those of most types. A type that was run with others carries its own.

    Args:
        by_type: the rows of each type.
        before: the record of the last run, whose types that ran by transformers' tests are kept
            where this run had none of these.
        tests: the version of transformers' tests, "" where it is not known; None: the run had none.
    """
    import transformers

    before = before or {}
    own = {name: made(rows) for name, rows in by_type.items()}
    usual = {
        field: Counter(one[field] for one in own.values()).most_common(1)[0][0]
        for field in ("commit", "torch")
    }
    usual["transformers"] = transformers.__version__
    types = {
        name: one(rows) | {field: x for field, x in own[name].items() if x != usual[field]}
        for name, rows in sorted(by_type.items())
    }
    kept = (
        {name: found for name, found in before.get("types", {}).items() if found.get("source")}
        if tests is None
        else {}
    )
    for name in types.keys() & kept.keys():
        if types[name]["state"] != "ran":
            then = {field: before[field] for field in ("transformers", "torch", "commit", "date")}
            types[name] = {**then, **kept[name]}
    return {
        "date": date.today().isoformat(),
        **usual,
        "tests": before.get("tests") if tests is None else tests,
        "attnops": attnops.__version__,
        "counts": counts(types),
        "types": types,
    }


def made(rows: Rows) -> dict[str, str]:
    """The commit and the torch that the rows of a type were made with."""
    head = next((row for row in rows if "torch" in row), {})
    return {field: head.get(field, "") for field in ("commit", "torch")}


def one(rows: Rows) -> Record:
    """A type. state: ran, refused (by patch), unrun (no input is known) or unbuilt. compiled: the
    backends of its `compile` checks."""
    head = next(row for row in rows if "built" in row)
    fields = ("cls", "patched", "modules", "skipped", "bound", "source")
    found = {name: head[name] for name in fields if head.get(name) is not None}
    for name, state in (("refused", "refused"), ("unrun", "unrun"), ("reason", "unbuilt")):
        if name in head:
            return {"state": state, **found, "reason": head[name]}
    checks = [row for row in rows if "check" in row]
    tally = dict(sorted(Counter(row["status"] for row in checks).items()))
    rest: dict[str, dict[str, str]] = {}
    for row in checks:
        if row["status"] != "ok":
            rest.setdefault(row["status"], {})[row["check"]] = row["reason"]
    compiled = list(
        dict.fromkeys(
            row["check"].split()[1] for row in checks if row["check"].startswith("compile ")
        )
    )
    return {"state": "ran", **found, "compiled": compiled, "checks": tally, **rest}


def counts(types: dict[str, Record]) -> dict[str, dict[str, int]]:
    """Types by state, checks by status."""
    checks: Counter[str] = Counter()
    for found in types.values():
        checks.update(found.get("checks", {}))
    return {
        "types": dict(sorted(Counter(found["state"] for found in types.values()).items())),
        "checks": dict(sorted(checks.items())),
    }


def commit(root: Path) -> str:
    """The commit of the tree; `$COMMIT`, or nothing, where there is no git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "")
