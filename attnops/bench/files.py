"""Results files: their sections, reading and writing, and the comparison of two."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnops.bench.rows import WRONG, Row
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels
from attnops.measured.store import read_text
from attnops.tried import installed
from attnops.version import VERSION

Report = dict[str, Any]
"""A results file: `rows`, the machine and the versions, and what was left out or failed."""


def environment(device: torch.device | str, commit: str = "") -> Report:
    """Commit, date, device and versions. commit: "" asks git, if this file belongs to a
    checkout."""
    cuda = torch.device(device).type == "cuda"
    return {
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device)
        if cuda
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnops": VERSION,
        "packages": sorted(_packages()),
    }


def _packages() -> set[str]:
    """`name==version` of those that kernels need, and of transformers, whose models the suites
    measure."""
    found = {
        version
        for kernel in all_kernels()
        for version in kernel.versions()
        if not version.endswith("==None")
    }
    models = installed("transformers")
    return found if models is None else {*found, f"transformers=={models}"}


def _commit() -> str:
    folder, name = Path(__file__).resolve().parent, Path(__file__).name
    with suppress(OSError, subprocess.CalledProcessError):
        # git lists no file of a package that is installed into an environment inside some other
        # repository.
        for words in (("ls-files", "--error-unmatch", name), ("rev-parse", "HEAD")):
            found = subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
        return found
    return "unknown"


def bad(reports: Mapping[str, Report]) -> list[str]:
    """A line for every wrong result and failed case. A peer that cannot run here is neither."""
    rows = [
        f"{r['case']}: {r['way']}: {r['wrong']}"
        for x in reports.values()
        for r in x["rows"]
        if r.get("wrong", "").startswith(WRONG)
    ]
    return rows + [
        f"{name}: {why}"
        for report in reports.values()
        for name, why in report.get("failed", {}).items()
    ]


def read(path: Path) -> Report:
    """A results file. Raises InvalidInput if it cannot be read or has no rows."""

    def invalid(reason: str) -> InvalidInput:
        return InvalidInput("file", f"{path}{reason}", "a results file of attnops bench")

    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(f" ({type(error).__name__})") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise invalid(", which has no rows")
    for at, row in enumerate(data["rows"]):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(name), str) for name in ("case", "way")
        ):
            raise invalid(f", whose row {at} has no case and way")
        if odd := [
            name
            for name in ("median_us", "spread_us")
            if not isinstance(row.get(name, 0), (int, float))
        ]:
            raise invalid(f", whose row {at} has no number for {', '.join(odd)}")
    return data


def text_of(report: Report) -> str:
    """A report as JSON with one entry of a section a line, so that diffs are local."""
    return re.sub(r"\n {3,}|\n  (?=[]}])", "", json.dumps(report, sort_keys=True, indent=1)) + "\n"


Change = dict[str, Any]
"""A row in two files: `case`, `way`, the microseconds `before` and `after`, their `ratio`,
`change`, and `worse` for a regression.

`change`: "slower" or "faster" by more than both spreads together, "same", "unknown" without a
spread; "wrong" or "right" if the result became so; "gone", "new"; "failed" of a case; "unlike" of
other layer counts.
"""


def compare(before: Report, after: Report) -> list[Change]:
    """Every row of either report, in the order of `after`. Raises InvalidInput: they are of two
    suites, or share no case and way."""
    suites = [str(report.get("suite")) for report in (before, after)]
    if suites[0] != suites[1]:
        raise InvalidInput("files", f"suites {' and '.join(suites)}", "two of one suite")
    old, new = ({(r["case"], r["way"]): r for r in report["rows"]} for report in (before, after))
    failed = [name for name in after.get("failed", ()) if name not in before.get("failed", ())]
    if not failed and not old.keys() & new.keys():
        raise InvalidInput(
            "files",
            f"{len(old)} and {len(new)} rows without a case and way in common",
            "rows of the same cases and ways",
        )
    out = [_change((name, ""), "failed", {}, {}) for name in failed]
    out += [
        _change(key, _compared(old.get(key, {}), row), old.get(key, {}), row)
        for key, row in new.items()
    ]
    return out + [_change(key, "gone", row, {}) for key, row in old.items() if key not in new]


def _change(key: tuple[str, str], change: str, old: Row, new: Row) -> Change:
    before, after = old.get("median_us"), new.get("median_us")
    ratio = round(after / before, 4) if before and after is not None else None
    found = {"case": key[0], "way": key[1], "before": before, "after": after, "change": change}
    return found | {"ratio": ratio, "worse": change in ("slower", "wrong", "failed")}


def _compared(before: Row, after: Row) -> str:
    if not before or before.get("layers") != after.get("layers"):
        return "unlike" if before else "new"
    if "wrong" in after or "wrong" in before:
        return "right" if "wrong" not in after else "unknown" if "wrong" in before else "wrong"
    if not all("spread_us" in row for row in (before, after)):
        return "unknown"
    more = after["median_us"] - before["median_us"]
    return (
        "same"
        if abs(more) <= before["spread_us"] + after["spread_us"]
        else "slower"
        if more > 0
        else "faster"
    )
