"""Two results files side by side: what became faster or slower by more than both spreads, and what is wrong now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnops.bench.report import COUNTS
from attnops.errors import InvalidInput

REGRESSIONS = ("slower", "more", "wrong", "failed")


@dataclass(frozen=True)
class Change:
    """One figure of one row in both files.

    ratio: after over before. verdict: "slower" or "faster" by more than the spreads of both together, "same", "unknown" where a spread is;
    of a count "more", "fewer" or "same"; "wrong" where there is no time any more, "right" where there is one now, "gone", "new"; "failed"
    of a case that did not before; "unlike" of models with other numbers of layers.
    """

    case: str
    way: str
    figure: str
    before: float | None
    after: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """after / before."""
        return round(self.after / self.before, 4) if self.before and self.after is not None else None

    @property
    def worse(self) -> bool:
        """Is it a regression?"""
        return self.verdict in REGRESSIONS

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "ratio": self.ratio, "worse": self.worse}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every figure of either report, in the order of `after`. Reports as `attnops.bench.report.read` gives them.

    Raises InvalidInput: they are of different suites, or have nothing in common.
    """
    suites = [str(report.get("suite")) for report in (before, after)]
    if suites[0] != suites[1]:
        raise InvalidInput("files", f"suites {' and '.join(suites)}", "two of one suite")
    old, new = ({(r["case"], r["way"]): r for r in report["rows"]} for report in (before, after))
    failed = [name for name in after.get("failed", ()) if name not in before.get("failed", ())]
    if not failed and not old.keys() & new.keys():
        raise InvalidInput("files", f"{len(old)} and {len(new)} rows, of which none are of one case and way", "some that are")
    out = [Change(name, "", "median_us", None, None, "failed") for name in failed]
    out += [change for key, row in new.items() for change in _changes(key, old.get(key), row)]
    return out + [Change(*key, "median_us", row.get("median_us"), None, "gone") for key, row in old.items() if key not in new]


def _changes(key: tuple[str, str], old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Iterator[Change]:
    us = new.get("median_us")
    if old is None:
        yield Change(*key, "median_us", None, us, "new")
        return
    before = old.get("median_us")
    if old.get("layers") != new.get("layers"):
        yield Change(*key, "median_us", before, us, "unlike")
        return
    if "wrong" in new or "wrong" in old:
        verdict = "wrong" if "wrong" in new and "wrong" not in old else "right" if "wrong" not in new else "unknown"
        yield Change(*key, "median_us", before, us, verdict)
    elif before is not None and us is not None:
        yield Change(*key, "median_us", before, us, _beyond(us - before, old.get("spread_us"), new.get("spread_us")))
    for name in COUNTS:
        if name in old and name in new:
            verdict = "more" if new[name] > old[name] else "fewer" if new[name] < old[name] else "same"
            yield Change(*key, name, old[name], new[name], verdict)


def _beyond(difference: float, *spreads: float | None) -> str:
    known = [s for s in spreads if s is not None]
    if len(known) < len(spreads):
        return "unknown"
    return "same" if abs(difference) <= sum(known) else "slower" if difference > 0 else "faster"
