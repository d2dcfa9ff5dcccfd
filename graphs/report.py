"""The report of captures: graphs, time, memory, and calls without graphs; and a progress bar for
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .buckets import Bucket
from .graph_breaks import Break


@dataclass(frozen=True)
class Row:
    """One captured bucket.

    graphs: the number of graphs of a step.
    breaks: the calls between them.
    bytes_of: memory that each graph took at its capture.
    seconds: time of its capture with warm-up, without compilation.
    replays: the number so far.
    """

    bucket: Bucket
    graphs: int
    breaks: tuple[Break, ...]
    bytes_of: tuple[int, ...]
    seconds: float
    replays: int

    @property
    def mode(self) -> str:
        """`whole` for a step that is one graph, `piecewise` for several graphs or further calls."""
        return "whole" if self.graphs == 1 and not self.breaks else "piecewise"

    @property
    def bytes(self) -> int:
        """Memory that the bucket's graphs took at their capture, in addition to earlier graphs."""
        return sum(self.bytes_of)


@dataclass(frozen=True)
class Report:
    """The report of a `Graphed`.

    rows: captured buckets in order.
    compiled: the number of distinct pieces by trace (see `Bucket`).
    parts: the number of all pieces by trace.
    compile_seconds: time of tracing, choice of kernels and compilation.
    input_bytes: size of the input buffers.
    eager_calls: batches over the largest bucket, run without graphs.
    dropped: buckets over the memory budget.
    compared: replays that were compared with eager.
    whole: of a model whose layers are repeated, why it was traced whole and not layer by layer; ""
    where it was not.
    recorded: distinct layers, and modules beside them, whose graphs run without a compiler.
    not_recorded: why the model runs as it is instead; "" where it does not.
    """

    rows: tuple[Row, ...]
    compile_seconds: float
    input_bytes: int
    eager_calls: int
    dropped: tuple[Bucket, ...]
    budget_bytes: int | None
    compared: int
    compiled: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    whole: str = ""
    recorded: int = 0
    not_recorded: str = ""

    @property
    def graph_bytes(self) -> int:
        """Memory of all graphs."""
        return sum(r.bytes for r in self.rows)

    @property
    def modes(self) -> dict[str, str]:
        """`whole` or `piecewise`, by kind of batch."""
        return {r.bucket.label: r.mode for r in self.rows}

    def _table(self) -> list[str]:
        cells: list[tuple[str, ...]] = [
            ("bucket", "mode", "graphs", "between", "MiB", "seconds", "replays")
        ]
        for r in self.rows:
            between = (
                ", ".join(f"{b} x{n}" if n > 1 else str(b) for b, n in Counter(r.breaks).items())
                or "-"
            )
            cells.append(
                (
                    str(r.bucket),
                    r.mode,
                    str(r.graphs),
                    between,
                    f"{r.bytes / 2**20:.1f}",
                    f"{r.seconds:.2f}",
                    str(r.replays),
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]

    def __str__(self) -> str:
        out = self._table()
        out += [
            f"{n} of {self.parts[kind]} pieces of {kind} steps differ and were compiled"
            for kind, n in self.compiled.items()
        ]
        if self.whole:
            out.append(f"traced whole: {self.whole}")
        if self.recorded:
            out.append(f"{self.recorded} distinct layers and modules run without a compiler, fused")
        if self.not_recorded:
            out.append(f"runs as it is: {self.not_recorded}")
        if self.compile_seconds:
            out.append(f"compiled in {self.compile_seconds:.1f} s")
        budget = f" of {self.budget_bytes / 2**20:.1f}" if self.budget_bytes is not None else ""
        out.append(
            f"graphs hold {self.graph_bytes / 2**20:.1f}{budget} MiB, their inputs "
            f"{self.input_bytes / 2**20:.1f} MiB"
        )
        if self.dropped:
            out.append(f"dropped, over the memory budget: {', '.join(map(str, self.dropped))}")
        if self.eager_calls:
            out.append(
                f"{self.eager_calls} calls were over the largest bucket and ran without graphs"
            )
        if self.compared:
            out.append(f"{self.compared} replays were compared with eager")
        return "\n".join(out)


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar for `Graphed.capture(progress=...)`. Raises ImportError where rich is not
    installed."""
    from rich.progress import Progress

    with Progress() as drawn:
        task = drawn.add_task("capture", total=None)

        def tell(done: int, total: int, bucket: str) -> None:
            drawn.update(task, completed=done, total=total, description=bucket)

        yield tell
