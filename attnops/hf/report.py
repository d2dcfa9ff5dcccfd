"""What patching did, and how far the patched model's numbers are from eager's: data first, tables on demand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PATCHED = "patched"


@dataclass(frozen=True)
class Row:
    """One attention module. status: "patched" or "skipped: reason". form: how it attends in which phase, if there are several ways."""

    path: str
    cls: str
    status: str
    form: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.form}" if self.form else self.status


@dataclass(frozen=True)
class Report:
    """Every attention module of a model with its status, the options in force, and what a user should know besides."""

    model: str
    implementation: str
    kernel: str | None
    mask: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    cache: str = "hf"

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows of the modules that are switched."""
        return tuple(row for row in self.rows if row.status == PATCHED)

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The rows of the modules that are left alone."""
        return tuple(row for row in self.rows if row.status != PATCHED)

    def to_dict(self) -> dict[str, Any]:
        """Strings, lists and dicts only: `json.dumps` takes it."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}

    def _title(self) -> str:
        options = f"kernel={self.kernel or 'chosen per call'}, mask={self.mask}, cache={self.cache}"
        return f"{self.model}: {len(self.patched)} of {len(self.rows)} attention modules patched ({options})"

    def __str__(self) -> str:
        widths = [max((len(getattr(row, name)) for row in self.rows), default=0) for name in ("path", "cls")]
        lines = [f"  {row.path:<{widths[0]}}  {row.cls:<{widths[1]}}  {row}" for row in self.rows]
        return "\n".join([self._title(), *lines, *(f"  note: {note}" for note in self.notes)])

    def __rich__(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table("module", "class", "status", title=self._title(), caption="\n".join(map(escape, self.notes)) or None)
        for row in self.rows:
            table.add_row(escape(row.path), escape(row.cls), escape(str(row)), style=None if row.status == PATCHED else "yellow")
        return table


@dataclass(frozen=True)
class Verification:
    """Patched output against eager's, over positions that are not padding.

    max_abs: largest difference. max_rel: that over the largest eager value. tolerance: what max_rel may be.
    same_argmax: share of positions where the largest entry is the same one. finite: no NaN or infinity anywhere, padding included.
    """

    output: str
    dtype: str
    positions: int
    max_abs: float
    max_rel: float
    tolerance: float
    same_argmax: float
    finite: bool

    @property
    def passed(self) -> bool:
        """Within tolerance, and finite everywhere."""
        return self.finite and self.max_rel <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings only."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        return (
            f"{'passed' if self.passed else 'FAILED'}: {self.output} ({self.dtype}, {self.positions} positions) against eager: "
            f"max abs {self.max_abs:.2e}, relative {self.max_rel:.2e} (limit {self.tolerance:.0e}), "
            f"same argmax {self.same_argmax:.1%}, finite {'yes' if self.finite else 'NO'}"
        )
