"""Rows of results: one way to compute one case each. Every result is compared before it is
timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import one_line
from attnops.tune.clock import Timed, Times

Row = dict[str, Any]
"""`case` and `way`; `median_us` and `spread_us`, or in `wrong` why there is no time; `error` and
`budget` of a compared result, in the same unit; further figures, such as `of_bandwidth` or
`tokens_s`."""

FIELDS = ("case", "way", "median_us", "spread_us", "error", "budget", "wrong")
WRONG = "wrong: "  # `wrong` starts with this if a result is wrong, or a way that must run does not

Rows = list[Row]
Case = Callable[[], Iterable[Row]]


class LeftOut(Exception):
    """Raised by a case that this machine cannot measure, with the reason."""


def further(row: Row) -> Row:
    """The figures of a row that not all rows have."""
    return {name: value for name, value in row.items() if name not in FIELDS}


@dataclass(frozen=True)
class Way:
    """An implementation to time. result: computes the tensor to compare, if not `timed.call`.
    budget: overrides the case's."""

    timed: Timed
    result: Callable[[], Any] | None = None
    budget: float | None = None
    more: Row = field(default_factory=dict)

    def computed(self) -> Any:
        """The tensor to compare."""
        return (self.result or self.timed.call)()


Make = Callable[[], Way | None]  # None if it does not answer the call
Ways = dict[str, Way | Make]
More = Callable[[float, Way], Row]  # the further figures of a way that takes so many microseconds


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; inf for another shape or values that are not finite."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return inf
    return float((got.double() - want.double()).abs().max()) if want.numel() else 0.0


def relative_error(got: Tensor, want: Tensor, quantile: float = 1.0) -> float:
    """The given quantile of |got - want| / |want| over rows (last dim), Euclidean norms; inf as in
    `largest_error`."""
    if (largest := largest_error(got, want)) in (0.0, inf):
        return largest
    got, want = got.flatten(0, -2).double(), want.flatten(0, -2).double()
    off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.quantile(off, quantile, interpolation="lower"))


def time_if_right(
    case: str,
    ways: Mapping[str, Way | Make],
    want: Any,
    budget: float,
    clock: Callable[[Mapping[str, Timed]], Times],
    distance: Callable[[Any, Any], float] = largest_error,
    more: More = lambda us, way: {},
    own: Collection[str] = (),
) -> Rows:
    """The rows of one case: every way is run and timed, in turn with the others, if its `distance`
    from `want` is at most its budget.

    own: ways that must run: an error of one of these makes it wrong.
    """
    rows: dict[str, Row] = {name: {"case": case, "way": name} for name in ways}
    right: dict[str, Way] = {}
    with torch.no_grad():
        # All of them first: a patch may move the weights that graphs would have captured.
        for name, way in _made(ways, rows, own).items():
            try:
                error = distance(way.computed(), want)
            except Exception as failure:
                rows[name] |= {**way.more, "wrong": WRONG * (name in own) + one_line(failure)}
                continue
            allowed = budget if way.budget is None else way.budget
            rows[name] |= {**way.more, "budget": digits(allowed)} | (
                {"error": digits(error)} if error < inf else {}
            )
            if error <= allowed < inf:
                right[name] = way
            else:
                off = (
                    f"off by {error:.3g}, allowed {allowed:.3g}"
                    if error < inf
                    else "not finite, or of another shape"
                )
                rows[name]["wrong"] = WRONG + off
        for name, us in clock({name: way.timed for name, way in right.items()}).items():
            rows[name] |= {**us, **more(us["median_us"], right[name])}
    return list(rows.values())


def _made(
    ways: Mapping[str, Way | Make], rows: dict[str, Row], own: Collection[str]
) -> dict[str, Way]:
    """The ways that answer the call. Others lose their row, or it says why there is none."""
    made: dict[str, Way] = {}
    for name, make in ways.items():
        try:
            way = make if isinstance(make, Way) else make()
        except Exception as failure:  # the other ways go on
            rows[name]["wrong"] = WRONG * (name in own) + one_line(failure)
            continue
        if way is None:
            del rows[name]
        else:
            made[name] = way
    return made


def digits(x: float) -> float:
    """The number with the digits that a row has of it."""
    return float(f"{x:.4g}")


def with_ratios(rows: Rows, *peers: str) -> Rows:
    """The rows, each with `of_<peer>`: the peer's time over its own in the same case; above 1 is
    faster than the peer."""
    for peer in peers:
        base = {
            row["case"]: row["median_us"]
            for row in rows
            if row["way"] == peer and "median_us" in row
        }
        for row in rows:
            if row["way"] != peer and row["case"] in base and "median_us" in row:
                row[f"of_{peer}"] = round(base[row["case"]] / row["median_us"], 4)
    return rows


def with_direct(rows: Rows, calls: Callable[[str], Iterable[str]]) -> Rows:
    """The rows, with `of_direct` in those of a way that has `calls`: the time of the fastest of
    these over its own."""
    us = {row["way"]: row["median_us"] for row in rows if "median_us" in row}
    for row in rows:
        best = min((us[name] for name in calls(row["way"]) if name in us), default=None)
        row |= (
            {"of_direct": round(best / row["median_us"], 4)} if best and "median_us" in row else {}
        )
    return rows
