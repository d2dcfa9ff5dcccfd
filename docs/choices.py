"""The table of docs/kernels.md of calls that few kernels take, from benchmarks/choices."""

from __future__ import annotations

import sys
from functools import cache
from itertools import groupby

from results import ROOT, table

sys.path.insert(0, str(ROOT))
from benchmarks.choices import kinds


@cache
def decided() -> list[dict[str, str]]:
    """A row a call, of the table and of the file beside the calls."""
    return kinds.rows()


def choices_full() -> str:
    """A row a kind and kernel, then the kinds that no kernel takes, with the reason."""
    found, lines = decided(), []
    for (op, kind), rows in groupby(found, lambda row: (row["op"], row["kind"])):
        by_kernels: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            by_kernels.setdefault(tuple(row[name] for name in kinds.TARGETS), []).append(
                row["case"]
            )
        for kernels, cases in by_kernels.items():
            lines.append([f"`{op}`", kind, "; ".join(cases), *(f"`{k}`" for k in kernels)])
    left = [[kind, kinds.REASONS[kind]] for kind in sorted(kinds.left(found))]
    return "\n\n".join(
        [
            table(["op", "kind", "calls", *kinds.TARGETS], lines),
            f"Left to `reference` are {len(left)} kinds:",
            table(["kind", "why"], left),
        ]
    )
