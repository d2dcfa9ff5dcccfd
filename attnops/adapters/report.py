"""The report of a patch, and the comparison of a patched module's numbers with those of its own
attention. torch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.errors import PatchError, fail

PATCHED = "patched"


@dataclass(frozen=True)
class Row:
    """One attention module: its name in the model, its class, "patched" or "skipped: reason", and
    how it attends in its phases."""

    path: str
    cls: str
    status: str
    phases: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.phases}" if self.phases else self.status


@dataclass(frozen=True)
class Report:
    """Every attention module of a model with its status, the kernel in force, and notes for the
    user."""

    model: str
    kernel: str | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows of the modules that are switched."""
        return tuple(row for row in self.rows if row.status == PATCHED)

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The rows of the modules that keep their own attention."""
        return tuple(row for row in self.rows if row.status != PATCHED)

    def to_dict(self) -> dict[str, Any]:
        """Strings, lists and dicts only: `json.dumps` takes it."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def _options(self) -> str:
        return f"kernel={self.kernel or 'chosen per call'}"

    def _title(self) -> str:
        return (
            f"{self.model}: {len(self.patched)} of {len(self.rows)} attention modules patched "
            f"({self._options()})"
        )

    def __str__(self) -> str:
        path, cls = (
            max((len(getattr(row, name)) for row in self.rows), default=0)
            for name in ("path", "cls")
        )
        lines = [f"  {row.path:<{path}}  {row.cls:<{cls}}  {row}" for row in self.rows]
        return "\n".join([self._title(), *lines, *(f"  note: {note}" for note in self.notes)])

    def __rich__(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            "module",
            "class",
            "status",
            title=self._title(),
            caption="\n".join(map(escape, self.notes)) or None,
        )
        for row in self.rows:
            table.add_row(
                escape(row.path),
                escape(row.cls),
                escape(str(row)),
                style=None if row.status == PATCHED else "yellow",
            )
        return table


@dataclass(frozen=True)
class Verification:
    """Patched output against that of other attention, over positions that are not padding.

    max_abs: the largest difference. max_rel: that over the largest other value. tolerance: the
    limit of max_rel.
    same_argmax: share of positions where the largest entry is the same one.
    finite: no NaN or infinity anywhere, padding included. against: whose output the other one is.
    """

    output: str
    dtype: str
    positions: int
    max_abs: float
    max_rel: float
    tolerance: float
    same_argmax: float
    finite: bool
    against: str = "eager"

    @property
    def passed(self) -> bool:
        """Within tolerance, and finite everywhere."""
        return self.finite and self.max_rel <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings only."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        figures = (
            f"max abs {self.max_abs:.2e}, relative {self.max_rel:.2e} (limit {self.tolerance:.0e})"
        )
        head = (
            f"{'passed' if self.passed else 'FAILED'}: {self.output} ({self.dtype}, "
            f"{self.positions} positions) against {self.against}"
        )
        return (
            f"{head}: {figures}, same argmax {self.same_argmax:.1%}, finite "
            f"{'yes' if self.finite else 'NO'}"
        )


# Of the largest logit. Rounding differs at every layer, so this is tens of units in the last place,
# not one.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def compare(
    ours: Tensor,
    eager: Tensor,
    visible: Tensor | None,
    name: str,
    tolerance: float | None,
    against: str = "eager",
) -> Verification:
    """The figures of two outputs `[B, S, ...]`, `[B, C]` or `[B]`. visible: 2-D mask `[B, S]` of
    the positions that count."""
    dtype = str(eager.dtype).removeprefix("torch.")
    limit = (
        TOLERANCES.get(eager.dtype, TOLERANCES[torch.float32]) if tolerance is None else tolerance
    )
    finite = bool(torch.isfinite(ours).all())
    if visible is not None and visible.dim() == 2 and visible.shape == eager.shape[:2]:
        seen = visible.to(eager.device).bool()
        ours, eager = ours[seen], eager[seen]
    ours, eager = ours.double(), eager.double()
    if eager.dim() == 1:
        ours, eager = ours[:, None], eager[:, None]
    off, top, same = 0.0, 0.0, 1.0
    if eager.numel():
        off, top = float((ours - eager).abs().max()), float(eager.abs().max())
        same = float((ours.argmax(-1) == eager.argmax(-1)).double().mean())
    return Verification(
        name,
        dtype,
        eager[..., 0].numel(),
        off,
        off / top if top else off,
        limit,
        same,
        finite,
        against,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode. The mode of each module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The floating-point tensors of a model's output by name, the main one first: all `[B, S, ...]`
    or `[B, C]`, else all `[B]`."""
    if isinstance(result, (Tensor, tuple, list)):
        parts = [result] if isinstance(result, Tensor) else result
        result = {f"output {i}": part for i, part in enumerate(parts)}
    items = result.items() if isinstance(result, dict) else ()
    floats = {name: x for name, x in items if isinstance(x, Tensor) and x.is_floating_point()}
    found = {name: x for name, x in floats.items() if x.dim() > 1} or {
        name: x for name, x in floats.items() if x.dim() == 1
    }
    return {
        name: found[name]
        for name in (*(name for name in ("logits", "last_hidden_state") if name in found), *found)
    }


def output_of(result: Any) -> tuple[str, Tensor]:
    """The name and value of the main one of a model's outputs. Raises PatchError without one."""
    for name, value in outputs_of(result).items():
        return name, value
    fail(
        PatchError,
        f"verify: got {type(result).__name__}, want an output with a tensor, as logits or "
        "last_hidden_state",
    )
