"""What was captured, what it took, and what ran without graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .boundary import Break
from .buckets import Bucket


@dataclass(frozen=True)
class Row:
    """One captured bucket. graphs: how many a step replays; breaks: what runs between them; bytes_of: what each graph took.

    seconds: of its capture, warm-up included and compilation not. replays: so far.
    """

    bucket: Bucket
    graphs: int
    breaks: tuple[Break, ...]
    bytes_of: tuple[int, ...]
    seconds: float
    replays: int

    @property
    def mode(self) -> str:
        """`whole`: the step is one graph. `piecewise`: it is several, or one with calls beside it."""
        return "whole" if self.graphs == 1 and not self.breaks else "piecewise"

    @property
    def bytes(self) -> int:
        """What the bucket's graphs took of the device when they were captured, beside what earlier ones had taken."""
        return sum(self.bytes_of)


@dataclass(frozen=True)
class Report:
    """rows: by bucket, as captured. compiled: by trace (see `Bucket`), pieces that differ, compiled once each. parts: by trace, all pieces.

    compile_seconds: tracing, choice of kernels and compilation. input_bytes: of the buffers that graphs read. eager_calls: batches over
    the largest bucket that ran without graphs. dropped: buckets that the budget left no room for. compared: replays that were.
    """

    rows: tuple[Row, ...]
    compiled: dict[str, int]
    parts: dict[str, int]
    compile_seconds: float
    input_bytes: int
    eager_calls: int
    dropped: tuple[Bucket, ...]
    budget_bytes: int | None
    compared: int

    @property
    def graph_bytes(self) -> int:
        """Of all graphs."""
        return sum(r.bytes for r in self.rows)

    @property
    def modes(self) -> dict[str, str]:
        """`whole` or `piecewise`, by kind of batch."""
        return {r.bucket.kind: r.mode for r in self.rows}

    def cells(self) -> list[tuple[str, ...]]:
        """The table, its head first."""
        lines: list[tuple[str, ...]] = [("bucket", "mode", "graphs", "between", "MiB", "seconds", "replays")]
        for r in self.rows:
            between = ", ".join(f"{b} x{n}" if n > 1 else str(b) for b, n in Counter(r.breaks).items()) or "-"
            lines.append((str(r.bucket), r.mode, str(r.graphs), between, f"{r.bytes / 2**20:.1f}", f"{r.seconds:.2f}", str(r.replays)))
        return lines

    def notes(self) -> list[str]:
        """What stands beside the table."""
        out = [f"{n} of {self.parts[kind]} pieces of {kind} steps differ and were compiled" for kind, n in self.compiled.items()]
        if self.compile_seconds:
            out.append(f"compiled in {self.compile_seconds:.1f} s")
        budget = f" of {self.budget_bytes / 2**20:.1f}" if self.budget_bytes is not None else ""
        out.append(f"graphs hold {self.graph_bytes / 2**20:.1f}{budget} MiB, their inputs {self.input_bytes / 2**20:.1f} MiB")
        if self.dropped:
            out.append(f"dropped, as the budget left no room: {', '.join(map(str, self.dropped))}")
        if self.eager_calls:
            out.append(f"{self.eager_calls} calls were over the largest bucket and ran without graphs")
        if self.compared:
            out.append(f"{self.compared} replays were compared with eager")
        return out

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([*lines, *self.notes()])

    def rich(self) -> Any:
        """The same as a table of rich. Raises ImportError where rich is not installed."""
        from rich.table import Table

        head, *lines = self.cells()
        table = Table(*head, caption="\n".join(self.notes()))
        for line in lines:
            table.add_row(*line)
        return table
