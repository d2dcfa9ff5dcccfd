"""`Row`: one implementation of one case. Every result is compared before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnops.tune.clock import Timed, one_line

WRONG = "wrong: "
"""`Row.wrong` starts with this if a result was computed and is wrong."""


@dataclass(frozen=True)
class Row:
    """One way of computing one case.

    Args:
        case: name of the case.
        way: name of the implementation.
        median_us, spread_us: None without a time; `wrong` then has the reason.
        error, budget: of the result, in the same unit; None if it was not compared.
        wrong: why there is no time.
        more: further figures, such as `of_bandwidth` or `tokens_s`.
    """

    case: str
    way: str
    median_us: float | None = None
    spread_us: float | None = None
    error: float | None = None
    budget: float | None = None
    wrong: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Flat, without empty fields."""
        return {n: v for n, v in vars(self).items() if n != "more" and v not in (None, "")} | dict(self.more)


Case = Callable[[], Iterable[Row]]


class LeftOut(Exception):
    """Raised by a case that this machine cannot measure, with the reason."""


def further(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row (as a dict) that not all rows have."""
    return {name: value for name, value in row.items() if name not in Row.__dataclass_fields__}


@dataclass(frozen=True)
class Way:
    """An implementation to compare and time.

    Args:
        timed: the call to time.
        result: computes the tensor to compare; None takes the result of `timed.call`.
        budget: overrides that of the case.
        more: further figures for the row.
    """

    timed: Timed
    result: Callable[[], Tensor] | None = None
    budget: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def computed(self) -> Any:
        """The tensor to compare."""
        if self.result is not None:
            return self.result()
        if self.timed.before is not None:
            self.timed.before()
        return self.timed.call()


Make = Callable[[], Way | None]
"""Makes a way; None if it does not answer the call. Its error becomes the row's."""


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; inf for another shape or values that are not finite."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max()) if want.numel() else 0.0


def relative_error(got: Tensor, want: Tensor, quantile: float = 1.0) -> float:
    """The given quantile of |got - want| / |want| over rows (last dim), Euclidean norms; inf as in `largest_error`."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    got, want = got.flatten(0, -2).double(), want.flatten(0, -2).double()
    off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.quantile(off, quantile, interpolation="lower")) if off.numel() else 0.0


def time_if_right(
    case: str,
    ways: Mapping[str, Way | Make],
    want: Tensor,
    budget: float,
    clock: Callable[[Mapping[str, Timed]], Mapping[str, Mapping[str, float]]],
    distance: Callable[[Tensor, Tensor], float] = largest_error,
    more: Callable[[float, Way], Mapping[str, Any]] = lambda us, way: {},
) -> list[Row]:
    """The rows of one case: every way is run, compared with `want`, and timed if it is within its budget.

    Args:
        budget: upper bound of `distance`, unless a way has its own.
        clock: times the right ways, interleaved.
        more: further figures of a way and its time in microseconds.
    """
    rows: dict[str, Row] = {}
    right: dict[str, Way] = {}
    made: dict[str, Way] = {}
    with torch.no_grad():
        for name, make in ways.items():  # all of them first: a patch may move the weights that graphs would have captured
            try:
                if (way := make if isinstance(make, Way) else make()) is not None:
                    made[name] = way
            except Exception as failure:  # the other ways go on
                rows[name] = Row(case, name, wrong=one_line(failure))
        for name, way in made.items():
            try:
                error = distance(way.computed(), want)
            except Exception as failure:
                rows[name] = Row(case, name, wrong=one_line(failure), more=way.more)
                continue
            allowed, wrong, finite = budget if way.budget is None else way.budget, "", error < float("inf")
            if error <= allowed < float("inf"):
                right[name] = way
            else:
                wrong = WRONG + (f"off by {error:.3g}, allowed {allowed:.3g}" if finite else "not finite, or of another shape")
            rows[name] = Row(case, name, None, None, _digits(error) if finite else None, _digits(allowed), wrong, way.more)
        for name, us in (clock({name: way.timed for name, way in right.items()}) if right else {}).items():
            median, figures = us["median_us"], {**right[name].more, **more(us["median_us"], right[name])}
            rows[name] = replace(rows[name], median_us=median, spread_us=us.get("spread_us"), more=figures)
    return [rows[name] for name in ways if name in rows]


def _digits(x: float) -> float:
    return float(f"{x:.4g}")


def with_ratios(rows: list[Row], *peers: str) -> list[Row]:
    """The rows, each with `of_<peer>`: the peer's time over its own in the same case; above 1 is faster than the peer."""
    for peer in peers:
        base = {row.case: row.median_us for row in rows if row.way == peer}
        for i, row in enumerate(rows):
            if (of := base.get(row.case)) and row.median_us and row.way != peer:
                rows[i] = replace(row, more={**row.more, f"of_{peer}": round(of / row.median_us, 4)})
    return rows
