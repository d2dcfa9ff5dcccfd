"""The journal of a pass of the GPU suite: one JSON line a fact, written when it is known, and the
report that is made of it.

A pass may take several parts, each of several processes. All of them append to one file, so that a
later part goes on where the last one ended, on the same machine or on another to which the file was
carried, and a process that dies loses only its last test.

    {"pass": code, "options": [...]}                     what is tested; a journal of other code or
        options is not continued
    {"part": 1, "at": seconds}                           a part begins
    {"about": {...}}                                     commit, date, device and versions
    {"collected": [test, ...], "alone": [test, ...]}     every test of the pass, and those that run
        with nothing beside them
    {"ready": pid}                                       a process has collected its tests
    {"begun": test, "pid": 1, "at": seconds}
    {"test": test, "outcome": "passed", "seconds": 0.1, "reason": "", "found": {...}, "at": seconds}
    {"stopped": pid}                                     a process met the part's end
    {"broken": text}                                     a process that collected no tests
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
SLOWEST = 40
"""Tests whose seconds a report has."""


@dataclass(frozen=True)
class Journal:
    """A file of JSON lines to which several processes append."""

    path: Path

    def add(self, **record: Any) -> None:
        """Append one record, in one write."""
        line = json.dumps({**record, "at": round(time.time(), 2)}, default=str) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def records(self) -> list[dict[str, Any]]:
        """All records. A line that was cut short is left out."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


@dataclass
class Pass:
    """What a journal says.

    ended: the record of each test that has ended. begun: the process of each that has begun and not
    ended. parts: seconds of each part.
    """

    head: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    collected: dict[str, None] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Pass:
        """Read the records of one journal in order."""
        out, part_began = cls(), 0.0
        for record in records:
            if "pass" in record:
                out.head = {name: record[name] for name in ("pass", "options")}
            elif "part" in record:
                part_began, out.begun = record["at"], {}
                out.parts.append(0.0)
            elif "about" in record:
                out.about |= record["about"]
            elif "collected" in record:
                out.collected |= dict.fromkeys(record["collected"])
                out.alone |= set(record["alone"])
            elif "begun" in record:
                out.begun[record["begun"]] = record
            elif "broken" in record:
                out.broken.append(record["broken"])
            elif "test" in record:
                out._end(record)
            if out.parts and "at" in record:
                out.parts[-1] = max(out.parts[-1], record["at"] - part_began)
        return out

    def _end(self, record: dict[str, Any]) -> None:
        name, before = record["test"], self.ended.get(record["test"])
        self.begun.pop(name, None)
        # A fixture that fails when it is taken down is reported for a test that may have passed in
        # another process.
        if before is None or record["outcome"] == FAILED:
            self.ended[name] = {
                **record,
                "found": joined((before or {}).get("found", {}), record.get("found", {})),
            }

    def left(self, alone: bool) -> list[str]:
        """Tests that have not ended: those that run alone, or the others."""
        return [
            name
            for name in self.collected
            if name not in self.ended and (name in self.alone) == alone
        ]

    @property
    def not_run(self) -> list[str]:
        """Every collected test that has not ended."""
        return [*self.left(False), *self.left(True)]

    def report(self) -> dict[str, Any]:
        """What kernels.json holds. `passed`: something ran, nothing failed, and nothing is left to
        run."""
        outcomes = Counter(record["outcome"] for record in self.ended.values())
        found: dict[str, Any] = {}
        skipped: dict[str, list[str]] = {}
        for name, record in sorted(self.ended.items()):
            found = joined(found, record.get("found", {}))
            if record["outcome"] == SKIPPED:
                skipped.setdefault(record["reason"].partition("\n")[0], []).append(name)
        failed = {
            name: record["reason"]
            for name, record in self.ended.items()
            if record["outcome"] == FAILED
        }
        slowest = sorted(self.ended.values(), key=lambda record: -record["seconds"])[:SLOWEST]
        sections = {
            "failed_tests": failed,
            "skipped_tests": skipped,
            "not_run": self.not_run,
            "broken_processes": self.broken,
            "slowest_s": {record["test"]: record["seconds"] for record in slowest},
        }
        return {
            **found,
            **self.about,
            **{name: section for name, section in sections.items() if section},
            "tests": {
                **{name: outcomes[name] for name in (PASSED, SKIPPED, FAILED)},
                "not_run": len(self.not_run),
            },
            "seconds": round(sum(self.parts)),
            "parts_s": [round(seconds) for seconds in self.parts],
            "passed": bool(outcomes[PASSED]) and not (failed or self.not_run or self.broken),
        }


def joined(a: Any, b: Any) -> Any:
    """Two findings of one name as one: sections and lists are joined, counts added, of fractions
    the larger stays."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {
            **a,
            **{name: joined(a[name], value) if name in a else value for name, value in b.items()},
        }
    if isinstance(a, list) and isinstance(b, list):
        return [*a, *b]
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a and b)
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return max(a, b)
    return a


def text_of(report: dict[str, Any]) -> str:
    """The file's text: a line for each entry of a section, so that it is small and a change is seen
    where it is."""
    sections = []
    for name, section in sorted(report.items()):
        pairs = sorted(section.items()) if isinstance(section, dict) else ()
        entries = [
            f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in pairs
        ]
        sections.append(
            f"{json.dumps(name)}: "
            + ("{\n" + ",\n".join(entries) + "\n}" if entries else json.dumps(section))
        )
    return "{\n" + ",\n".join(sections) + "\n}\n"
