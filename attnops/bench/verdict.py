"""Whether a result is right, before anybody is told how fast it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnops.bench.timing import Timed

WRONG = "wrong: "
"""How `Row.wrong` begins where a result was made and is wrong."""


@dataclass(frozen=True)
class Row:
    """One way of doing one case. All rows of all suites have this form.

    median_us, spread_us: None when no time was taken, for which `wrong` has the reason. error, budget: of the result, in the same unit;
    None when nothing was compared. more: what else was found, as `of_bandwidth`, `of_flops`, `tokens_s`.
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
        """Flat, without what is None."""
        own = {n: getattr(self, n) for n in ("case", "way", "median_us", "spread_us", "error", "budget", "wrong")}
        return {n: v for n, v in own.items() if v not in (None, "")} | dict(self.more)


@dataclass(frozen=True)
class Way:
    """What is timed and what it gives. result: makes what is compared; None for what `timed.call` returns. exact: it is not compared.

    budget: its own, where it may be further off than the others. more: for its row.
    """

    timed: Timed
    result: Callable[[], Tensor] | None = None
    exact: bool = False
    budget: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest difference; infinite where `got` is not finite or of another shape."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max()) if want.numel() else 0.0


def relative_error(got: Tensor, want: Tensor, quantile: float = 1.0) -> float:
    """The largest distance of a row (last dim) from what it should be, over that one's length; or that quantile of the rows."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    got, want = got.flatten(0, -2).double(), want.flatten(0, -2).double()
    off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(off.sort().values[max(0, min(off.numel() - 1, int(quantile * off.numel() + 0.999999) - 1))]) if off.numel() else 0.0


def why(error: BaseException) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def judged(
    case: str,
    ways: Mapping[str, Way],
    want: Tensor | None,
    budget: float,
    clock: Callable[[Mapping[str, Timed]], Mapping[str, Mapping[str, float]]],
    distance: Callable[[Tensor, Tensor], float] = largest_error,
    more: Callable[[float], Mapping[str, Any]] = lambda us: {},
) -> list[Row]:
    """Rows of one case: every way is run, compared with `want`, and timed if it is within its budget.

    budget: of `distance`, unless a way has its own. clock: times the ways that are right, in turn. more: what else a time says.
    """
    rows: dict[str, Row] = {}
    right: dict[str, Timed] = {}
    for name, way in ways.items():
        allowed = budget if way.budget is None else way.budget
        try:
            with torch.no_grad():
                got = _result(way)
                error = None if way.exact or want is None else distance(got, want)
        except Exception as failure:  # whatever one way raises: the others stand
            rows[name] = Row(case, name, wrong=why(failure), more=way.more)
            continue
        if error is None:
            rows[name] = Row(case, name, more=way.more)
        elif error <= allowed < float("inf"):
            rows[name] = Row(case, name, error=_digits(error), budget=_digits(allowed), more=way.more)
        else:
            finite = error < float("inf")
            text = f"{WRONG}off by {error:.3g}, allowed {allowed:.3g}" if finite else f"{WRONG}not finite, or of another shape"
            rows[name] = Row(case, name, error=_digits(error) if finite else None, budget=_digits(allowed), wrong=text, more=way.more)
            continue
        right[name] = way.timed
    with torch.no_grad():
        times = clock(right) if right else {}
    out = []
    for name, row in rows.items():
        if name in times:
            us = times[name]["median_us"]
            row = Row(case, name, us, times[name].get("spread_us"), row.error, row.budget, more={**row.more, **more(us)})
        out.append(row)
    return out


def _result(way: Way) -> Any:
    if way.result is not None:
        return way.result()
    if way.timed.before is not None:
        way.timed.before()
    return way.timed.call()


def _digits(x: float) -> float:
    return float(f"{x:.4g}")


def ratio_to(rows: list[Row], peer: str, field: str) -> list[Row]:
    """The rows, each with `field`: the peer's time over its own in the same case; above 1 is faster than the peer."""
    base = {row.case: row.median_us for row in rows if row.way == peer}
    out = []
    for row in rows:
        of = base.get(row.case)
        ratio = {field: round(of / row.median_us, 4)} if of and row.median_us and row.way != peer else {}
        out.append(Row(**{**vars(row), "more": {**row.more, **ratio}}))
    return out
