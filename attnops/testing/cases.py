"""The problem grid, `CASES[op]`: every feature on one shape, the important ones on many. The rows
are those of the ops' families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from attnops.ops import OPS
from attnops.ops.case_data import Grid, Rows, Source
from attnops.testing.calls import Call
from attnops.testing.made_calls import make_call


@dataclass(frozen=True)
class Case:
    """One point of the grid. `label` is unique within the op and names its special features."""

    op: str
    label: str
    build: Callable[[Source], Call]

    def call(self, seed: int = 0, device: torch.device | str = "cpu") -> Call:
        """The call with fresh inputs from `seed`."""
        return self.build(Source(seed, device))

    def __str__(self) -> str:
        return f"{self.op}:{self.label}"


def table(op: str, rows: Rows) -> tuple[Case, ...]:
    """A case a row, written as the op's `Grid` says."""

    def made(row: tuple[object, ...], source: Source) -> Call:
        return make_call(op, source, *row)

    return tuple(Case(op, label, partial(made, row)) for label, row in rows.items())


class _Cases(Mapping[str, tuple[Case, ...]]):
    """The cases of every op whose family has some. A family's are imported when they are first
    asked for."""

    def __getitem__(self, op: str) -> tuple[Case, ...]:
        if (grid := _grid(op)) is None:
            raise KeyError(op)
        return table(op, grid.rows)

    def __iter__(self) -> Iterator[str]:
        return (op for op in OPS if _grid(op) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _grid(op: str) -> Grid | None:
    found: Grid | None = OPS[op].of_family("cases", "CASES") if op in OPS else None
    return found


CASES = _Cases()
"""The cases of every op by its name."""
