"""`Row`: one implementation of one case. Every result is compared before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnops.tune.clock import Timed

WRONG = "wrong: "
"""`Row.wrong` starts with this if a result was computed and is wrong."""


@dataclass(frozen=True)
class Row:
    """One way of computing one case, in the form that all suites share.

    Args:
        case: name of the case.
        way: name of the implementation.
        median_us, spread_us: None without a time; `wrong` then has the reason.
        error, budget: of the result, in the same unit; None if nothing was compared.
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


FIELDS = ("case", "way", "median_us", "spread_us", "error", "budget", "wrong")
Case = Callable[[], Iterable[Row]]


class LeftOut(Exception):
    """Raised by a case that this machine cannot measure, with the reason."""


def further(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row (as a dict) that not all rows have."""
    return {name: value for name, value in row.items() if name not in FIELDS}


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
    return float(off.sort().values[max(0, min(off.numel() - 1, int(quantile * off.numel() + 0.999999) - 1))]) if off.numel() else 0.0


def one_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def time_if_right(
    case: str,
    ways: Mapping[str, Way],
    want: Tensor,
    budget: float,
    clock: Callable[[Mapping[str, Timed]], Mapping[str, Mapping[str, float]]],
    distance: Callable[[Tensor, Tensor], float] = largest_error,
    more: Callable[[float], Mapping[str, Any]] = lambda us: {},
) -> list[Row]:
    """The rows of one case: every way is run, compared with `want`, and timed if it is within its budget.

    Args:
        budget: upper bound of `distance`, unless a way has its own.
        clock: times the right ways, interleaved.
        more: further figures of a time in microseconds.
    """
    rows: dict[str, Row] = {}
    for name, way in ways.items():
        allowed = budget if way.budget is None else way.budget
        try:
            with torch.no_grad():
                error = distance(_result(way), want)
        except Exception as failure:  # one way must not fail the others
            rows[name] = Row(case, name, wrong=one_line(failure), more=way.more)
            continue
        finite, text = error < float("inf"), ""
        if not error <= allowed < float("inf"):
            text = f"{WRONG}off by {error:.3g}, allowed {allowed:.3g}" if finite else f"{WRONG}not finite, or of another shape"
        rows[name] = Row(case, name, error=_digits(error) if finite else None, budget=_digits(allowed), wrong=text, more=way.more)
    right = {name: ways[name].timed for name, row in rows.items() if not row.wrong}
    with torch.no_grad():
        times = clock(right) if right else {}
    for name, us in times.items():
        median, spread = us["median_us"], us.get("spread_us")
        rows[name] = replace(rows[name], median_us=median, spread_us=spread, more={**rows[name].more, **more(median)})
    return list(rows.values())


def _result(way: Way) -> Any:
    if way.result is not None:
        return way.result()
    if way.timed.before is not None:
        way.timed.before()
    return way.timed.call()


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
